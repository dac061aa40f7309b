"""The two tiers of a training loop's checkpoints: the nodes, and shared storage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from localckpt.async_save.queue import AsyncCallsQueue
from localckpt.async_save.request import AsyncRequest
from localckpt.availability.retention import Metrics
from localckpt.checkpointer.arguments import worded
from localckpt.checkpointer.parts import described
from localckpt.checkpointer.selection import Selection, why_parts_are_others
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    DivergenceError,
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
    SaveFailedError,
    StorageError,
    UnsafeGlobalError,
)
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.global_tier.places import Place
from localckpt.managers.local import InMemoryCheckpointManager, LocalCheckpointManager
from localckpt.managers.restoring import LoadOptions
from localckpt.ranks.deadline import answered
from localckpt.ranks.failure import forget_frames
from localckpt.state_dict.names import ABOUT, OURS
from localckpt.state_dict.targets import TargetRules, let_nothing_go

logger = logging.getLogger(__name__)

NodeManager: TypeAlias = LocalCheckpointManager | InMemoryCheckpointManager

# So many bytes a second a rank drains at most: the others are for training's own reads.
_RATE = 1e9
# Drains at a time: one that is written, and one behind it, which the nodes keep as well.
_DRAINS = 2
# A save that fails because of these fails the next time, too, or the ranks do not work together.
_NOT_OF_ONE_SAVE = (DivergenceError, MismatchError, PeerLostError, UnsafeGlobalError)


class _Tier:
    """Saves of one tier, behind training; ``newest`` is the step of the newest complete one."""

    manager: NodeManager | GlobalCheckpointManager

    def __init__(self, what: str, timeout_s: float, most_failures: int) -> None:
        self.queue = AsyncCallsQueue(timeout_s=timeout_s)
        self.newest: int | None = None
        self.failed = 0
        self.is_to_stop: Callable[[], bool] = lambda: False
        self._what, self._most = what, most_failures
        self._failed_in_a_row = 0

    @property
    def is_busy(self) -> bool:
        """True if a save is under way; the same on all ranks."""
        return self.queue.get_num_unfinalized_calls() > 0

    def finalize(self, step: int | None, *, blocking: bool) -> None:
        """Finalize what is over on all ranks, or wait for it; no ``step`` in a loop."""
        self.queue.pass_step(step)
        try:
            if self.queue.maybe_finalize_async_calls(blocking=blocking):
                self._failed_in_a_row = 0
        except CheckpointingException as error:
            self._note_failure(error)

    def leave_out(self, waited_s: float) -> None:
        """Count a save that was not begun, since an older one was in the way."""
        self._count_failure(
            SaveFailedError(
                f"the saves before this one have not been written after {waited_s:g} s: is the "
                f"storage stuck? This save was not started. Older checkpoints are as they were"
            )
        )

    def _note_failure(self, error: CheckpointingException) -> None:
        self._count_failure(error)

    def _count_failure(self, error: CheckpointingException) -> None:
        """Count a save that failed; raise the error if training is not to go on.

        That is at once if it was not of that save alone, or else if too many have failed.
        """
        if isinstance(error, _NOT_OF_ONE_SAVE):
            raise error
        is_cut = isinstance(error, SaveFailedError) and error.is_mismatched and self.is_to_stop()
        if is_cut or (isinstance(error, StorageError) and error.is_given_up):
            # A rank that is asked to stop begins no save that would have to wait.
            logger.info("a save to %s is given up on all ranks: the job is to stop", self._what)
            forget_frames(error)
            return
        self.failed += 1
        self._failed_in_a_row += 1
        # Else the images that the failed calls had would stay until the next save succeeds.
        forget_frames(error)
        logger.warning(
            "a save to %s failed (%d in a row; training ends at %d): %s",
            *(self._what, self._failed_in_a_row, self._most, worded(error, "step")),
        )
        if self._failed_in_a_row >= self._most:
            why = f"{self._failed_in_a_row} saves in a row to {self._what} failed (max_failures)"
            if self._most == 1:
                why = f"a save to {self._what} failed (on_error, max_failures)"
            kept = "Older checkpoints are as they were"
            raise error.advised("end", f"{kept}. Training ends, since {why}")

    def _schedule(self, request: AsyncRequest, step: int) -> None:
        request.add_finalize_fn(partial(self._note_complete, step))
        self.queue.schedule_async_request(request)

    def _note_complete(self, step: int) -> None:
        self.newest = step

    def abort(self) -> None:
        """End all waits, from any thread; see :meth:`Checkpointer.abort`."""
        self.queue.abort(0.0)
        self.manager.abort(0.0)

    def leave(self) -> None:
        """Free what belongs to the group of ranks that there was, but for the manager."""
        self.queue.close()

    def close(self, *, is_in_step: bool) -> None:
        """Free everything. Unless ``is_in_step``, nobody is waited for."""
        left = CheckpointingException("the training loop was left with an error")
        how = (None, None, None) if is_in_step else (type(left), left, None)
        with ExitStack() as closing:
            closing.callback(self.manager.__exit__, *how)
            closing.callback(self.queue.__exit__, *how)


class NodeTier(_Tier):
    """Checkpoints on the nodes; ``begun`` is the step of the last save that has not failed."""

    manager: NodeManager

    def __init__(self, manager: NodeManager, timeout_s: float, most_failures: int) -> None:
        super().__init__("the nodes", timeout_s, most_failures)
        self.manager = manager
        self.begun: int | None = None
        self.on_complete: Callable[[int], None] = lambda step: None

    @property
    def root(self) -> Path:
        return self.manager.store.root

    @property
    def has_room(self) -> bool:
        """True if one more save would not wait for an older one; asks no other rank."""
        in_flight = self.queue.get_num_unfinalized_calls()
        return in_flight < self.manager.store.num_buffers or self.queue.coming() is not None

    def answers(self, timeout_s: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Return whether this node's storage answers in time.

        What a save does there at its beginning holds training up, and cannot be interrupted.
        """

        def probe() -> None:
            # A refusal is an answer, of which the save tells all ranks.
            with suppress(StorageError):
                self.manager.store.probe()

        try:
            answered("write to", self.root, timeout_s, probe, given_up)
        except StorageError as error:
            logger.warning("%s", error)
            return False
        return True

    def save(self, parts: Mapping[str, Any], step: int, metrics: Metrics | None) -> None:
        """Begin a save, unless this step is saved; all ranks do so in the same step."""
        if self.begun == step:
            return
        try:
            request = self.manager.save(
                {OURS: described(parts), **parts}, step, is_async=True, metrics=metrics
            )
        except (SaveFailedError, StorageError) as error:
            # Of an older save, which this one has waited for; or no node has room for this one.
            self._note_failure(error)
        else:
            self._schedule(request, step)
            self.begun = step

    def load(self, load: Selection, step: int | None) -> tuple[int, str]:
        """Fill the state from the newest checkpoint, or that of a step; its step and its source."""
        step = self.manager.load_as(_options_of(load), step)[1].iteration
        assert self.manager.last_load is not None
        return step, self.manager.last_load.source

    def load_live(
        self,
        load: Selection,
        parts: Mapping[str, Any],
        step: int,
        holders: Mapping[int, int],
        held: Mapping[str, Any],
        *,
        is_lacking: bool,
    ) -> int:
        """Fill parts of ranks that lack them with those that others ``held``; the bytes filled."""
        live = copy(load)
        live.parts = parts
        options = replace(_options_of(live), fills=is_lacking, is_elastic=True)
        return self.manager.load_live(options, step, holders, {**options.given, **held})

    def _note_complete(self, step: int) -> None:
        super()._note_complete(step)
        self.on_complete(step)

    def _note_failure(self, error: CheckpointingException) -> None:
        self.begun = self.newest
        self._count_failure(error)


class SharedTier(_Tier):
    """Checkpoints on shared storage, which are drained from the nodes."""

    manager: GlobalCheckpointManager

    def __init__(
        self,
        manager: GlobalCheckpointManager,
        nodes: NodeTier,
        timeout_s: float,
        most_failures: int,
    ) -> None:
        super().__init__("shared storage", timeout_s, most_failures)
        self.manager = manager
        self._nodes = nodes
        # Metrics of the steps to drain once their saves to the nodes are over.
        self._wanted: dict[int, Metrics | None] = {}
        self._refused: list[CheckpointingException] = []
        nodes.on_complete = self.note_saved

    @property
    def root(self) -> Place:
        return self.manager.root

    @property
    def is_busy(self) -> bool:
        """True if a drain is under way, or is to begin; the same on all ranks."""
        return bool(self._wanted or self._refused) or super().is_busy

    @property
    def has_room(self) -> bool:
        """True if no older drain is in the way of one more; the same on all ranks."""
        return len(self._wanted) + self.queue.get_num_unfinalized_calls() < _DRAINS

    def drain(self, step: int, metrics: Metrics | None) -> None:
        """Drain a step once its save to the nodes is complete; all ranks do so in the same step."""
        if self._nodes.begun is None or self._nodes.begun < step:
            # Its save to the nodes was not begun, of which the log says why.
            return
        self._wanted[step] = metrics
        if self._nodes.newest == step:
            self.note_saved(step)

    def note_saved(self, step: int) -> None:
        """Begin the drain of a wanted step as all finalize its save: it is kept then."""
        if step not in self._wanted:
            return
        metrics = self._wanted.pop(step)
        if self._nodes.manager.is_bad(step):
            logger.warning("step %d is not drained to shared storage: it is marked bad", step)
        else:
            try:
                self._begin(step, metrics)
            except CheckpointingException as error:
                self._refused.append(error)

    def go_on(self, up_to: int) -> None:
        """Go on with drains of an earlier start, and with that of ``up_to`` behind them."""
        cut_off = [step for step in self.manager.unfinished_drains() if step <= up_to]
        for step in dict.fromkeys([*cut_off, up_to] if cut_off else []):
            try:
                self._begin(step, None)
            except CheckpointingException as error:
                logger.warning("the drain of step %d does not go on: %s", step, error)

    def _begin(self, step: int, metrics: Metrics | None) -> None:
        promote = self._nodes.manager.promote
        self._schedule(promote(step, self.manager, rate_limit=_RATE, metrics=metrics), step)

    def load(self, load: Selection, steps: Sequence[int]) -> int:
        """Fill the state from the first checkpoint that is not damaged; returns its step."""
        if not steps:
            raise NoReplicasAvailableError(
                f"the checkpoints under {self.root} went away while the job looked for one"
            )
        for step in steps:
            try:
                with self.manager.images(step) as (images, first):
                    self._nodes.manager.load_from(images, first, _options_of(load))
            except CorruptShardError as error:
                # The same on all ranks. What it has filled is filled again.
                if step == steps[-1]:
                    raise
                logger.error("step %d on shared storage is damaged: %s", step, error)
            else:
                break
        return step

    def finalize(self, step: int | None, *, blocking: bool) -> None:
        """Finalize the drains that are over on all ranks, and those that were refused."""
        if self._wanted and not self._nodes.is_busy:
            lost = ", ".join(map(str, self._wanted))
            logger.warning("not drained to shared storage, as the nodes lack it: step %s", lost)
            self._wanted.clear()
        while self._refused:
            self._note_failure(self._refused.pop(0))
        super().finalize(step, blocking=blocking)


def _options_of(load: Selection) -> LoadOptions:
    about = described(load.everything)[ABOUT]
    rules = TargetRules(
        converts=load.allow_dtype_change,
        lets_go=let_nothing_go if load.is_whole else load.lets_go,
        named=load.named,
        compare=partial(why_parts_are_others, is_partial=load.partial),
    )
    into = {OURS: {ABOUT: {key: about[key] for key in load.parts}}, **load.parts}
    return LoadOptions.of(into, rules=rules, private=load.private)
