"""What all ranks decide from their reports, how steps are timed, and what asks a job to stop."""

from __future__ import annotations

from math import expm1
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt import CheckpointingException, Every
from localckpt.checkpointer import cadence
from localckpt.checkpointer.cadence import NODES, Costs, Plan, Schedule, judge_reports


def _report(step: int, stop: str | None, costs: Costs, saved: tuple[int, int] = (-1, -1)) -> Any:
    return [step, stop, costs.step_s, costs.save_s, list(saved)]


def _judged(every: Every, *reports: Any) -> Plan:
    return Plan(*judge_reports((every, Every(steps=100)), reports))


@given(
    step_s=st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=5),
    save_s=st.floats(1e-3, 10.0),
)
def test_the_slowest_rank_sets_the_pace(step_s: list[float], save_s: float) -> None:
    every = Every(overhead=0.01)

    plan = _judged(every, *(_report(5, None, Costs(seconds, save_s), (3, 1)) for seconds in step_s))

    assert plan.intervals == [every.interval(Costs(max(step_s), save_s)), 100]
    assert plan.saved == [3, 1]


def test_ranks_in_different_steps_are_named_and_have_one_plan() -> None:
    costs = Costs(0.1, 0.1)

    plan = _judged(
        Every(minutes=1), _report(7, None, costs, (5, -1)), _report(6, None, costs, (2, -1))
    )

    assert plan.mismatch is not None
    assert "rank 1 called step(6) when rank 0 called step(7)" in plan.mismatch
    assert (plan.saved[NODES], plan.intervals[NODES]) == (5, 600)


def test_a_save_costs_what_training_waits_and_what_steps_beside_it_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, timed = [100.0], cadence.Meter()
    monkeypatch.setattr(cadence, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def step(seconds: float, waits_s: float = 0.0, *, is_beside_save: bool = False) -> None:
        now[0] += seconds
        entered = timed.enter(is_beside_save=is_beside_save)
        now[0] += waits_s
        timed.leave(entered, is_save=waits_s > 0)

    assert timed.costs() == Costs(None, None)
    for _ in range(10):
        step(2.0)
    assert timed.costs() == Costs(2.0, None)
    # The first save waits for memory besides.
    step(2.0, 7.0)
    timed.end_save()
    assert timed.costs() == Costs(2.0, None)
    step(2.0, 0.5)
    step(3.0, is_beside_save=True)
    step(2.5, 0.25, is_beside_save=True)
    timed.end_save()
    step(2.0)

    assert timed.costs() == Costs(2.0, 0.5 + 0.25 + 1.0 + 0.5)


def test_a_plan_that_was_under_way_when_a_save_failed_is_not_followed() -> None:
    schedule = Schedule((Every(overhead=0.1), None))
    schedule.begin(-1)
    assert schedule.takes_pulse(1)
    schedule.note_save(NODES, 5)
    schedule.note_failure()

    schedule.follow(Plan([10, None], [-1, -1]), 6, may_save=True)

    assert not schedule.is_save_due(NODES, 10_000)
    assert schedule.takes_pulse(6)
    schedule.follow(Plan([10, None], [5, -1]), 7, may_save=True)
    assert schedule.is_save_due(NODES, 15)
    assert not schedule.is_save_due(NODES, 14)


_STEP_S = st.floats(1e-4, 100.0)
_SAVE_S = st.floats(1e-3, 100.0)


@given(share=st.floats(0.0001, 0.5), step_s=_STEP_S, save_s=_SAVE_S)
def test_saves_take_no_more_than_their_share_and_no_save_is_left_out(
    share: float, step_s: float, save_s: float
) -> None:
    interval = Every(overhead=share).interval(Costs(step_s, save_s))

    assert interval is not None
    assert save_s / (interval * step_s + save_s) <= share * (1 + 1e-6)
    if interval > 1:
        assert save_s / ((interval - 1) * step_s + save_s) > share * (1 - 1e-6)


def _lost(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Expected time per second of training by Daly's full model, without restarts."""
    return mtbf_s * expm1((interval_s + save_s) / mtbf_s) / interval_s


@given(hours=st.floats(0.1, 100.0), save_s=st.floats(0.01, 100.0))
def test_no_other_interval_loses_less_to_saves_and_failures(hours: float, save_s: float) -> None:
    interval = Every(mtbf_hours=hours).interval(Costs(0.01, save_s))

    assert interval is not None
    best = _lost(interval * 0.01, save_s, 3600 * hours)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert best <= _lost(factor * interval * 0.01, save_s, 3600 * hours) * 1.001


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({}, "was given none"),
        ({"steps": 1, "minutes": 2}, "was given steps, minutes"),
        ({"steps": 0}, "must be above 0"),
        ({"steps": 2.5}, "must be an int"),
        ({"steps": True}, "must be above 0"),
        ({"minutes": -1}, "must be above 0"),
        ({"minutes": float("nan")}, "must be above 0"),
        ({"overhead": 1.0}, "below 1"),
    ],
)
def test_a_cadence_that_makes_no_sense_is_refused(given_: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointingException, match=told):
        Every(**given_)
