"""Replication of a saved shard to other ranks: at once, or behind training.

Replications are made one after the other in the order in which the saves were called, which is the
same on all ranks; who runs the requests that ``save`` returns, and when, does not matter to them.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.ids import Group, ShardIdentity
from localckpt.options import Options
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.replication.base import STEPS, ReplicationStrategy
from localckpt.storage.store import Slot, Store
from localckpt.threads import Task

logger = logging.getLogger(__name__)


class Replication:
    """Replication of one save.

    Attributes:
        comes_later: Whether the copies are made behind training.
        kept: Ranks whose shards have come here.
        group: The group for which a piece of another kind is kept here.
        seconds: Time that it took; ``None`` before it is over.
        sent_nbytes: Bytes that this rank sent; ``None`` before it is over, or if nobody counts.
    """

    def __init__(
        self, strategy: ReplicationStrategy, options: Options, identity: ShardIdentity
    ) -> None:
        self._strategy = strategy
        self._options = options
        self._identity = identity
        # Returns the slots of other ranks' shards.
        self._task: Task[list[Slot]] | None = None
        self.comes_later = False
        self.kept: list[int] = []
        self.group: Group | None = None
        self.seconds: float | None = None
        self.sent_nbytes: int | None = None

    @property
    def _is_behind_training(self) -> bool:
        background = self._options.background
        return not self._strategy.sends_from_devices if background is None else background

    def begin(self, store: Store, own: Slot | None, error: str | None = None) -> None:
        """Begin to make the copies; all ranks call it once for each save.

        Without ``own``, which could not be captured, the others of the clique raise ``error``, too.
        """
        self._strategy.begin_copies()
        copies = self._task = Task(partial(self._replicate, store, own, error))
        if self._is_behind_training:
            try:
                self._strategy.thread.submit(copies)
            except BaseException:
                # No thread can be had, as while the interpreter ends, or an interrupt.
                if copies.call_off():
                    self._task = None
                raise
            self.comes_later = True
            return
        self._strategy.thread.run(copies)
        failure = copies.error
        if failure is not None and (own is not None or not isinstance(failure, Exception)):
            try:
                raise failure
            finally:
                # Else the error would keep itself by these variables.
                del failure, copies

    def finish(self) -> list[Slot]:
        """Return the slots of other ranks' shards that have come here."""
        # Looked at once: another thread may drop them when they have failed.
        if (copies := self._task) is None:
            return []
        self.wait()
        if not copies.done():
            raise CheckpointingException(
                f"replicating iteration {self._identity.iteration} has not ended after "
                f"{STEPS * self._options.timeout:g} s: is a disk or a network interface stuck?"
            )
        try:
            return copies.result()
        finally:
            # An error keeps the frames that it came through: it must not be in one of them itself.
            del copies

    def wait(self) -> None:
        """Wait until nothing is sent or received, or its deadlines have passed."""
        if (copies := self._task) is not None:
            copies.wait(STEPS * self._options.timeout)

    def waits_for(self) -> str:
        """Describe, in any thread, the peers that it waits for; empty if it is over."""
        if (copies := self._task) is None or copies.done():
            return ""
        if not (peers := self._strategy.waits_for()):
            return ""
        own = self._identity
        return f"rank {own.rank} was replicating iteration {own.iteration}, and waited for {peers}"

    def forget_error(self) -> None:
        """Drop what is over: it may hold an error, whose frames hold the save."""
        if self._task is not None and self._task.done():
            self._task = None

    def _replicate(self, store: Store, own: Slot | None, error: str | None) -> list[Slot]:
        try:
            return self._exchange(store, own, error)
        except Exception as failure:
            # Else the frames, and with them the images, would stay until cycles are collected.
            forget_frames(failure)
            raise
        finally:
            if own is not None:
                own.end_hold("replication")

    def _exchange(self, store: Store, own: Slot | None, error: str | None) -> list[Slot]:
        began = time.monotonic()
        with Attempt() as staging:
            if own is not None:
                own.await_copied()
        try:
            slots = self._strategy.protect(
                own,
                self._identity,
                store,
                self._options.timeout,
                on_gpu=bool(own and own.gpu) and not self._is_behind_training,
                error=error or staging.error_text,
            )
        except PeerLostError as failure:
            if self._options.strict:
                raise
            logger.warning(
                "iteration %d has no copies of the shards of this clique: %s",
                self._identity.iteration,
                str(failure),
            )
            forget_frames(failure)
            return []
        pieces = [slot.identity.piece for slot in slots]
        self.kept = [piece.rank for piece in pieces if piece.is_shard]
        if not all(piece.is_shard for piece in pieces):
            self.group = self._strategy.protection[self._identity.rank]
        self.seconds = time.monotonic() - began
        self.sent_nbytes = self._strategy.sent_nbytes
        return slots
