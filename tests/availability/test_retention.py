"""Which checkpoints on shared storage stay, decided from plain data."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt import Best, CheckpointingException, Retention
from localckpt.availability.retention import (
    Candidate,
    Reason,
    Version,
    metrics_from_json,
    metrics_to_json,
    plain_metrics,
    reasons_to_keep,
)

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


@given(roots(), RETENTIONS, st.randoms())
def test_the_order_in_which_a_directory_is_listed_does_not_matter(
    root: Any, retention: Retention, order: random.Random
) -> None:
    candidates, saved, resumed_from = root
    expected = reasons_to_keep(retention, candidates, saved, resumed_from)

    order.shuffle(candidates)

    assert reasons_to_keep(retention, candidates, saved, resumed_from) == expected


@given(roots(), RETENTIONS)
def test_to_prune_again_removes_nothing(root: Any, retention: Retention) -> None:
    candidates, saved, resumed_from = root
    stay = reasons_to_keep(retention, candidates, saved, resumed_from)

    left = [c for c in candidates if c.version in stay]
    again = reasons_to_keep(retention, left, saved, resumed_from)

    assert again.keys() >= stay.keys() - _only_left_behind(stay)


def _only_left_behind(stay: dict[Version, tuple[Reason, ...]]) -> set[Version]:
    return {version for version, reasons in stay.items() if reasons == ("left behind",)}


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


@given(
    st.dictionaries(st.integers(0, 99), METRICS, min_size=1, max_size=20),
    st.sampled_from(["min", "max"]),
    st.integers(1, 3),
)
def test_nothing_that_goes_is_better_than_the_best(
    metrics: dict[int, dict[str, float]], mode: Any, count: int
) -> None:
    stay = kept(Retention(best=Best("loss", mode, count)), one_epoch(metrics))

    valued = {
        i: v["loss"] for i, v in metrics.items() if not math.isnan(v.get("loss", float("nan")))
    }
    best = {i for i, reasons in stay.items() if "best" in reasons}
    assert len(best) == min(count, len(valued))
    assert best <= valued.keys()
    for other in valued.keys() - best:
        for one in best:
            assert valued[one] <= valued[other] if mode == "min" else valued[one] >= valued[other]


@given(METRICS)
def test_metrics_come_back_from_json_as_they_were(metrics: dict[str, float]) -> None:
    back = metrics_from_json(metrics_to_json(metrics))

    assert str(back) == str(metrics)


@given(RETENTIONS)
def test_rules_come_back_from_json_as_they_were(retention: Retention) -> None:
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


def test_of_equal_values_the_newer_one_is_better() -> None:
    candidates = one_epoch({i: {"loss": 1.0} for i in (1, 2, 3)} | {4: {"loss": 2.0}})

    assert list(kept(Retention(best=Best("loss")), candidates)) == [3, 4]


def test_without_a_rule_all_stay() -> None:
    assert kept(Retention(), one_epoch({1: {}, 2: {}})) == {1: ("all",), 2: ("newest", "all")}


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
