"""Where a training loop's checkpoints are: on the nodes, and on shared storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeAlias

from localckpt.async_save.queue import AsyncCallsQueue
from localckpt.checkpointer.elsewhere import Elsewhere
from localckpt.checkpointer.record import ELSEWHERE_SOURCE, SHARED_SOURCE
from localckpt.checkpointer.shared import OnResize, SharedState
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    DivergenceError,
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
    SameMachineReplicationException,
    SaveFailedError,
    StorageError,
    UnsafeGlobalError,
)
from localckpt.events.stream import EventStream
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.global_tier.retention import Retention
from localckpt.managers.local import LocalCheckpointManager
from localckpt.managers.memory import InMemoryCheckpointManager
from localckpt.ranks.failure import forget_frames
from localckpt.replication.strategies import CliqueReplicationStrategy, ReplicationStrategy

__all__ = [
    "Failures",
    "Newest",
    "NodeManager",
    "NodeTier",
    "SharedTier",
    "find_newest",
    "load_newest",
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
    """

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self.count = 0
        self._in_a_row = 0
        self._last: CheckpointingException | None = None

    def note(self, error: CheckpointingException) -> None:
        """Count a save that failed; raise the error at once if it was not of that save alone."""
        if isinstance(error, _NOT_OF_ONE_SAVE):
            raise error
        self.count += 1
        self._in_a_row += 1
        self._last = error
        # Else the images that the failed calls had would stay until the next save succeeds.
        forget_frames(error)
        logger.warning(
            "save %d in a row to %s failed, of %d that may: %s",
            *(self._in_a_row, self._what, self._most - 1, error),
        )

    def raise_if_too_many(self) -> None:
        """Raise the last error if training is not to go on."""
        if self._last is not None and self._in_a_row >= self._most:
            raise self._last

    def end_row(self) -> None:
        """Note that a save has succeeded."""
        self._in_a_row, self._last = 0, None


class NodeTier:
    """Checkpoints on the nodes, saved behind training.

    Args:
        manager: Keeps them.
        timeout_s: Deadline of waits for other ranks, in seconds.
        failures: Counts those that fail.

    Attributes:
        begun: Step of the last save that was begun and has not failed; ``None`` for none.
        newest: Step of the newest save that is complete on all ranks; ``None`` for none.
    """

    def __init__(self, manager: NodeManager, timeout_s: float, failures: Failures) -> None:
        self.manager = manager
        self.begun: int | None = None
        self.newest: int | None = None
        self._queue = AsyncCallsQueue(timeout_s=timeout_s)
        self._failures = failures

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""
        return self._queue.get_num_unfinalized_calls() > 0

    def save(self, parts: Mapping[str, Any], step: int) -> None:
        """Begin a save, unless this step is saved; all ranks do so in the same step."""
        if self.begun == step:
            return
        try:
            request = self.manager.save(parts, step, is_async=True)
        except (SaveFailedError, StorageError) as error:
            # Of an older save, which this one has waited for; or no node has room for this one.
            self._note(error)
        else:
            self._queue.schedule_async_request(request)
            self.begun = step

    def finalize(self, *, blocking: bool) -> None:
        """Finalize the saves that are over on all ranks, or wait for all."""
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
        on_resize: As for :class:`SharedState`.
        failures: Counts those that fail.
        events: Is told what happens.
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
        on_resize: OnResize,
        failures: Failures,
        events: EventStream,
    ) -> None:
        self.manager = GlobalCheckpointManager(
            root,
            session_id,
            retention=retention,
            timeout=timeout_s,
            safe_globals=safe_globals,
            local=local,
            events=events,
            max_attempts=max_attempts,
        )
        self._safe_globals = safe_globals
        self._on_resize = on_resize
        self._given: SharedState | None = None
        self._failures = failures
        self._is_checked = True

    def use(self, parts: Mapping[str, Any]) -> None:
        """Save and load these parts of the state, by name.

        Raises:
            CheckpointingException: The parameters of an optimizer are in none of the modules.
        """
        self._given = SharedState(parts, self.manager, self._safe_globals, self._on_resize)

    @property
    def _state(self) -> SharedState:
        assert self._given is not None, "use() came before"
        return self._given

    def save(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Begin a save, after the one before; all ranks do so in the same step."""
        self.finish()
        self._state.save(step, metrics)
        self._is_checked = False

    def load(self) -> int:
        """Fill the state from the newest checkpoint that is not damaged; all ranks do so.

        Returns:
            Its step.

        Raises:
            CorruptShardError: All are damaged; of the oldest.
        """
        *newer, oldest = self.manager.all_iterations()
        for step in newer:
            try:
                self._state.load(step)
            except CorruptShardError as error:
                # The same on all ranks. What it has filled is filled again.
                logger.error("step %d on shared storage is damaged: %s", step, error)
            else:
                return step
        self._state.load(oldest)
        return oldest

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self.manager.is_saving

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
    replication_factor: int | None,
    is_alone: bool,
) -> tuple[NodeManager, ReplicationStrategy | None]:
    """Make a manager with the copies that were asked for, or else with those that nodes allow.

    Args:
        make_manager: Makes a manager that uses a strategy.
        replication_factor: Number of nodes that each shard is to be on; ``None`` for 2 where there
            are as many nodes.
        is_alone: Whether the job has one rank.

    Returns:
        The manager, and the strategy that was made for it.

    Raises:
        SameMachineReplicationException: There are not as many nodes as asked for.
    """
    if replication_factor == 1 or (replication_factor is None and is_alone):
        return make_manager(None), None
    strategy = CliqueReplicationStrategy.from_replication_params(
        replication_factor=replication_factor or 2
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


@dataclass(frozen=True, slots=True)
class Newest:
    """Newest checkpoint that can be had.

    Attributes:
        step: Its step; -1 if there is none.
        is_on_nodes: Whether it is to be loaded from the nodes.
        beside: Step of the newest that is not on the nodes; -1 for none.
        is_elsewhere: Whether that one is not localckpt's.
        given_up: Why none is taken from shared storage, though there are some.
    """

    step: int
    is_on_nodes: bool
    beside: int
    is_elsewhere: bool
    given_up: NoReplicasAvailableError | None


def find_newest(
    nodes: NodeTier, shared: SharedTier | None, elsewhere: Elsewhere | None = None
) -> Newest:
    """Find the newest checkpoint that can be had; all ranks do so. As for :func:`load_newest`."""
    if elsewhere is not None and elsewhere.goes_back:
        return Newest(elsewhere.step, False, elsewhere.step, True, None)
    beside, given_up = -1, None
    try:
        if shared is not None:
            beside = shared.manager.find_latest()
    except NoReplicasAvailableError as error:
        given_up = error
    is_elsewhere = elsewhere is not None and elsewhere.step > beside
    if elsewhere is not None:
        beside = max(beside, elsewhere.step)
    try:
        newest = nodes.manager.find_latest()
        has_better = beside >= 0 and nodes.manager.is_bad(newest)
        if newest >= max(beside, 0) and not has_better:
            return Newest(newest, True, beside, is_elsewhere, given_up)
    except (MismatchError, NoReplicasAvailableError) as error:
        _leave_nodes(error, beside, given_up)
    if given_up is not None and not is_elsewhere:
        raise given_up
    return Newest(beside, False, beside, is_elsewhere, None)


def load_newest(
    nodes: NodeTier,
    shared: SharedTier | None,
    parts: Mapping[str, Any],
    elsewhere: Elsewhere | None = None,
) -> tuple[int, str]:
    """Fill the state from the newest checkpoint that can be had; all ranks do so.

    Args:
        nodes: Checkpoints on the nodes.
        shared: Checkpoints on shared storage, if the job has any.
        parts: The state.
        elsewhere: A checkpoint that is not localckpt's; the same on all ranks.

    Returns:
        Its step, -1 if there is none; and where this rank's part came from.

    Raises:
        MismatchError: The state is not as it was saved; or the nodes' checkpoint was saved by
            another number of ranks, and there is none beside them.
        NoReplicasAvailableError: There were checkpoints on the nodes, all turned out damaged or
            were given up, and there is none beside them that was not given up.
    """
    newest = find_newest(nodes, shared, elsewhere)
    if newest.is_on_nodes:
        try:
            step = nodes.manager.load(into=parts)[1].iteration
            # A damaged checkpoint makes way for the one before, which may be too old.
            if step >= newest.beside:
                report = nodes.manager.last_load
                assert report is not None
                return step, report.source
        except (MismatchError, NoReplicasAvailableError) as error:
            _leave_nodes(error, newest.beside, newest.given_up)
    if newest.is_elsewhere:
        assert elsewhere is not None, "it is the newest"
        nodes.manager.begin(elsewhere.step)
        elsewhere.load()
        return elsewhere.step, ELSEWHERE_SOURCE
    if newest.given_up is not None:
        raise newest.given_up
    if shared is None or newest.beside < 0:
        return -1, ""
    return shared.load(), SHARED_SOURCE


def _leave_nodes(
    error: CheckpointingException, beside: int, given_up: NoReplicasAvailableError | None
) -> None:
    """Go on to what is beside the nodes after an error, or raise it if there is nothing."""
    if beside < 0:
        # What is on shared storage was given up before.
        raise error from given_up
    logger.warning("the checkpoints on the nodes are left for step %d: %s", beside, error)
