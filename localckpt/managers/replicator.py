"""Replication of saved shards to other ranks: at once, or behind training.

Replications are made one after the other in the order in which the saves were called, which is the
same on all ranks; who runs the requests that ``save`` returns, and when, does not matter to them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.ids import Group, ShardIdentity
from localckpt.options import Options
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.replication.base import STEPS, ReplicationStrategy
from localckpt.storage.store import Slot, Store
from localckpt.threads import Latch, Task

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replication:
    """State of the replication of one save.

    Attributes:
        identity: Identity of this rank's shard.
        task: Returns the slots of other ranks' shards; ``None`` before it is begun.
        comes_later: Whether the copies are made behind training.
        kept: Ranks whose shards have come here.
        group: The group for which a piece of another kind is kept here.
        seconds: Time that it took; ``None`` before it is over.
        sent_nbytes: Bytes that this rank sent; ``None`` before it is over, or if nobody counts.
    """

    identity: ShardIdentity
    task: Task[list[Slot]] | None = None
    comes_later: bool = False
    kept: list[int] = field(default_factory=list)
    group: Group | None = None
    seconds: float | None = None
    sent_nbytes: int | None = None


class Replicator:
    """Replication of one manager's saves."""

    def __init__(self, strategy: ReplicationStrategy, options: Options) -> None:
        self._strategy = strategy
        self._timeout_s = options.timeout
        self._background = options.background
        self._strict = options.strict
        self._last: Latch | None = None

    @property
    def is_behind_training(self) -> bool:
        """True if :meth:`begin` returns before the copies are made."""
        if self._background is None:
            return not self._strategy.sends_from_devices
        return self._background

    def begin(
        self,
        replication: Replication,
        store: Store,
        own: Slot | None,
        error: str | None = None,
    ) -> None:
        """Begin to make the copies of a save; all ranks call it once for each save.

        Without ``own``, which could not be captured, the others of the clique raise ``error``, too.
        """
        self._strategy.begin_copies()
        copies = replication.task = Task(partial(self._replicate, replication, store, own, error))
        if self.is_behind_training:
            try:
                self._strategy.thread.submit(copies)
            except BaseException:
                # No thread can be had, as while the interpreter ends, or an interrupt.
                if copies.call_off():
                    replication.task = None
                raise
            self._last = copies.over
            replication.comes_later = True
            return
        self._strategy.thread.run(copies)
        failure = copies.error
        if failure is not None and (own is not None or not isinstance(failure, Exception)):
            try:
                raise failure
            finally:
                # Else the error would keep itself by these variables.
                del failure, copies

    def finish(self, replication: Replication) -> list[Slot]:
        """Return the slots of other ranks' shards that have come here."""
        # Looked at once: another thread may drop them when they have failed.
        if (copies := replication.task) is None:
            return []
        self.await_exchanged(replication)
        if not copies.done():
            raise CheckpointingException(
                f"replicating iteration {replication.identity.iteration} has not ended after "
                f"{STEPS * self._timeout_s:g} s: is a disk or a network interface stuck?"
            )
        try:
            return copies.result()
        finally:
            # An error keeps the frames that it came through: it must not be in one of them itself.
            del copies

    def await_exchanged(self, replication: Replication) -> None:
        """Wait until nothing is sent or received for a save, or its deadlines have passed."""
        if (copies := replication.task) is not None:
            copies.wait(STEPS * self._timeout_s)

    def waits_for(self, replication: Replication) -> str:
        """Describe, in any thread, the peers that a replication waits for; empty if it is over."""
        if (copies := replication.task) is None or copies.done():
            return ""
        if not (peers := self._strategy.waits_for()):
            return ""
        own = replication.identity
        return f"rank {own.rank} was replicating iteration {own.iteration}, and waited for {peers}"

    def cancel(self) -> None:
        """End the exchange that is under way; the other ranks may not come any more."""
        self._strategy.give_up()

    def close(self) -> None:
        """Wait for the replications that are under way."""
        if self._last is not None:
            self._last.wait()

    def _replicate(
        self,
        replication: Replication,
        store: Store,
        own: Slot | None,
        error: str | None,
    ) -> list[Slot]:
        try:
            return self._exchange(replication, store, own, error)
        except Exception as failure:
            # Else the frames, and with them the images, would stay until cycles are collected.
            forget_frames(failure)
            raise
        finally:
            if own is not None:
                own.end_hold("replication")

    def _exchange(
        self, replication: Replication, store: Store, own: Slot | None, error: str | None
    ) -> list[Slot]:
        began = time.monotonic()
        with Attempt() as staging:
            if own is not None:
                own.await_copied()
        try:
            slots = self._strategy.protect(
                own,
                replication.identity,
                store,
                self._timeout_s,
                on_gpu=bool(own and own.gpu) and not self.is_behind_training,
                error=error or staging.error_text,
            )
        except PeerLostError as failure:
            if self._strict:
                raise
            logger.warning(
                "iteration %d has no copies of the shards of this clique: %s",
                replication.identity.iteration,
                str(failure),
            )
            forget_frames(failure)
            return []
        pieces = [slot.identity.piece for slot in slots]
        replication.kept = [piece.rank for piece in pieces if piece.is_shard]
        if not all(piece.is_shard for piece in pieces):
            replication.group = self._strategy.protection[replication.identity.rank]
        replication.seconds = time.monotonic() - began
        replication.sent_nbytes = self._strategy.sent_nbytes
        return slots
