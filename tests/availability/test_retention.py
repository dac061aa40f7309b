"""Which checkpoints on shared storage stay, decided from plain data."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt import Best, CheckpointingException, Retention
from localckpt.availability.durability import Durability, Found
from localckpt.availability.retention import (
    Candidate,
    Reason,
    Retirement,
    Version,
    metrics_from_json,
    metrics_to_json,
    node_rules,
    plain_metrics,
    reasons_to_keep,
    rules,
)
from localckpt.ids import Checkpoint, Generation
from localckpt.lineage import EpochId, Lineage, Point
from localckpt.managers.context import JobCheckpoints
from localckpt.replication.strategies import NoReplication

METRICS = st.dictionaries(
    st.sampled_from(["loss", "accuracy"]), st.floats(width=16) | st.sampled_from([0.5, 1.0])
)
RETENTIONS = st.builds(
    Retention,
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 30),
    st.none()
    | st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)


@st.composite
def roots(draw: st.DrawFn) -> tuple[list[Candidate], Version, Version | None]:
    """Checkpoints of some epochs, the one just saved, and the one that the job resumed from."""
    versions = draw(
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(0, 99)), min_size=1, max_size=15, unique=True
        )
    )
    candidates = [Candidate(v, draw(METRICS), draw(st.booleans())) for v in versions]
    saved = max(versions)
    earlier = [v for v in versions if v[0] < saved[0]]
    return candidates, saved, draw(st.none() | st.sampled_from(earlier) if earlier else st.none())


def one_epoch(metrics: dict[int, dict[str, float]], pinned: frozenset[int] = frozenset()) -> Any:
    return [Candidate((1, i), values, i in pinned) for i, values in metrics.items()]


def kept(retention: Retention, candidates: list[Candidate]) -> dict[int, tuple[Reason, ...]]:
    """Iterations that stay in a root of one epoch, and why."""
    saved = max(candidate.version for candidate in candidates)
    reasons = reasons_to_keep(retention, candidates, saved, None)
    return {iteration: reasons[1, iteration] for _, iteration in sorted(reasons)}


# What holds whatever there is.


@given(roots(), RETENTIONS)
def test_the_newest_the_resumed_and_the_pinned_stay(root: Any, retention: Retention) -> None:
    candidates, saved, resumed_from = root

    stay = reasons_to_keep(retention, candidates, saved, resumed_from)

    assert {saved, *([resumed_from] if resumed_from else [])} <= stay.keys()
    assert {c.version for c in candidates if c.is_pinned} <= stay.keys()
    assert stay.keys() <= {c.version for c in candidates}
    assert all(stay.values())


@given(
    st.dictionaries(st.integers(0, 99), METRICS, min_size=1, max_size=20),
    st.frozensets(st.integers(0, 99)),
    RETENTIONS,
)
def test_pruning_after_each_save_leaves_what_pruning_at_the_end_would(
    metrics: dict[int, dict[str, float]], pinned: frozenset[int], retention: Retention
) -> None:
    everything = one_epoch(dict(sorted(metrics.items())), pinned)

    left: list[Candidate] = []
    for candidate in everything:
        left.append(candidate)
        stay = reasons_to_keep(retention, left, candidate.version, None)
        left = [c for c in left if c.version in stay]

    assert [c.version[1] for c in left] == list(kept(retention, everything))


@given(
    st.dictionaries(st.integers(0, 99), METRICS, min_size=1, max_size=20),
    RETENTIONS.filter(lambda retention: not retention.keeps_all),
)
def test_no_rule_keeps_more_than_it_says(
    metrics: dict[int, dict[str, float]], retention: Retention
) -> None:
    spans = 0 if retention.every is None else 1 + math.ceil(100 / retention.every)
    best = 0 if retention.best is None else retention.best.count

    stay = kept(retention, one_epoch(metrics))

    assert len(stay) <= 1 + (retention.last or 0) + spans + best
    for reason, most in (("last", retention.last or 0), ("every", spans), ("best", best)):
        assert sum(reason in reasons for reasons in stay.values()) <= most


@given(METRICS, RETENTIONS)
def test_metrics_and_rules_come_back_from_json_as_they_were(
    metrics: dict[str, float], retention: Retention
) -> None:
    assert str(metrics_from_json(metrics_to_json(metrics))) == str(metrics)
    assert Retention.from_json(retention.to_json()) == retention


# What each rule means.


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (range(500, 3001, 500), [1000, 2000, 3000]),
        (range(499, 3000, 500), [999, 1999, 2999]),
        # Saved by the clock, at no multiple.
        ([310, 690, 1020, 1350, 1710, 2100], [690, 1710, 2100]),
        ([0, 500, 1000, 1500], [1000, 1500]),
    ],
)
def test_of_every_so_many_iterations_the_last_checkpoint_stays(
    iterations: list[int], expected: list[int]
) -> None:
    assert list(kept(Retention(every=1000), one_epoch({i: {} for i in iterations}))) == expected


def test_a_checkpoint_stays_while_any_rule_keeps_it_and_each_rule_is_named() -> None:
    losses = {100: 3.0, 200: 0.1, 300: math.nan, 400: 0.2, 500: 0.3, 600: 0.3}
    candidates = one_epoch({i: {"loss": v} for i, v in losses.items()}, frozenset({100}))
    candidates.append(Candidate((1, 700), {}, False))

    stay = kept(Retention(last=2, every=500, best=Best("loss", count=2)), candidates)

    assert stay == {
        100: ("pinned",),
        200: ("best",),
        400: ("best",),
        500: ("every",),
        600: ("last",),
        700: ("newest", "last", "every"),
    }
    most = kept(
        Retention(last=1, best=Best("loss", "max")), one_epoch({1: {"loss": 2.0}, 2: {"loss": 1.0}})
    )
    assert most == {1: ("best",), 2: ("newest", "last")}


def test_what_was_left_behind_pushes_out_nothing_and_goes_when_others_are_there() -> None:
    old = [Candidate((1, i), {"loss": 0.0}, False) for i in (100, 200)]
    first, second = (Candidate((2, i), {"loss": 1.0}, False) for i in (150, 160))
    retention = Retention(last=3, best=Best("loss"))

    early = reasons_to_keep(retention, [*old, first], (2, 150), (1, 100))
    late = reasons_to_keep(retention, [*old, first, second], (2, 160), (1, 100))

    assert early[1, 200] == ("left behind",)
    assert "best" in early[1, 100]
    assert late.keys() == {(1, 100), (2, 150), (2, 160)}


def test_what_is_ahead_of_a_job_that_started_over_stays_until_it_is_passed() -> None:
    candidates = [Candidate(v, {}, False) for v in ((1, 100), (1, 5), (2, 10))]

    stay = reasons_to_keep(Retention(last=1), candidates, (2, 10), None)

    assert stay == {(2, 10): ("newest", "last"), (1, 100): ("ahead",)}


# What is refused.


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Retention(last=0), r"Retention\(last=0\): it must be a whole number above 0"),
        (lambda: Retention(every=1.5), r"Retention\(every=1.5\)"),  # type: ignore[arg-type]
        (lambda: Retention(best="loss"), r"give the metric as Best\('loss', mode='min'\)"),  # type: ignore[arg-type]
        (lambda: Best(""), "name the metric"),
        (lambda: Best("loss", "least"), "it must be 'min' or 'max'"),  # type: ignore[arg-type]
        (lambda: Best("loss", count=True), r"Best\(count=True\)"),
        (lambda: plain_metrics({"loss": "low"}), "the metric 'loss' is a str"),  # type: ignore[dict-item]
        (lambda: plain_metrics({3: 1.0}), "the metric 3 has no name"),  # type: ignore[dict-item]
    ],
)
def test_rules_and_metrics_that_mean_nothing_are_refused(make: Any, told: str) -> None:
    with pytest.raises(CheckpointingException, match=told):
        make()


_VALUES = st.none() | st.sampled_from([-math.inf, 0.5, 1.0, 2.0, math.inf])
_RETENTIONS = st.builds(
    Retention,
    st.integers(1, 3),
    st.none(),
    st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)


class _Job:
    """A job of one rank, whose starts hand on what a look at the nodes would find."""

    def __init__(self, retention: Retention) -> None:
        self.retention = retention
        self.known = JobCheckpoints(NoReplication(1.0, None))

    def save(
        self, iteration: int, value: float | None = None, bad: bool = False, level: Any = "local"
    ) -> Retirement | None:
        checkpoint = _checkpoint(iteration)
        metric = None if value is None else ("loss", value)
        self.known.note(checkpoint, mark="bad" if bad else None, metric=metric)
        self.known.add(checkpoint, Durability(iteration, level, 1, 2))
        return self.known.keep(iteration, self.retention)

    def restart(self) -> None:
        known = self.known
        found = Found({c: _kept(c.iteration) for c in known.complete}, [], "", known.trusts)
        self.known = JobCheckpoints(NoReplication(1.0, None))
        self.known.take_in(Found.from_json(json.loads(json.dumps(found.to_json()))))

    @property
    def iterations(self) -> set[int]:
        return {checkpoint.iteration for checkpoint in self.known.complete}


def _checkpoint(iteration: int) -> Checkpoint:
    return Checkpoint(Generation(1, 1 + iteration), iteration, 1)


def _kept(iteration: int) -> Durability:
    return Durability(iteration, "local", 1, 1)


@given(st.lists(st.tuples(_VALUES, st.booleans(), st.booleans()), max_size=12), _RETENTIONS)
def test_what_stays_is_the_last_and_the_best_of_all_that_was_saved(
    saves: list[tuple[float | None, bool, bool]], retention: Retention
) -> None:
    assert retention.best is not None
    assert retention.last is not None
    sign = 1.0 if retention.best.mode == "min" else -1.0
    job, sound = _Job(retention), dict[int, float | None]()

    for iteration, (value, is_bad, restarts) in enumerate(saves):
        before = {*job.iterations, iteration}
        over = job.save(iteration, value, is_bad)
        if not is_bad:
            sound[iteration] = value
        if restarts:
            job.restart()

        valued = [(sign * v, -i) for i, v in sound.items() if v is not None]
        expected = {-i for _, i in sorted(valued)[: retention.best.count]}
        expected.update([*sound][-retention.last :])
        if len(sound) < retention.last:
            expected.update(sound)
        bad = job.iterations - sound.keys()
        assert job.iterations - bad == expected
        # The newest is the last resort if it is newer than all that are sound.
        assert bad <= {iteration}
        assert len(expected) <= retention.most
        if over is not None:
            assert {i for i in before if not over.takes(_checkpoint(i))} == job.iterations


@given(st.lists(st.sampled_from(["local", "replicated"]), max_size=12), st.integers(1, 3))
def test_however_many_saves_lack_copies_the_last_that_survives_stays_and_goes_with_the_next(
    saves: list[str], keep_last: int
) -> None:
    job, last_whole = _Job(Retention(last=keep_last)), -1

    for iteration, level in enumerate(saves):
        job.save(iteration, level=level)
        last_whole = iteration if level == "replicated" else last_whole

        kept = {*range(max(0, iteration + 1 - keep_last), iteration + 1)}
        assert job.iterations == kept | ({last_whole} - {-1})


def test_what_the_job_went_back_from_is_not_best() -> None:
    job = _Job(Retention(last=1, best=Best("loss")))
    for iteration, value in ((1, 2.0), (2, 1.0), (3, 3.0)):
        job.save(iteration, value)
    job.restart()
    epoch = _checkpoint(1).generation.epoch_id
    # Back to iteration 1, which is gone here, from 2 and 3.
    job.known.job_has_looked = True
    job.known.began(Lineage(EpochId(2, 7), "local", 1, (Point(epoch, 1),), (Point(epoch, 3),)))
    again = Checkpoint(Generation(2, 7 << 28), 2, 1)
    job.known.note(again, metric=("loss", 5.0))
    job.known.add(again, _kept(2))

    over = job.known.keep(2, job.retention)

    assert job.known.complete == [again]
    assert over is not None
    assert over.takes(_checkpoint(2))


@pytest.mark.parametrize(
    ("keep_last", "retention", "told"),
    [
        (2, Retention(last=2), "give keep_last= or retention=, not both: retention=Retention"),
        (0, None, "keep_last is 0; it must be at least 1"),
        (None, Retention(best=Best("loss")), "which need last=, at least 1: a restart loads"),
        (None, Retention(), "which need last=, at least 1"),
        (None, Retention(last=2, every=10), "every= would fill them: .* has no bound. Give it"),
        (None, Retention(2, None, Best("l" * 201)), "has 201 characters, and the nodes note at"),
        (None, "best", r"retention='best': give the rules as Retention\(last=2, ...\)"),
    ],
)
def test_what_the_nodes_cannot_follow_is_an_error_that_says_why(
    keep_last: int | None, retention: Retention | None, told: str
) -> None:
    with pytest.raises(CheckpointingException, match=told):
        node_rules(keep_last, retention)


def test_the_short_form_is_the_rule() -> None:
    assert node_rules(3, None) == Retention(last=3)
    assert node_rules(None, None) == Retention(last=2)
    assert rules(None, None) == Retention()
    assert kept(Retention(), one_epoch({1: {}, 2: {}})) == {1: ("all",), 2: ("newest", "all")}
    with pytest.raises(CheckpointingException, match="shared_retention=, not both"):
        rules(3, Retention(), "shared_")
