"""Resuming of a training loop: the newest checkpoint of all tiers is found, and loaded.

    nodes -> shared storage -> a checkpoint that the program loads by itself

The newest one is taken, whichever tier has it; if it turns out that it cannot be loaded, the newest
of the other tiers.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localckpt.checkpointer.arguments import judge_arguments
from localckpt.checkpointer.live import Kept, LiveReport, LiveState, dropped_in, judge_live
from localckpt.checkpointer.parts import EPOCHS, RNG, TrainingState
from localckpt.checkpointer.selection import Selection
from localckpt.checkpointer.tiers import NodeTier, SharedTier
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.events.event import Tier
from localckpt.events.stream import EventStream
from localckpt.failure_texts import described, ranks_named
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.state_dict.replicated import without_marker

logger = logging.getLogger(__name__)

# Sources of what no node has given, beside those of LoadReport.
_SHARED_SOURCE, _ELSEWHERE_SOURCE = "shared storage", "elsewhere"
_PARTS = ("start", "meet", "find", "fetch", "read")
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Rejoined:
    """Outcome of :meth:`Checkpointer.rejoin` on one rank.

    Attributes:
        step: The next step, as :meth:`Checkpointer.resume` returns it.
        source: Where this rank's part came from: ``"own memory"``, ``"own node"``, ``"peer rank
            <n>"``, the kind of the pieces that it was computed from, ``"shared storage"``; empty if
            there was no checkpoint. With ``keep="live"``, ``"own live state"`` or ``"live rank
            <n>"``, if that was kept.
        nbytes: Bytes that it came in.
        seconds: Time of the call.
        lost_steps: Steps that this rank had made, and are to be made again.
        why: Why the live state was not kept, which ``keep="live"`` has asked for.
    """

    step: int
    source: str
    nbytes: int
    seconds: float
    lost_steps: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Newest:
    """Newest checkpoints that can be had (-1 for none), and which of them to take.

    ``given_up`` says why none is taken from shared storage, though it has some.
    """

    beside: int
    is_elsewhere: bool
    on_nodes: int = -1
    takes_nodes: bool = False
    given_up: NoReplicasAvailableError | None = None


@dataclass(eq=False)
class Resumption:
    """Search and load of the checkpoint that a job resumes from; all ranks make the same calls."""

    _nodes: NodeTier
    _shared: SharedTier | None
    _ranks: Ranks
    _events: EventStream
    _quiet: bool
    # When the process began, until it has resumed.
    _began: float | None
    _live: LiveState
    source: str = ""
    # Name of this run of the job, the same on all ranks.
    job_run: str = ""
    nbytes: int = 0
    # Whether this rank keeps its live state; ``None`` if it has not rejoined.
    keeps: bool | None = None
    # Why that was not kept, though asked for; newest step on the nodes, if it was.
    why: str = ""
    newest: int | None = None
    # Step that the state to fill is of, if it is not as it was made.
    trained_to: int | None = None

    def find(self, elsewhere: Elsewhere | None) -> int:
        """Find the step of the newest checkpoint, -1 for none; raises as :meth:`run`."""
        newest = self._newest(elsewhere)
        return newest.on_nodes if newest.takes_nodes else newest.beside

    def run(
        self,
        state: TrainingState,
        elsewhere: Elsewhere | None,
        select: Callable[[], Selection],
        called: float,
    ) -> int:
        """Fill a state from a checkpoint, of which it returns the step; -1 if there is none."""
        self.newest, self.why, self.nbytes = None, "", 0
        try:
            # All ranks load the same, or none does.
            selected: list[Selection] = []

            def arguments() -> list[Any]:
                selected.append(select())
                known = None if elsewhere is None else [elsewhere.step, elsewhere.goes_back]
                if known is not None and selected[0].step is not None:
                    raise CheckpointingException("give resume() a checkpoint elsewhere, or step=")
                private, ranks = state.private, self._ranks.world_size
                live = self._live.report(state.parts, private, ranks, keeps=self.keeps)
                return [known, selected[0].texts, list(state.parts), live]

            what = "compare the arguments of resume()"
            given, live = self._ranks.decide(
                what, arguments, _judge_arguments, read=shaped(([str], list | None))
            )
            load = selected[0]
            load.choose(state.parts, state.rules, given)
            kept = None if live is None else Kept(*live)
            loaded = None if kept is None else self._keep(load, state, kept)
            if loaded is not None:
                step, source = loaded
            else:
                self._live.lose("it was being filled from a checkpoint")
                if load.step is None:
                    step, source = self._load(load, elsewhere)
                else:
                    step, source = self._load_step(load, load.step)
            saved_at = state.parts[EPOCHS].saved_at if step >= 0 else None
            is_empty = step >= 0 and load.is_empty
            job_run = self._say_what_was_loaded(step, source, called, saved_at, is_empty=is_empty)
            if load.gone:
                logger.log(
                    logging.WARNING if self._ranks.is_root else logging.INFO,
                    "resumed in part: not loaded, as the arguments of resume() allow: %s",
                    ", ".join(load.gone),
                )
        except BaseException as error:
            self._note(called, None, "", "", error)
            raise
        self.source, self.job_run = source, job_run
        self._note(called, step, source, job_run)
        return step

    def _keep(self, load: Selection, state: TrainingState, kept: Kept) -> tuple[int, str] | None:
        """Keep the live state of a step; ``None`` on all ranks if they are to go back."""
        rank, parts, failed = self._ranks.rank, state.parts, kept.why
        is_lacking, step = rank in kept.lacking, kept.step
        is_whole = step >= 0 and self._live.step == step and rank not in kept.without
        dropped = dropped_in(parts, state.private)
        if is_whole:
            self._live.put_back(parts, (rank, self._ranks.world_size), dropped)
        elif step >= 0:
            # After an error it is partly filled.
            self._live.lose("it was being filled from another rank's")
        if step >= 0 and kept.lacking:
            apart = dropped | {EPOCHS, RNG}
            shared = {k: without_marker(part) for k, part in parts.items() if k not in apart}
            held = self._live.parts(shared) if is_whole else shared
            try:
                self.nbytes = self._nodes.load_live(
                    load, shared, step, dict(kept.holders), held, is_lacking=is_lacking
                )
            except (CorruptShardError, MismatchError) as error:
                # The same on all ranks, which fill their states anew.
                failed = error.text
        if failed:
            self.why = failed
            level = logging.WARNING if self._ranks.is_root else logging.DEBUG
            logger.log(level, "the live state is not kept, so all go back: %s", failed)
            return None
        manager = self._nodes.manager
        self.newest = self._newest(None).on_nodes
        # What is saved next descends from what that state does.
        manager.begin(step, lineage=manager.lineage_of(self.newest))
        if is_whole:
            return step, "own live state"
        parts[EPOCHS].load_state_dict(kept.place)
        alone = sorted(parts.keys() & (dropped | {RNG}))
        if alone:
            what = "no live rank has what rank %d had of %s: it stays as it is here"
            logger.warning(what, rank, ", ".join(alone))
        return step, f"live {ranks_named([*dict(kept.holders)])}"

    def _note(
        self,
        called: float,
        step: int | None,
        source: str,
        job_run: str,
        error: BaseException | None = None,
    ) -> None:
        """Note that training goes on after a step, -1 for none; or with an error that it cannot."""
        seconds, began = self._events.seconds, called if self._began is None else self._began
        parts = {f"{part}_s": seconds.get(part, 0.0) for part in _PARTS}
        seconds.clear()
        self._began = None
        is_own = source in ("own node", "own memory", "own live state")
        tier: Tier | None = "local" if is_own else "replicated"
        if source in ("", _ELSEWHERE_SOURCE, _SHARED_SOURCE):
            tier = "shared" if source == _SHARED_SOURCE else None
        details = {"job_run": job_run, "source": source, "why_not_live": self.why, **parts}
        self._events.emit("resume", began=began, step=step, tier=tier, error=error, details=details)

    def _newest(self, elsewhere: Elsewhere | None) -> _Newest:
        if elsewhere is not None and elsewhere.goes_back:
            return _Newest(elsewhere.step, is_elsewhere=True)
        manager, on_nodes, failed = self._nodes.manager, -1, None
        try:
            on_nodes = manager.find_latest()
        except (MismatchError, NoReplicasAvailableError) as error:
            failed = error
        shared, given_up = -1, None
        try:
            if self._shared is not None:
                shared = self._shared.manager.find_latest(on_nodes=on_nodes)
        except NoReplicasAvailableError as error:
            given_up = error
        known = -1 if elsewhere is None else elsewhere.step
        beside = max(shared, known)
        if failed is not None:
            _leave_nodes(failed, beside, given_up)
        is_bad = beside >= 0 and on_nodes >= 0 and manager.is_bad(on_nodes)
        takes_nodes = on_nodes >= max(beside, 0) and not is_bad
        if given_up is not None and beside < 0 and not takes_nodes:
            raise given_up
        return _Newest(beside, known > shared, on_nodes, takes_nodes, given_up)

    def _load(self, load: Selection, elsewhere: Elsewhere | None) -> tuple[int, str]:
        """Load the newest checkpoint; returns its step, and the source of this rank's part."""
        newest, manager = self._newest(elsewhere), self._nodes.manager
        if newest.takes_nodes:
            try:
                step, source = self._nodes.load(load, None)
                # A damaged checkpoint makes way for the one before, which may be too old.
                if step >= newest.beside:
                    return step, source
            except (MismatchError, NoReplicasAvailableError) as error:
                _leave_nodes(error, newest.beside, newest.given_up)
        if newest.is_elsewhere:
            assert elsewhere is not None, "it is the newest"
            if not manager.read_only:
                manager.begin(elsewhere.step)
                if elsewhere.goes_back:
                    self._go_back(elsewhere.step)
            elsewhere.load()
            return elsewhere.step, _ELSEWHERE_SOURCE
        if self._shared is None or newest.beside < 0:
            return -1, ""
        shared = self._shared
        steps = shared.manager.all_iterations(on_nodes=newest.on_nodes)
        try:
            return shared.load(load, steps), _SHARED_SOURCE
        except (CorruptShardError, NoReplicasAvailableError, StorageError):
            # A job that goes on there, and has a newer one now, may have pruned what was read.
            if shared.manager.find_latest(on_nodes=newest.on_nodes) <= newest.beside:
                raise
        return self._load(load, elsewhere)

    def _load_step(self, load: Selection, step: int) -> tuple[int, str]:
        """Load the checkpoint of a step, from the nodes if they have it; as :meth:`_load`."""
        try:
            _, source = self._nodes.load(load, step)
        except (MismatchError, NoReplicasAvailableError) as error:
            self._with_step(step, error).load(load, [step])
            source = _SHARED_SOURCE
        if not self._nodes.manager.read_only:
            self._go_back(step)
        return step, source

    def _with_step(self, step: int, error: MismatchError | NoReplicasAvailableError) -> SharedTier:
        """Return shared storage; raise the error of the nodes unless it has a step."""
        if self._shared is None:
            raise error
        there = self._shared.manager.all_iterations()
        if step not in there:
            if isinstance(error, MismatchError):
                raise error
            listed = ", ".join(map(str, there[:_SHOWN])) or "none"
            raise NoReplicasAvailableError(
                f"{error.text}. Shared storage ({self._shared.root}) has {listed}"
            ) from error
        logger.warning("step %d is loaded from shared storage: %s", step, described(error))
        return self._shared

    def _go_back(self, step: int) -> None:
        """Give up what shared storage has above a step that the job goes back to."""
        if self._shared is not None:
            self._shared.manager.go_back(step)

    def _say_what_was_loaded(
        self, step: int, source: str, called: float, saved_at: float | None, *, is_empty: bool
    ) -> str:
        """Say on the root where all loaded from; return the name of the job's run."""
        trained_to = -1 if self.trained_to is None or step >= 0 else self.trained_to
        mine = [source, self._events.run, is_empty, trained_to]
        seconds = time.monotonic() - called
        told, job_run = self._ranks.decide(
            "say what was loaded", lambda: mine, _judge_sources, read=shaped((str, str))
        )
        places = [self._nodes.root] + ([] if self._shared is None else [self._shared.root])
        line = f"no checkpoint is in {' or '.join(map(str, places))}: the job starts at step 0"
        if step >= 0:
            # By clocks of two machines, maybe.
            age = "" if saved_at is None else f", saved {_ago(time.time() - saved_at)}"
            line = f"resumed after step {step}{age}, in {seconds:.2f} s: {told}"
        logger.log(logging.INFO if self._ranks.is_root else logging.DEBUG, "%s", line)
        if self._ranks.is_root and not self._quiet and not _is_shown() and sys.stderr is not None:
            sys.stderr.write(f"localckpt: {line}\n")
            sys.stderr.flush()
        return str(job_run)


def _is_shown() -> bool:
    """Return whether the log shows a line of this module to a person, as far as that is known."""
    current: logging.Logger | None = logger
    while current is not None and logger.isEnabledFor(logging.INFO):
        for handler in current.handlers:
            is_hidden = isinstance(handler, logging.FileHandler | logging.NullHandler)
            if handler.level <= logging.INFO and not is_hidden:
                return True
        current = current.parent if current.propagate else None
    return False


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _leave_nodes(
    error: CheckpointingException, beside: int, given_up: NoReplicasAvailableError | None
) -> None:
    """Log an error of the nodes, if there is a checkpoint beside them; else raise it."""
    if beside < 0:
        # What is on shared storage was given up before.
        raise error from given_up
    logger.warning(
        "the checkpoints on the nodes are left for step %d: %s", beside, described(error)
    )


def _judge_sources(told_by: list[list[Any]]) -> list[str]:
    if trained := {rank: step for rank, (*_, step) in enumerate(told_by) if step >= 0}:
        step = max(trained.values())
        raise NoReplicasAvailableError(
            f"there is no complete checkpoint to go back to, and the state of "
            f"{ranks_named(list(trained))} may be that of training up to step {step}, not as it "
            f"was made: give rejoin(state=...) parts that are made anew. Nothing was changed"
        )
    if all(is_empty for _, _, is_empty, _ in told_by):
        raise MismatchError(
            "nothing of this state is in the checkpoint: not one of its parts has the name of one "
            "that was saved. Name the parts as they were, or say how they were called, "
            "rename={'old': 'new'}. Nothing was changed but the random number generators"
        )
    ranks_by_source: dict[str, list[int]] = {}
    for rank, (source, *_) in enumerate(told_by):
        ranks_by_source.setdefault(source, []).append(rank)
    told = (f"{ranks_named(ranks)} from {source}" for source, ranks in ranks_by_source.items())
    return [", ".join(told), told_by[0][1]]


def _judge_arguments(told_by: list[list[Any]]) -> list[Any]:
    """Compare the arguments of all ranks; return the names of all parts, and what is kept."""
    known_by = [known for known, *_ in told_by]
    steps = [None if known is None else known[0] for known in known_by]
    for rank, known in enumerate(known_by):
        if known != known_by[0]:
            raise MismatchError(
                f"the ranks know of different checkpoints elsewhere: rank 0 of step {steps[0]}, "
                f"rank {rank} of step {steps[rank]}. Give all the same, from storage that all see. "
                f"Nothing was loaded"
            )
    judge_arguments([arguments for _, arguments, *_ in told_by])
    names = list(dict.fromkeys(key for _, _, keys, _ in told_by for key in keys))
    return [names, judge_live([LiveReport(*live) for *_, live in told_by])]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A checkpoint that the program loads by itself, such as one of a framework's own.

    Attributes:
        step: Its step; the same on all ranks.
        load: Fills the state from it. All ranks call it.
        goes_back: Whether to take it even if localckpt has a newer one, which is then given up.
    """

    step: int
    load: Callable[[], object]
    goes_back: bool = False
