"""The two tiers of a training loop's checkpoints: the nodes, and shared storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, SupportsFloat, TypeAlias

from localckpt.async_save.queue import AsyncCallsQueue
from localckpt.availability.retention import Retention
from localckpt.checkpointer.fit import why_parts_are_others
from localckpt.checkpointer.parts import OURS, described
from localckpt.checkpointer.selection import PartsToLoad
from localckpt.checkpointer.shared import SharedState
from localckpt.checkpointer.words import worded
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    DivergenceError,
    MismatchError,
    PeerLostError,
    SameMachineReplicationException,
    SaveFailedError,
    StorageError,
    UnsafeGlobalError,
)
from localckpt.events.stream import EventStream
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.managers.local import LocalCheckpointManager
from localckpt.managers.memory import InMemoryCheckpointManager
from localckpt.managers.restoring import LoadOptions
from localckpt.options import PrivateRule
from localckpt.ranks.deadline import answered
from localckpt.ranks.failure import forget_frames
from localckpt.ranks.ranks import Ranks
from localckpt.replication.strategies import CliqueReplicationStrategy, ReplicationStrategy
from localckpt.state_dict.names import ABOUT

__all__ = [
    "Failures",
    "NodeManager",
    "NodeTier",
    "SharedTier",
    "with_redundancy",
]

logger = logging.getLogger(__name__)

NodeManager: TypeAlias = LocalCheckpointManager | InMemoryCheckpointManager

# A save that fails because of these fails the next time, too, or the ranks do not work together.
_NOT_OF_ONE_SAVE = (DivergenceError, MismatchError, PeerLostError, UnsafeGlobalError)


class Failures:
    """Saves of one tier that failed.

    Args:
        what: Name of the tier, for messages.
        most: Number of saves that may fail in a row before the error is raised.

    Attributes:
        count: Number of all that failed.
        is_to_stop: Tells whether the job is asked to stop.
    """

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self.count = 0
        self.is_to_stop: Callable[[], bool] = lambda: False
        self._in_a_row = 0
        self._last: CheckpointingException | None = None

    def note(self, error: CheckpointingException) -> None:
        """Count a save that failed; raise the error at once if it was not of that save alone."""
        if isinstance(error, _NOT_OF_ONE_SAVE):
            raise error
        is_cut = isinstance(error, SaveFailedError) and error.is_mismatched and self.is_to_stop()
        if is_cut or (isinstance(error, StorageError) and error.is_given_up):
            # A rank that is asked to stop begins no save that would have to wait.
            logger.info("a save to %s is given up on all ranks: the job is to stop", self._what)
            forget_frames(error)
            return
        self.count += 1
        self._in_a_row += 1
        self._last = error
        # Else the images that the failed calls had would stay until the next save succeeds.
        forget_frames(error)
        logger.warning(
            "a save to %s failed (%d in a row; training ends at %d): %s",
            *(self._what, self._in_a_row, self._most, worded(error, "step")),
        )

    def leave_out(self, waited_s: float) -> None:
        """Count a save that was not begun, since an older one was in the way.

        Args:
            waited_s: How long that was waited for, in seconds.

        Raises:
            SaveFailedError: Too many have failed in a row.
        """
        self.note(
            SaveFailedError(
                f"the saves before this one have not been written after {waited_s:g} s: is the "
                f"storage stuck? This save was not started. Older checkpoints are as they were"
            )
        )
        self.raise_if_too_many()

    def raise_if_too_many(self) -> None:
        """Raise the last error if training is not to go on."""
        if self._last is not None and self._in_a_row >= self._most:
            why = f"{self._in_a_row} saves in a row to {self._what} failed (max_failures)"
            if self._most == 1:
                why = f"a save to {self._what} failed (on_error, max_failures)"
            kept = "Older checkpoints are as they were"
            raise self._last.advised("end", f"{kept}. Training ends, since {why}")

    def end_row(self) -> None:
        """Note that a save has succeeded."""
        self._in_a_row, self._last = 0, None


class NodeTier:
    """Checkpoints on the nodes, saved behind training.

    Args:
        manager: Manager of the checkpoints, closed with the tier.
        strategy: Strategy that was made for the manager, closed with the tier; ``None`` for none.
        timeout_s: Deadline of waits for other ranks, in seconds.
        failures: Counts failed saves.

    Attributes:
        begun: Step of the last save that was begun and has not failed; ``None`` for none.
        newest: Step of the newest save that is complete on all ranks; ``None`` for none.
    """

    def __init__(
        self,
        manager: NodeManager,
        strategy: ReplicationStrategy | None,
        timeout_s: float,
        failures: Failures,
    ) -> None:
        self.manager = manager
        self._strategy = strategy
        self.begun: int | None = None
        self.newest: int | None = None
        self._queue = AsyncCallsQueue(timeout_s=timeout_s)
        self._failures = failures

    @property
    def source(self) -> str:
        """Source of this rank's part of what was loaded last."""
        assert self.manager.last_load is not None, "a load came before"
        return self.manager.last_load.source

    @property
    def is_busy(self) -> bool:
        """True if a save is under way; the same on all ranks."""
        return self._queue.get_num_unfinalized_calls() > 0

    def waits_for(self) -> str:
        """Describe what the oldest save waits for on this rank."""
        return self._queue.waits_for()

    @property
    def is_over_here(self) -> bool:
        """True if no save is under way on this rank, whatever others do."""
        return self._queue.is_over_here

    @property
    def has_room(self) -> bool:
        """True if one more save would not wait for an older one; asks no other rank."""
        in_flight = self._queue.get_num_unfinalized_calls()
        return in_flight < self.manager.store.num_buffers or self._queue.coming() is not None

    def answers(self, timeout_s: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Return whether this node's storage answers in time.

        What a save does there at its beginning holds training up, and cannot be interrupted.

        Args:
            timeout_s: The longest wait, in seconds.
            given_up: As for :func:`answered`.
        """
        store = self.manager.store

        def probe() -> None:
            # A refusal is an answer, of which the save tells all ranks.
            with suppress(StorageError):
                store.probe()

        try:
            answered("write to", store.root, timeout_s, probe, given_up)
        except StorageError as error:
            logger.warning("%s", error)
            return False
        return True

    def save(
        self, parts: Mapping[str, Any], step: int, metrics: Mapping[str, SupportsFloat] | None
    ) -> None:
        """Begin a save, unless this step is saved; all ranks do so in the same step."""
        if self.begun == step:
            return
        try:
            request = self.manager.save(
                {OURS: described(parts), **parts}, step, is_async=True, metrics=metrics
            )
        except (SaveFailedError, StorageError) as error:
            # Of an older save, which this one has waited for; or no node has room for this one.
            self._note(error)
        else:
            self._queue.schedule_async_request(request)
            self.begun = step

    def load(self, load: PartsToLoad, step: int | None) -> int:
        """Fill the state from the newest checkpoint, or from that of a step; all ranks do so.

        Returns:
            Its step. Raises as the manager's ``load``.
        """
        about = described(load.everything)[ABOUT]
        into = {OURS: {ABOUT: {key: about[key] for key in load.parts}}, **load.parts}
        compare = partial(why_parts_are_others, is_partial=load.is_partial)
        options = LoadOptions.of(into, converts=load.converts, compare=compare)
        if not load.is_whole:
            options = LoadOptions.of(
                into,
                converts=load.converts,
                lets_go=load.lets_go,
                named=load.named,
                compare=compare,
                private=load.private,
            )
        return self.manager.load_as(options, step)[1].iteration

    def finalize(self, step: int | None, *, blocking: bool) -> None:
        """Finalize the saves that are over on all ranks, or wait for all.

        Args:
            step: Step of the training loop, in which this is called once; ``None`` in a loop.
            blocking: Whether to wait.
        """
        self._queue.pass_step(step)
        try:
            if self._queue.maybe_finalize_async_calls(blocking=blocking):
                self._failures.end_row()
                self.newest = self.newest if self.is_busy else self.begun
        except CheckpointingException as error:
            self._note(error)

    def close(self, *, is_in_step: bool) -> None:
        """Free everything.

        Args:
            is_in_step: Whether the other ranks close theirs, too; else nobody is waited for.
        """
        with ExitStack() as closing:
            if self._strategy is not None:
                closing.callback(self._strategy.close)
            if is_in_step:
                closing.callback(self.manager.close)
                closing.callback(self._queue.close)
            else:
                left = CheckpointingException("the training loop was left with an error")
                closing.callback(self.manager.__exit__, type(left), left, None)
                closing.callback(self._queue.__exit__, type(left), left, None)

    def _note(self, error: CheckpointingException) -> None:
        self.begun = self.newest
        self._failures.note(error)
        self._failures.raise_if_too_many()


class SharedTier:
    """Checkpoints on shared storage, saved behind training.

    Args:
        root: A directory that all ranks share.
        session_id: Name of the training run.
        local: Manager of the nodes' checkpoints: both are one lineage.
        retention: Rules by which checkpoints are kept.
        timeout_s: Deadline of waits for other ranks, in seconds.
        max_attempts: As for :class:`GlobalCheckpointManager`.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults.
        private, ranks: As for :class:`SharedState`.
        failures: Counts failed saves.
        events: Stream of events.
        read_only: Whether to load only.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str,
        *,
        local: NodeManager,
        retention: Retention,
        timeout_s: float,
        max_attempts: int | None,
        safe_globals: tuple[Any, ...],
        private: Mapping[str, PrivateRule],
        ranks: Ranks,
        failures: Failures,
        events: EventStream,
        read_only: bool = False,
    ) -> None:
        self.manager = GlobalCheckpointManager(
            root,
            session_id,
            retention=retention,
            timeout=timeout_s,
            safe_globals=safe_globals,
            local=local,
            read_only=read_only,
            events=events,
            max_attempts=max_attempts,
        )
        self._make_state = partial(
            SharedState,
            manager=self.manager,
            ranks=ranks,
            safe_globals=safe_globals,
            private=private,
        )
        self._given: SharedState | None = None
        self._failures = failures
        self._is_checked = True

    def use(self, parts: Mapping[str, Any]) -> None:
        """Save and load these parts of the state, by name.

        Raises:
            CheckpointingException: The parameters of an optimizer are in none of the modules.
        """
        self._given = self._make_state(parts)

    @property
    def _state(self) -> SharedState:
        assert self._given is not None, "use() came before"
        return self._given

    def save(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Begin a save, after the one before; all ranks do so in the same step."""
        self.finish()
        try:
            self._state.save(step, metrics)
        except StorageError as error:
            # The same on all ranks, of which none has begun.
            self._failures.note(error)
            self._failures.raise_if_too_many()
        else:
            self._is_checked = False

    def load(self, load: PartsToLoad, steps: Sequence[int]) -> int:
        """Fill the state from the first checkpoint that is not damaged; all ranks do so.

        Args:
            load: Parts to load.
            steps: Steps of the checkpoints to try, in their order.

        Returns:
            Its step.

        Raises:
            CorruptShardError: All are damaged; of the last.
        """
        state = self._state if load.is_whole else self._make_state(load.everything)
        *others, last = steps
        for step in others:
            try:
                state.load(step, load)
            except CorruptShardError as error:
                # The same on all ranks. What it has filled is filled again.
                logger.error("step %d on shared storage is damaged: %s", step, error)
            else:
                return step
        state.load(last, load)
        return last

    @property
    def is_busy(self) -> bool:
        """True if a save is under way on this rank."""
        return self.manager.is_saving

    def waits_for(self) -> str:
        """Return in words whom or what the last save waits for on this rank."""
        return self.manager.waits_for()

    def has_saved(self, step: int) -> bool:
        """Return whether the last save is of this step and complete; asks no other rank."""
        return self.manager.has_saved(step)

    def look(self) -> None:
        """Warn of a save that has failed; waits for nothing, and asks no other rank."""
        if not self._is_checked:
            try:
                self.manager.check_for_errors()
            except CheckpointingException as error:
                self._is_checked = True
                self._failures.note(error)

    def finish(self) -> None:
        """Wait for the last save; all ranks do so. Raises if too many have failed in a row."""
        try:
            self.manager.wait_until_finished()
        except CheckpointingException as error:
            self._is_checked = True
            self._failures.note(error)
        else:
            if not self._is_checked:
                self._failures.end_row()
        self._is_checked = True
        # Here, where all ranks have heard of it, and not in look(), where some may not have.
        self._failures.raise_if_too_many()

    def close(self, *, is_in_step: bool) -> None:
        """Free everything, as :meth:`NodeTier.close` does."""
        if is_in_step:
            self.manager.close()
        else:
            left = CheckpointingException("the training loop was left with an error")
            self.manager.__exit__(type(left), left, None)


def with_redundancy(
    make_manager: Callable[[ReplicationStrategy | None], NodeManager],
    repl_strategy: ReplicationStrategy | None,
    replication_factor: int | None,
    timeout_s: float,
    is_alone: bool,
) -> tuple[NodeManager, ReplicationStrategy | None]:
    """Make a manager with the redundancy that was asked for, or else what the nodes allow.

    Args:
        make_manager: Makes a manager that uses a strategy.
        repl_strategy: The caller's strategy; ``None`` to make one.
        replication_factor: Number of nodes that each shard is to be on; ``None`` for 2 where there
            are as many nodes.
        timeout_s: Deadline of the waits of a strategy that is made, in seconds.
        is_alone: Whether the job has one rank.

    Returns:
        The manager, and the strategy that was made for it.

    Raises:
        SameMachineReplicationException: There are not as many nodes as asked for.
    """
    if repl_strategy is not None:
        return make_manager(repl_strategy), None
    if replication_factor == 1 or (replication_factor is None and is_alone):
        return make_manager(None), None
    strategy = CliqueReplicationStrategy.from_replication_params(
        replication_factor=replication_factor or 2, timeout_s=timeout_s
    )
    try:
        return make_manager(strategy), strategy
    except SameMachineReplicationException as error:
        strategy.close()
        if replication_factor is not None:
            raise
        # The same on all ranks, and all make the other one.
        logger.info("no copies on other nodes: %s", error)
        return make_manager(None), None
    except BaseException:
        strategy.close()
        raise
