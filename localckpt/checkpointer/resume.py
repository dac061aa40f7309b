"""Resuming of a training loop: the newest checkpoint of all tiers is found, and loaded.

    nodes -> shared storage -> a checkpoint that the program loads by itself

The newest one is taken, whichever tier has it; if it turns out that it cannot be loaded, the newest
of the other tiers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localckpt.checkpointer.elsewhere import Elsewhere
from localckpt.checkpointer.parts import OURS, described
from localckpt.checkpointer.record import ELSEWHERE_SOURCE, SHARED_SOURCE, RunRecord
from localckpt.checkpointer.tiers import NodeTier, SharedTier
from localckpt.errors import CheckpointingException, MismatchError, NoReplicasAvailableError
from localckpt.failure_texts import ranks_named
from localckpt.ranks.ranks import Ranks

__all__ = ["Resumption"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Newest:
    """Newest checkpoint that can be had.

    Attributes:
        step: Step of the checkpoint; -1 if there is none.
        is_on_nodes: True if the nodes have it.
        beside: Step of the newest checkpoint that is not on the nodes; -1 for none.
        is_elsewhere: True if the checkpoint beside the nodes is one of the program's own.
        given_up: Error that says why no checkpoint is taken from shared storage, though it has
            some.
    """

    step: int
    is_on_nodes: bool
    beside: int
    is_elsewhere: bool
    given_up: NoReplicasAvailableError | None


class Resumption:
    """Search and load of the checkpoint that a job resumes from; all ranks make the same calls.

    Args:
        nodes: Checkpoints on the nodes.
        shared: Checkpoints on shared storage; ``None`` for no such storage.
        ranks: The ranks of the job.
        record: Record of the run.
    """

    def __init__(
        self, nodes: NodeTier, shared: SharedTier | None, ranks: Ranks, record: RunRecord
    ) -> None:
        self._nodes = nodes
        self._shared = shared
        self._ranks = ranks
        self._record = record

    def find(self, elsewhere: Elsewhere | None) -> int:
        """Find the step of the newest checkpoint, -1 for none; raises as :meth:`run`."""
        return self._newest(elsewhere).step

    def run(
        self,
        parts: Mapping[str, Any],
        elsewhere: Elsewhere | None,
        called: float,
        *,
        allow_dtype_change: bool,
    ) -> int:
        """Fill the state from the newest checkpoint, and note in the record how that went.

        Args:
            parts: Parts of the state.
            elsewhere: A checkpoint of the program's own; the same on all ranks.
            called: Time of the call, by ``time.monotonic()``.
            allow_dtype_change: Whether to convert values to other dtypes.

        Returns:
            The step of the checkpoint; -1 if there is none.

        Raises:
            MismatchError: The state is not as it was saved; or the nodes' checkpoint was saved by
                another number of ranks, and there is none beside the nodes. Or the ranks know of
                different checkpoints elsewhere.
            NoReplicasAvailableError: All checkpoints on the nodes turned out damaged or were given
                up, and there is none beside the nodes that was not given up.
            PeerLostError: A rank did not come in time.
        """
        try:
            # All ranks load the same, or none does.
            known = None if elsewhere is None else [elsewhere.step, elsewhere.goes_back]
            self._ranks.decide("compare checkpoints elsewhere", lambda: known, _judge_elsewhere)
            step, source = self._load(parts, elsewhere, allow_dtype_change)
            job_run = self._say_what_was_loaded(step, source, time.monotonic() - called)
        except BaseException as error:
            self._record.resumed(called, None, "", "", error)
            raise
        self._record.resumed(called, step, source, job_run)
        return step

    def _newest(self, elsewhere: Elsewhere | None) -> _Newest:
        if elsewhere is not None and elsewhere.goes_back:
            return _Newest(elsewhere.step, False, elsewhere.step, True, None)
        beside, given_up = -1, None
        try:
            if self._shared is not None:
                beside = self._shared.manager.find_latest()
        except NoReplicasAvailableError as error:
            given_up = error
        is_elsewhere = elsewhere is not None and elsewhere.step > beside
        if elsewhere is not None:
            beside = max(beside, elsewhere.step)
        manager = self._nodes.manager
        try:
            newest = manager.find_latest()
            has_better = beside >= 0 and manager.is_bad(newest)
            if newest >= max(beside, 0) and not has_better:
                return _Newest(newest, True, beside, is_elsewhere, given_up)
        except (MismatchError, NoReplicasAvailableError) as error:
            _leave_nodes(error, beside, given_up)
        if given_up is not None and not is_elsewhere:
            raise given_up
        return _Newest(beside, False, beside, is_elsewhere, None)

    def _load(
        self, parts: Mapping[str, Any], elsewhere: Elsewhere | None, allow_dtype_change: bool
    ) -> tuple[int, str]:
        """Load the newest checkpoint; returns its step, and the source of this rank's part."""
        newest, manager = self._newest(elsewhere), self._nodes.manager
        if newest.is_on_nodes:
            try:
                into = {OURS: described(parts), **parts}
                loaded = manager.load(into=into, allow_dtype_change=allow_dtype_change)
                step = loaded[1].iteration
                # A damaged checkpoint makes way for the one before, which may be too old.
                if step >= newest.beside:
                    report = manager.last_load
                    assert report is not None
                    return step, report.source
            except (MismatchError, NoReplicasAvailableError) as error:
                _leave_nodes(error, newest.beside, newest.given_up)
        if newest.is_elsewhere:
            assert elsewhere is not None, "it is the newest"
            manager.begin(elsewhere.step)
            elsewhere.load()
            return elsewhere.step, ELSEWHERE_SOURCE
        if newest.given_up is not None:
            raise newest.given_up
        if self._shared is None or newest.beside < 0:
            return -1, ""
        return self._shared.load(allow_dtype_change=allow_dtype_change), SHARED_SOURCE

    def _say_what_was_loaded(self, step: int, source: str, seconds: float) -> str:
        """Log on the root where all ranks' parts came from; return the name of the job's run."""
        mine = [source, self._record.stream.run]
        told, job_run = self._ranks.decide("say what was loaded", lambda: mine, _judge_sources)
        line = "no checkpoint is there: the job starts at step 0"
        if step >= 0:
            line = f"resumed after step {step} in {seconds:.2f} s: {told}"
        logger.log(logging.INFO if self._ranks.is_root else logging.DEBUG, "%s", line)
        return str(job_run)


def _leave_nodes(
    error: CheckpointingException, beside: int, given_up: NoReplicasAvailableError | None
) -> None:
    """Log an error of the nodes, if there is a checkpoint beside them; else raise it."""
    if beside < 0:
        # What is on shared storage was given up before.
        raise error from given_up
    logger.warning("the checkpoints on the nodes are left for step %d: %s", beside, error)


def _judge_sources(told_by: list[list[str]]) -> list[str]:
    """Make the line that says from where the ranks have loaded; the root's name of the run."""
    ranks_by_source: dict[str, list[int]] = {}
    for rank, (source, _) in enumerate(told_by):
        ranks_by_source.setdefault(source, []).append(rank)
    told = (f"{ranks_named(ranks)} from {source}" for source, ranks in ranks_by_source.items())
    return [", ".join(told), told_by[0][1]]


def _judge_elsewhere(known_by: list[list[int | bool] | None]) -> None:
    """Raise MismatchError if ranks know of different checkpoints elsewhere."""
    steps = [None if known is None else known[0] for known in known_by]
    for rank, known in enumerate(known_by):
        if known != known_by[0]:
            raise MismatchError(
                f"the ranks know of different checkpoints elsewhere: rank 0 of step {steps[0]}, "
                f"rank {rank} of step {steps[rank]}. Give all the same, from storage that all see. "
                f"Nothing was loaded"
            )
