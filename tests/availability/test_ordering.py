"""Order by lineage, over random histories of a job: the oracle is the history itself.

Pure: nodes are sets of records. What a job does at a start and after a save is done here by the
same functions, and judged by what has truly happened.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.coverage import (
    SaveOutcome,
    complete_checkpoints,
    newest_first,
    overruled,
    unrelated,
)
from localckpt.availability.durability import Found, durability_saved
from localckpt.availability.inventory import Inventory
from localckpt.availability.retention import Retention
from localckpt.ids import SAVES_AN_ATTEMPT, Checkpoint, Generation, ShardRecord
from localckpt.lineage import (
    MOST_ANCESTORS,
    MOST_GIVEN_UP,
    EpochId,
    Lineage,
    Point,
    Resumed,
    begin_lineage,
    unsaid,
)
from localckpt.managers.context import JobCheckpoints
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

    def inventory(self, nodes: str) -> Inventory:
        return Inventory.found({node: tuple(self.nodes.get(node, ())) for node in nodes})

    def newest(self, there: set[Checkpoint], complete: list[Checkpoint]) -> Checkpoint | None:
        """What a restart is to load, by the history.

        The highest that was not given up; if there is none, the highest that was given up by those
        alone, and so on.
        """
        truths = {checkpoint: self.truth(checkpoint) for checkpoint in there}
        if not truths:
            return None
        standing: list[_Attempt] = []
        alive: set[Checkpoint] = set()
        for number in sorted({t.attempt.number for t in truths.values()}, reverse=True):
            of_it = [c for c, t in truths.items() if t.attempt.number == number]
            left = [c for c in of_it if not any(a.went_back_from(truths[c]) for a in standing)]
            alive.update(left)
            standing += [truths[left[0]].attempt] if left else []
        best = [c for c in complete if c in alive]
        if not best:
            return self.newest(there - alive, complete)
        return max(best, key=lambda c: (c.iteration, c.generation))


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
    inventory = world.inventory(nodes)
    complete = complete_checkpoints(inventory)
    _judge(world, inventory, complete)

    known = JobCheckpoints(NoReplication(1.0, None))
    known.take_in(Found.among(inventory, {}))
    known.job_has_looked = how != "blind"
    resumed, parent = None, None
    if how in ("latest", "back") and complete:
        loaded = complete[min(which, len(complete) - 1) if how == "back" else 0]
        epoch = loaded.generation.epoch_id
        resumed = Resumed("local", loaded.iteration, inventory.lineages[epoch])
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
        known.add(checkpoint, durability_saved(at, [outcome] * _RANKS))
        _retire(world, nodes, known, attempt, at, int(str(plan["keep_last"])))
    if plan["shares"]:
        world.shared.append((_Truth(attempt, at), lineage))


def _judge(world: _World, inventory: Inventory, complete: list[Checkpoint]) -> None:
    there = set(inventory.checkpoints)
    expected = world.newest(there, complete)
    assert (complete[0] if complete else None) == expected
    # A function of what is there, in whatever order it was told.
    shuffled = sorted(there, key=lambda c: c.generation.sequence % 7)
    assert newest_first(shuffled, inventory.lineages) == newest_first(there, inventory.lineages)
    if expected is None:
        return
    # Nothing complete is above it but what the job chose to go back from.
    for other in complete:
        if other.iteration > expected.iteration:
            back = [a for a in world.attempts.values() if a.went_back_from(world.truth(other))]
            assert back


def _retire(
    world: _World, nodes: str, known: JobCheckpoints, attempt: _Attempt, saved: int, keep_last: int
) -> None:
    over = known.keep(saved, Retention(last=keep_last))
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


@given(st.booleans(), st.lists(_STARTS, max_size=7))
def test_a_restart_loads_what_the_history_of_the_job_says(
    are_replicated: bool, plans: list[dict[str, object]]
) -> None:
    world = _World(are_replicated)

    for number, plan in enumerate(plans):
        # Random in truth; here, so that epochs of one number come in any order.
        _start(world, plan, random.Random(number).randrange(1, 2**32))


_EPOCHS = st.builds(EpochId, st.integers(1, 4), st.integers(0, 1))
_POINTS = st.lists(st.builds(Point, _EPOCHS, st.integers(0, 5)), max_size=3).map(tuple)
_CLAIMED = st.builds(
    Lineage,
    epoch=_EPOCHS,
    origin=st.sampled_from(["nothing", "elsewhere", "local", "shared"]),
    resumed_at=st.integers(-1, 5),
    ancestors=_POINTS,
    given_up=_POINTS,
    is_cut=st.booleans(),
)


def _checkpoint(epoch: EpochId, iteration: int, sequence: int = 0, ranks: int = 1) -> Checkpoint:
    return Checkpoint(
        Generation(epoch.number, epoch.draw * SAVES_AN_ATTEMPT + sequence), iteration, ranks
    )


_CHECKPOINTS = st.lists(
    st.builds(_checkpoint, _EPOCHS, st.integers(0, 5), st.integers(0, 2), st.integers(1, 2)),
    max_size=12,
)


@given(_CHECKPOINTS, st.lists(_CLAIMED, max_size=6), st.randoms(use_true_random=False))
def test_the_order_is_total_and_the_same_for_all_whatever_lineages_claim(
    checkpoints: list[Checkpoint], claimed: list[Lineage], chance: random.Random
) -> None:
    lineages = {lineage.epoch: lineage for lineage in claimed}
    told_otherwise = list(checkpoints)
    chance.shuffle(told_otherwise)

    ordered = newest_first(checkpoints, lineages)

    assert (len(ordered), set(ordered)) == (len(set(checkpoints)), set(checkpoints))
    assert newest_first(told_otherwise, lineages) == ordered
    dead = overruled(checkpoints, lineages)
    assert set(ordered[len(ordered) - len(dead) :]) == dead
    of_epoch: dict[EpochId, list[int]] = {}
    for checkpoint in ordered:
        if checkpoint not in dead:
            of_epoch.setdefault(checkpoint.generation.epoch_id, []).append(checkpoint.iteration)
    for iterations in of_epoch.values():
        assert iterations == sorted(iterations, reverse=True)


_OLD, _NEW = EpochId(2, 0), EpochId(3, 9)


def _begin(
    number: int, resumed: Resumed, seen: list[Point], known: dict[EpochId, Lineage]
) -> Lineage:
    lineage = begin_lineage(EpochId(number, 100 + number), resumed, seen, known)
    known[lineage.epoch] = lineage
    return lineage


def test_a_node_that_was_away_overrules_by_iteration_alone() -> None:
    known: dict[EpochId, Lineage] = {}
    away = _begin(1, Resumed(), [], known)
    # The job could not see the checkpoint 200 of the first; so it did not go back from it.
    went_on = _begin(2, Resumed("local", 100, away), [Point(away.epoch, 100)], known)
    behind, ahead = _checkpoint(went_on.epoch, 150), _checkpoint(went_on.epoch, 201)
    back_again, common = _checkpoint(away.epoch, 200), _checkpoint(away.epoch, 100)

    assert newest_first([common, behind, back_again], known) == [back_again, behind, common]
    assert newest_first([common, ahead, back_again], known) == [ahead, back_again, common]
    assert unrelated(back_again, [behind, common], known) == [behind]
    assert unrelated(ahead, [back_again, common], known) == [back_again]
    assert unrelated(ahead, [common], known) == []


def test_a_lineage_stays_small_however_often_the_job_starts_and_goes_back() -> None:
    known: dict[EpochId, Lineage] = {}
    lineage = _begin(1, Resumed(), [], known)
    for number in range(2, 3000):
        there = [Point(lineage.epoch, 10 * number)]
        goes_back = number % 3 == 0
        at = 10 * number - (5000 if goes_back else 0)
        lineage = _begin(number, Resumed("local", max(at, 0), lineage), there, known)

    assert lineage.is_cut
    assert len(lineage.ancestors) == MOST_ANCESTORS
    assert len(lineage.given_up) == MOST_GIVEN_UP
    # Those that are farthest from being passed.
    assert min(point.iteration for point in lineage.given_up) > 10 * 2970
    assert len(json.dumps(lineage.to_json())) < 450
    # Which may be an ancestor beyond those that it names is not told to be another lineage's.
    newest, first = _checkpoint(lineage.epoch, 10**6), _checkpoint(EpochId(1, 101), 3)
    assert unrelated(newest, [first], known) == []


@pytest.mark.parametrize(
    ("first", "seen", "origin", "resumed_at"),
    [
        (0, [], "nothing", -1),
        (5000, [], "nothing", -1),
        (5000, [18, 7], "elsewhere", 18),
        (18, [18, 7], "nothing", -1),
        (3, [18], "nothing", -1),
    ],
)
def test_a_job_that_says_nothing_went_on_from_elsewhere_if_it_saves_above_all_there_is(
    first: int, seen: list[int], origin: str, resumed_at: int
) -> None:
    points = [Point(_OLD, iteration) for iteration in seen]

    resumed = unsaid(first, points)
    lineage = begin_lineage(_NEW, resumed, points, {})

    assert (lineage.origin, lineage.resumed_at) == (origin, resumed_at)
    gives_up = [lineage.gives_up(_OLD, iteration) for iteration in seen]
    assert gives_up == [origin == "nothing"] * len(seen)


def test_no_start_is_overruled_by_another_of_its_number_whatever_that_says() -> None:
    epochs = EpochId(3, 1), EpochId(3, 2)
    one, other = (Checkpoint(Generation(3, e.draw * SAVES_AN_ATTEMPT), 7, 2) for e in epochs)
    lineages = {
        epoch: Lineage(epoch, given_up=(Point(against, 7),))
        for epoch, against in zip(epochs, reversed(epochs), strict=True)
    }

    assert overruled([one, other], lineages) == set()


def test_who_regrets_that_it_went_back_overrules_that() -> None:
    known: dict[EpochId, Lineage] = {}
    first = _begin(1, Resumed(), [], known)
    hundred = Point(first.epoch, 100)
    back = _begin(2, Resumed("local", 50, first), [Point(first.epoch, 50), hundred], known)
    seen = [Point(back.epoch, 60), Point(first.epoch, 50), hundred]
    regrets = _begin(3, Resumed("local", 100, first), seen, known)
    there = {
        50: _checkpoint(first.epoch, 50),
        100: _checkpoint(first.epoch, 100),
        60: _checkpoint(back.epoch, 60),
        101: _checkpoint(regrets.epoch, 101),
    }

    def ordered(*iterations: int) -> list[int]:
        checkpoints = [there[iteration] for iteration in iterations]
        return [c.iteration for c in newest_first(checkpoints, known)]

    assert ordered(50, 100) == [100, 50]
    assert ordered(50, 60, 100) == [60, 50, 100]
    # By iteration it would be so anyhow; 60 is no ancestor of 101, and gave up what is one.
    assert ordered(50, 60, 100, 101) == [101, 60, 50, 100]
    again = _begin(4, Resumed("local", 50, first), [*seen, Point(regrets.epoch, 101)], known)
    there[55] = _checkpoint(again.epoch, 55)
    assert ordered(50, 55, 60, 100, 101) == [55, 50, 101, 60, 100]
