"""One rank's part in a save: its state is captured, copied to other ranks, and kept.

What comes of it is told to all ranks when they finalize the save (``base.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from typing import Any

from torch.profiler import record_function

from localckpt.async_save.callers import OWN_WORK
from localckpt.async_save.foreign import ForeignOutcome, RunAndTell, WaitForTrainer
from localckpt.async_save.processes import NotSendableError
from localckpt.async_save.request import AsyncCall, runs_in_trainer
from localckpt.errors import CheckpointingException
from localckpt.failure_texts import described, with_class
from localckpt.ids import CkptID
from localckpt.managers.coverage import SaveOutcome
from localckpt.managers.replicator import Replicator
from localckpt.managers.reports import SaveUnderWay
from localckpt.managers.shelf import Shelf, StagedShard
from localckpt.ranks.failure import Attempt
from localckpt.state_dict.basic import wrapped
from localckpt.threads import SerialThread, Task

__all__ = ["Saving"]

logger = logging.getLogger(__name__)


class Saving:
    """The saves of one manager on this rank.

    Args:
        shelf: Where shards are staged and kept.
        replicator: Has copies made on other ranks; ``None`` for none.
        keep: Keeps a shard, given its payload and its ID.
        check: Runs once it is known which shards a save keeps here; raises if it cannot.
        by_process: Whether another process keeps this rank's own shard.
        timeout_s: The longest that a save in a foreign queue is waited for, in seconds.
    """

    def __init__(
        self,
        shelf: Shelf,
        replicator: Replicator | None,
        keep: Callable[[Any, CkptID], None],
        check: Callable[[], None],
        *,
        by_process: bool,
        timeout_s: float,
    ) -> None:
        self._shelf = shelf
        self._replicator = replicator
        self._keep = keep
        self._check = check
        self._by_process = by_process
        self._timeout_s = timeout_s
        # Made when needed: a manager that has none can be handed to another process.
        self._thread: SerialThread | None = None
        self._outcomes: list[ForeignOutcome] = []

    def begin(self, save: SaveUnderWay, state: Any) -> None:
        """Capture the state, and have the ranks that keep replicas exchange images.

        What goes wrong is told when all ranks finalize, so that none is left waiting for this one.
        """
        try:
            self._stage(save, state)
            if self._by_process:
                self._shelf.wait_staged()
            if not save.copies_come_later:
                self._add_copies(save)
        except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
            _note_failure(save, error)
        save.returned = time.monotonic()

    def call(
        self, save: SaveUnderWay, failed: Callable[[BaseException], None]
    ) -> tuple[AsyncCall, tuple[Any, ...]]:
        """A call and its arguments that keep what is here once :meth:`begin` has returned.

        Args:
            save: Which save.
            failed: Runs in a queue of ours when the save has failed on some rank.
        """
        function, args = self._work(save)
        call = AsyncCall(
            function,
            failure_fns=[failed],
            stop_fns=[self.cancel],
            then_fn=lambda: self.finish(save),
            scheduled_fn=save.take_ticket,
            # A request that is frozen twice is written once.
            hand_over=cache(lambda: self._hand_over(save)),
        )
        return call, args

    def _work(self, save: SaveUnderWay) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._by_process:
            return self._shelf.worker_call(save.shards)
        return self._keep_staged, (save,)

    def _hand_over(self, save: SaveUnderWay) -> Callable[[], None]:
        """Begin here what a foreign queue cannot do, and give what its process is to run.

        The process writes from shared memory, or waits for the thread that writes from private
        memory. The thread also waits for the copies that other ranks send, and keeps them.
        """
        save.outcome, save.is_scheduled = ForeignOutcome(), True
        self._outcomes.append(save.outcome)
        function: Callable[[], None] = WaitForTrainer(save.outcome.place, self._timeout_s)
        work: Callable[[], None] | None = None
        if self._by_process:
            with suppress(NotSendableError):
                function = RunAndTell.of(save.outcome, *self._work(save), {})
        if isinstance(function, WaitForTrainer):
            keep, args = self._work(save)
            work = partial(keep, *args)
        if self._thread is None:
            self._thread = SerialThread("localckpt-foreign")
        save.here = Task(partial(self._do_here, save, save.outcome, work))
        self._thread.submit(save.here)
        return function

    def _do_here(
        self, save: SaveUnderWay, outcome: ForeignOutcome, work: Callable[[], None] | None
    ) -> None:
        try:
            if work is not None:
                work()
            self.finish(save)
        except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
            _note_failure(save, error)
        finally:
            if work is not None:
                outcome.tell(save.error)

    def _take_over(self, save: SaveUnderWay) -> None:
        """Learn what came of a save that was handed over.

        Raises:
            CheckpointingException: The thread of this process has not ended in time.
        """
        if save.outcome is None or save.here is None:
            return
        # Less than the other ranks wait for this one, so that they hear the reason from it.
        save.here.wait(OWN_WORK * self._timeout_s)
        save.error = save.error or save.outcome.error
        self._outcomes.remove(save.outcome)
        save.outcome.close()
        if not save.here.done():
            raise CheckpointingException(
                f"iteration {save.identity.iteration} was not written "
                f"{OWN_WORK * self._timeout_s:g} s after the queue had finished it"
            )
        # The other process may have ended after the thread.
        save.durable = time.monotonic()

    def finish(self, save: SaveUnderWay) -> None:
        """Keep what comes from other ranks, too; then this rank's part is over."""
        if save.durable is not None:
            return
        if save.copies_come_later:
            staged = len(save.shards)
            try:
                self._add_copies(save)
            except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
                _note_failure(save, error)
            self.keep_all(save.shards[staged:])
        save.durable = time.monotonic()

    def outcome(self, save: SaveUnderWay, copies_wanted: int) -> SaveOutcome:
        """What this rank tells the others of a save.

        Args:
            save: Which; its call is over.
            copies_wanted: On how many nodes this rank's shard is to be.
        """
        missing: list[CkptID] = []
        with Attempt() as finishing:
            self._take_over(save)
            # A queue that is neither ours nor froze the request has not run it.
            self.finish(save)
            missing += [
                s.identity.ckpt_id for s in save.shards if not self._shelf.holds(s.identity)
            ]
        return SaveOutcome(
            save.identity.iteration,
            save.identity.generation,
            save.error or finishing.told,
            tuple(missing),
            tuple(save.kept),
            copies_wanted,
            save.group,
        )

    def settle(self, save: SaveUnderWay) -> None:
        """Return when nothing is being sent or received for a save, or its deadlines are past."""
        if self._replicator is not None:
            self._replicator.settle(save)

    def cancel(self) -> None:
        """End what is under way between ranks; the others may not come any more."""
        if self._replicator is not None:
            self._replicator.cancel()

    def keep_all(self, shards: Iterable[StagedShard]) -> None:
        """Keep shards, one after the other."""
        for shard in shards:
            self._keep(shard.payload, shard.identity.ckpt_id)

    def close(self) -> None:
        """Wait for what is under way."""
        if self._replicator is not None:
            self._replicator.close()
        if self._thread is not None:
            self._thread.close()
        for outcome in self._outcomes:
            outcome.close()
        self._outcomes.clear()

    def _stage(self, save: SaveUnderWay, state: Any) -> None:
        travels = self._replicator is not None
        try:
            with record_function("localckpt.stage"):
                own = self._shelf.stage(wrapped(state), save.identity, travels=travels)
        except Exception as error:
            if self._replicator is not None:
                self._replicator.begin(save, self._shelf, None, described(error))
            raise
        save.shards.append(own)
        save.staged = time.monotonic()
        if self._replicator is not None:
            with record_function("localckpt.replicate"):
                self._replicator.begin(save, self._shelf, own)

    def _add_copies(self, save: SaveUnderWay) -> None:
        """Now all shards are known that this rank is to keep."""
        if self._replicator is not None:
            save.shards += self._replicator.finish(save)
        self._check()

    @runs_in_trainer
    def _keep_staged(self, save: SaveUnderWay) -> None:
        save.is_scheduled = True
        self._shelf.wait_sealed()
        try:
            self.keep_all(save.shards)
        except BaseException as error:
            if not isinstance(error, Exception):
                # An interrupt: nothing is waited for that other ranks are to do.
                self.cancel()
            # This save is not over while others send to it.
            self.settle(save)
            raise


def _note_failure(save: SaveUnderWay, error: Exception) -> None:
    logger.error(
        "rank %d cannot save iteration %d: %s",
        save.identity.rank,
        save.identity.iteration,
        # Its text alone: handlers may keep it, and with the exception the memory of the image.
        str(error),
        exc_info=not isinstance(error, CheckpointingException),
    )
    # What went wrong first is why; what follows from it says less.
    save.error, save.shards = save.error or with_class(error), []
    if save.copies is not None and save.copies.done():
        # It may hold this error, and that what it came through, this save included.
        save.copies = None
