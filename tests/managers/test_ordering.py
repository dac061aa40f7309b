"""Order by lineage, over random histories of a job: the oracle is the history itself.

Pure: nodes are sets of records. What a job does at a start and after a save is done here by the
same functions, and judged by what has truly happened.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.ids import SAVES_AN_ATTEMPT, Checkpoint, Generation, ShardRecord
from localckpt.lineage import (
    MOST_ANCESTORS,
    EpochId,
    Lineage,
    Resumed,
    begin_lineage,
    unsaid,
)
from localckpt.managers.coverage import SaveOutcome, complete_checkpoints
from localckpt.managers.holdings import Holdings
from localckpt.managers.known import KnownCheckpoints
from localckpt.managers.ordering import newest_first
from localckpt.replication.strategies import NoReplication

_RANKS = 2
_NODES = "abcde"


@dataclass(eq=False)
class _Attempt:
    """What truly happened at one start of the job."""

    number: int
    resumed_at: int
    parent: _Attempt | None
    view: list[_Truth]
    looked: bool

    def past(self) -> set[_Attempt]:
        """Attempts that this one could know of, itself included."""
        found, waiting = set[_Attempt](), [self]
        while waiting:
            attempt = waiting.pop()
            if attempt not in found:
                found.add(attempt)
                waiting += [truth.attempt for truth in attempt.view]
                waiting += [attempt.parent] if attempt.parent else []
        return found

    def ancestors(self, iteration: int) -> list[_Truth]:
        """Where the line of one of its checkpoints left each attempt, its own included."""
        line = [_Truth(self, iteration)]
        attempt = self
        while attempt.parent is not None:
            line.append(_Truth(attempt.parent, attempt.resumed_at))
            attempt = attempt.parent
        return line

    def went_back_from(self, truth: _Truth) -> bool:
        """Whether the job chose not to go on from a checkpoint, for this attempt or one before."""
        return truth.iteration > self.resumed_at and any(
            there.attempt is truth.attempt and truth.iteration <= there.iteration
            for attempt in self.past()
            for seen in attempt.view
            if seen.iteration > attempt.resumed_at
            for there in seen.attempt.ancestors(seen.iteration)
            if there.iteration > attempt.resumed_at
        )


@dataclass(frozen=True)
class _Truth:
    """A checkpoint of an attempt."""

    attempt: _Attempt
    iteration: int


@dataclass
class _World:
    """Nodes, shared storage, and what has truly happened."""

    are_replicated: bool
    nodes: dict[str, set[ShardRecord]] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    shared: list[tuple[_Truth, Lineage]] = field(default_factory=list)
    attempts: dict[EpochId, _Attempt] = field(default_factory=dict)

    def truth(self, checkpoint: Checkpoint) -> _Truth:
        return _Truth(self.attempts[checkpoint.generation.epoch_id], checkpoint.iteration)

    def holdings(self, nodes: str) -> Holdings:
        return Holdings.found({node: tuple(self.nodes.get(node, ())) for node in nodes})

    def newest(self, there: set[Checkpoint], complete: list[Checkpoint]) -> Checkpoint | None:
        """What a restart is to load, by the history: the highest that was not given up."""
        truths = {checkpoint: self.truth(checkpoint) for checkpoint in there}
        standing: list[_Attempt] = []
        alive: set[Checkpoint] = set()
        for number in sorted({t.attempt.number for t in truths.values()}, reverse=True):
            of_it = [c for c, t in truths.items() if t.attempt.number == number]
            left = [c for c in of_it if not any(a.went_back_from(truths[c]) for a in standing)]
            alive.update(left)
            standing += [truths[left[0]].attempt] if left else []
        best = [c for c in complete if c in alive] or complete
        return max(best, key=lambda c: (c.iteration, c.generation), default=None)


_STARTS = st.fixed_dictionaries(
    {
        "nodes": st.permutations(_NODES).map(lambda nodes: "".join(nodes[:_RANKS])),
        "how": st.sampled_from(["latest", "latest", "back", "shared", "unsaid", "blind"]),
        "which": st.integers(0, 5),
        "steps": st.lists(st.integers(1, 30), max_size=4),
        "torn": st.booleans(),
        "shares": st.booleans(),
        "keep_last": st.integers(1, 3),
    }
)


def _start(world: _World, plan: dict[str, object], draw: int) -> None:
    """One start of the job: look, resume, save, retire; every answer is judged."""
    nodes, how, which = str(plan["nodes"]), plan["how"], int(str(plan["which"]))
    steps = list(plan["steps"])  # type: ignore[call-overload]
    holdings = world.holdings(nodes)
    complete = complete_checkpoints(holdings)
    _judge(world, holdings, complete)

    known = KnownCheckpoints(NoReplication(1.0, None))
    known.found(complete, holdings)
    known.job_has_looked = how != "blind"
    resumed, parent = None, None
    if how in ("latest", "back") and complete:
        loaded = complete[min(which, len(complete) - 1) if how == "back" else 0]
        epoch = loaded.generation.epoch_id
        resumed = Resumed("local", loaded.iteration, holdings.lineages[epoch])
        parent = world.attempts[epoch]
    elif how == "shared" and world.shared:
        truth, lineage = world.shared[which % len(world.shared)]
        resumed, parent = Resumed("shared", truth.iteration, lineage), truth.attempt
    at = resumed.iteration if resumed else -1
    if not steps:
        return
    if resumed is None:
        resumed = unsaid(at + steps[0], known.seen or [])
        at = resumed.iteration if resumed.origin == "elsewhere" else -1
    id_ = EpochId(1 + max((world.notes.get(node, 0) for node in nodes), default=0), draw)
    lineage = begin_lineage(id_, resumed, known.seen or [], known.lineages)
    assert len(lineage.ancestors) <= MOST_ANCESTORS
    assert Lineage.from_json(lineage.to_json()) == lineage
    known.began(lineage)
    attempt = _Attempt(
        len(world.attempts), resumed.iteration, parent, [world.truth(c) for c in complete],
        looked=known.job_has_looked,
    )  # fmt: skip
    world.attempts[lineage.epoch] = attempt
    for node in nodes:
        world.notes[node] = lineage.epoch.number

    generation = Generation(lineage.epoch.number, draw * SAVES_AN_ATTEMPT)
    for place, step in enumerate(steps):
        at, generation = at + step, generation.next()
        checkpoint = Checkpoint(generation, at, _RANKS)
        is_torn = bool(plan["torn"]) and place == len(steps) - 1
        for rank, node in enumerate(nodes):
            owners = range(_RANKS) if world.are_replicated else [rank]
            for owner in owners if not is_torn else [0] if rank == 0 else []:
                shard = replace(checkpoint.shard(owner, "run"), lineage=lineage)
                world.nodes.setdefault(node, set()).add(ShardRecord(shard, 8))
        if is_torn:
            return
        outcome = SaveOutcome(at, generation, None, ())
        known.add(checkpoint, [outcome] * _RANKS)
        _retire(world, nodes, known, attempt, at, int(str(plan["keep_last"])))
    if plan["shares"]:
        world.shared.append((_Truth(attempt, at), lineage))


def _judge(world: _World, holdings: Holdings, complete: list[Checkpoint]) -> None:
    there = set(holdings.checkpoints)
    expected = world.newest(there, complete)
    assert (complete[0] if complete else None) == expected
    # A function of what is there, in whatever order it was told.
    shuffled = sorted(there, key=lambda c: c.generation.sequence % 7)
    assert newest_first(shuffled, holdings.lineages) == newest_first(there, holdings.lineages)
    if expected is None:
        return
    # Nothing complete is above it but what the job chose to go back from.
    for other in complete:
        if other.iteration > expected.iteration:
            back = [a for a in world.attempts.values() if a.went_back_from(world.truth(other))]
            assert back


def _retire(
    world: _World,
    nodes: str,
    known: KnownCheckpoints,
    attempt: _Attempt,
    saved: int,
    keep_last: int,
) -> None:
    over = known.keep(saved, keep_last)
    if over is None:
        return
    for node in nodes:
        for record in list(world.nodes.get(node, ())):
            truth = world.truth(record.identity.checkpoint)
            if not over.takes(record.identity.checkpoint):
                continue
            world.nodes[node].discard(record)
            # What is newer by iteration goes only if the job knew of it, and went back.
            went_back = attempt.looked and attempt.went_back_from(truth)
            assert truth.iteration <= saved or went_back
    left = {r.identity.checkpoint for node in nodes for r in world.nodes.get(node, ())}
    assert saved in {c.iteration for c in left if world.truth(c).attempt is attempt}
    assert len([c for c in left if c.iteration <= over.up_to]) <= keep_last + 1


@settings(deadline=None, max_examples=300)
@given(st.booleans(), st.lists(_STARTS, max_size=7))
def test_a_restart_loads_what_the_history_of_the_job_says(
    are_replicated: bool, plans: list[dict[str, object]]
) -> None:
    world = _World(are_replicated)

    for number, plan in enumerate(plans):
        # Random in truth; here, so that epochs of one number come in any order.
        _start(world, plan, random.Random(number).randrange(1, 2**32))
