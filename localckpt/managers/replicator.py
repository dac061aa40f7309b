"""Has copies of a save's shard made on other ranks: at once, or behind training.

Replications are made one after the other in the order in which the saves were called, which is the
same on all ranks; who runs the requests that ``save`` returns, and when, does not matter to them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from functools import partial

from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.ids import CkptID, ParityGroup, ShardIdentity
from localckpt.managers.reports import SaveUnderWay
from localckpt.managers.shelf import Shelf, StagedShard
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.replication.base import STEPS, ReplicationStrategy, Turn
from localckpt.state_dict.parity_image import ParityRoom
from localckpt.state_dict.parity_of import ParityOf
from localckpt.threads import SerialThread, Task

__all__ = ["Replicator"]

logger = logging.getLogger(__name__)


class Replicator:
    """The replication of one manager's saves.

    Args:
        strategy: Makes the copies.
        timeout_s: The manager's deadline, in seconds.
        background: Whether training goes on meanwhile; ``None``: if no GPU carries the bytes.
        strict: Whether a save fails when a peer is lost; else it stands without copies.
    """

    def __init__(
        self,
        strategy: ReplicationStrategy,
        timeout_s: float,
        *,
        background: bool | None,
        strict: bool,
    ) -> None:
        self._strategy = strategy
        self._timeout_s = timeout_s
        self._background = background
        self._strict = strict
        # Made when needed: a manager that has none can be handed to another process.
        self._thread: SerialThread | None = None

    @property
    def is_behind_training(self) -> bool:
        """Whether :meth:`begin` returns before the copies are made."""
        if self._background is None:
            return not self._strategy.sends_from_devices
        return self._background

    def begin(
        self,
        save: SaveUnderWay,
        shelf: Shelf,
        own: StagedShard | None,
        error: str | None = None,
    ) -> None:
        """Have the copies made; all ranks call it once for each save.

        Args:
            save: Where the outcome is kept; see :meth:`finish`.
            shelf: Keeps the shards of other ranks.
            own: This rank's shard; ``None`` if it could not be staged.
            error: Why not; the others of the clique are told.
        """
        turn = self._strategy.take_turn()
        copies = save.copies = Task(partial(self._replicate, turn, save, shelf, own, error))
        if self.is_behind_training:
            if self._thread is None:
                self._thread = SerialThread("localckpt-replicate")
            try:
                self._thread.submit(copies)
            except BaseException:
                # No thread can be had, as while the interpreter ends, or an interrupt.
                if copies.call_off():
                    save.copies = None
                    turn.end()
                raise
            save.copies_come_later = True
            return
        copies.run()
        failure = copies.error
        if failure is not None and (own is not None or not isinstance(failure, Exception)):
            try:
                raise failure
            finally:
                # Else the error would keep itself by these variables.
                del failure, copies

    def finish(self, save: SaveUnderWay) -> list[StagedShard]:
        """Other ranks' shards that have come here and are to be kept.

        Raises:
            CheckpointingException: The copies could not be made, and the save must not stand
                without them; or nobody knows, after all deadlines.
        """
        # Looked at once: another thread may drop them when they have failed.
        if (copies := save.copies) is None:
            return []
        self.settle(save)
        if not copies.done():
            raise CheckpointingException(
                f"replicating iteration {save.identity.iteration} has not ended after "
                f"{STEPS * self._timeout_s:g} s: is a disk or a network interface stuck?"
            )
        try:
            return copies.result()
        finally:
            # An error keeps the frames that it came through: it must not be in one of them itself.
            del copies

    def settle(self, save: SaveUnderWay) -> None:
        """Return when nothing is being sent or received for a save, or its deadlines are past."""
        if (copies := save.copies) is not None:
            copies.wait(STEPS * self._timeout_s)

    def cancel(self) -> None:
        """End what is under way; the other ranks may not come any more."""
        self._strategy.give_up()

    def close(self) -> None:
        """Wait for what is under way."""
        if self._thread is not None:
            self._thread.close()

    def _replicate(
        self,
        turn: Turn,
        save: SaveUnderWay,
        shelf: Shelf,
        own: StagedShard | None,
        error: str | None,
    ) -> list[StagedShard]:
        turn.is_taken_up = True
        try:
            if not turn.wait(STEPS * self._timeout_s):
                raise CheckpointingException(
                    f"iteration {save.identity.iteration} is not replicated: the replication "
                    f"before it has not ended after {STEPS * self._timeout_s:g} s"
                )
            return self._exchange(save, shelf, own, error)
        except Exception as failure:
            # Else the frames, and with them the images, would stay until cycles are collected.
            forget_frames(failure)
            raise
        finally:
            shelf.was_sent(save.identity)
            turn.end()

    def _exchange(
        self, save: SaveUnderWay, shelf: Shelf, own: StagedShard | None, error: str | None
    ) -> list[StagedShard]:
        began = time.monotonic()
        rooms: list[ShardIdentity] = []
        group: ParityGroup | None = None

        def make_room(peer: CkptID, nbytes: int) -> memoryview:
            rooms.append(dataclasses.replace(save.identity, rank=peer.rank))
            return shelf.make_room(rooms[-1], nbytes)

        def make_parity_room(of: ParityOf, heads_nbytes: int, parity_nbytes: int) -> ParityRoom:
            nonlocal group
            group = of.group
            rooms.append(save.identity.parity)
            return shelf.make_parity_room(rooms[-1], of, heads_nbytes, parity_nbytes)

        with Attempt() as staging:
            shelf.wait_staged()
        try:
            self._strategy.replicate_image(
                own.source if own else None,
                save.identity.ckpt_id,
                make_room,
                tensors_on_gpu=bool(own and own.on_gpu) and not self.is_behind_training,
                error=error or staging.told,
                accept_parity=make_parity_room,
            )
            shards = [shelf.received(identity) for identity in rooms]
        except Exception as failure:
            shelf.drop_unfinished(rooms)
            if self._strict or not isinstance(failure, PeerLostError):
                raise
            logger.warning(
                "iteration %d has no copies of the shards of this clique: %s",
                save.identity.iteration,
                str(failure),
            )
            forget_frames(failure)
            return []
        save.kept = [s.identity.rank for s in shards if not s.identity.is_parity]
        save.group = group
        save.replicate_s = time.monotonic() - began
        return shards
