"""What all ranks decide from their reports, how steps are timed, and what asks a job to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt import Every
from localckpt.checkpointer import cadence
from localckpt.checkpointer.cadence import NODES, SHARED, Costs, Plan, Schedule, judge_reports
from localckpt.checkpointer.stopping import StopRequests


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


def test_one_rank_that_is_to_stop_stops_all_and_is_named() -> None:
    costs = Costs(0.1, 0.1)

    plan = _judged(
        *(Every(steps=5), _report(5, None, costs), _report(5, "signal SIGTERM", costs)),
        _report(5, "/stop is there", costs),
    )

    assert plan.stop == "rank 1: signal SIGTERM"
    assert _judged(Every(steps=5), _report(5, None, costs)).stop is None


def test_a_rank_that_has_measured_nothing_leaves_the_cadence_open() -> None:
    plan = _judged(
        Every(minutes=1), _report(5, None, Costs(0.1, 0.1)), _report(5, None, Costs(None, None))
    )

    assert plan.intervals[NODES] is None


def test_ranks_in_different_steps_are_named_and_have_one_plan() -> None:
    costs = Costs(0.1, 0.1)

    plan = _judged(
        Every(minutes=1), _report(7, None, costs, (5, -1)), _report(6, None, costs, (2, -1))
    )

    assert plan.mismatch is not None
    assert "rank 1 called step(6) when rank 0 called step(7)" in plan.mismatch
    assert (plan.saved[NODES], plan.intervals[NODES]) == (5, 600)


@pytest.mark.parametrize(("saved", "due"), [(5, 15), (9, 19), (12, 22)])
def test_the_next_save_follows_the_last_one_also_if_that_began_after_the_pulse(
    saved: int, due: int
) -> None:
    schedule = Schedule((Every(minutes=1), None))
    schedule.begin(-1)
    schedule.note_save(NODES, saved)

    schedule.follow(Plan([10, None], [5, -1]), 13, may_save=True)

    assert not schedule.is_save_due(NODES, due - 1)
    assert schedule.is_save_due(NODES, due)
    assert not schedule.is_save_due(SHARED, due)


def test_saves_with_a_cadence_in_steps_follow_from_the_number_of_the_step_alone() -> None:
    one, other = Schedule((Every(steps=5), None)), Schedule((Every(steps=5), None))
    one.begin(-1)
    other.begin(6)

    one.note_save(NODES, 7)

    assert [one.is_save_due(NODES, step) for step in (8, 9)] == [False, True]
    assert not other.is_save_due(NODES, 8)
    other.note_save(NODES, 10)
    one.note_save(NODES, 9)
    for schedule in (one, other):
        assert [step for step in range(11, 16) if schedule.is_save_due(NODES, step)] == [14, 15]


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(cadence, "time", made)
    return made


def test_a_save_costs_what_training_waits_and_what_steps_beside_it_take_longer(
    clock: _Clock,
) -> None:
    timed = cadence.Meter()

    def step(seconds: float, waits_s: float = 0.0, *, is_beside_save: bool = False) -> None:
        clock.now += seconds
        entered = timed.enter(is_beside_save=is_beside_save)
        clock.now += waits_s
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


def _nothing_asked(**given_: Any) -> StopRequests:
    nothing = {"signals": (), "file": None, "ask": None, "on_signal": lambda _: None}
    return StopRequests(**nothing | given_)


def test_a_signal_asks_to_stop_and_reaches_the_handler_that_was_there() -> None:
    reached: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: reached.append(number))
    try:
        requests = _nothing_asked(signals=[signal.SIGUSR2])
        assert requests.why() is None

        os.kill(os.getpid(), signal.SIGUSR2)

        assert requests.why() == "signal SIGUSR2"
        assert reached == [signal.SIGUSR2]
        requests.close()
        requests.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert reached == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_was_set_later_stays() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    try:
        requests = _nothing_asked(signals=[signal.SIGUSR2])
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

        requests.close()

        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_file_that_cannot_be_looked_at_stops_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Too long a name is an error for root, too.
    requests = _nothing_asked(file=tmp_path / ("x" * 300), ask=lambda: "maintenance")

    assert requests.why() == "maintenance"
    assert "stop_file cannot be looked at" in caplog.text


def test_a_file_and_a_function_ask_to_stop(tmp_path: Path) -> None:
    file, told = tmp_path / "stop", [""]
    one, other = (_nothing_asked(file=file, ask=lambda: told[0]) for _ in range(2))

    assert one.why() is None
    told[0] = "maintenance at 9"
    assert one.why() == "maintenance at 9"
    file.touch()
    assert other.why() == f"{file} is there"
    file.unlink()
    told[0] = ""
    # What was told once holds.
    assert [one.why(), other.why()] == ["maintenance at 9", f"{file} is there"]


def test_a_function_that_fails_asks_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def ask() -> str:
        raise ConnectionError("no metadata")

    assert _nothing_asked(ask=ask).why() is None
    assert "no metadata" in caplog.text


def test_a_function_that_does_not_answer_holds_nothing_up_and_its_answer_is_heard_later() -> None:
    gate = threading.Event()

    def ask() -> str:
        gate.wait(60.0)
        return "maintenance at 9"

    requests = _nothing_asked(ask=ask)

    assert requests.why() is None
    gate.set()
    deadline = time.monotonic() + 30
    while (told := requests.why()) is None and time.monotonic() < deadline:
        pass
    assert told == "maintenance at 9"


def test_outside_of_the_main_thread_no_handler_is_set_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    thread = threading.Thread(target=lambda: _nothing_asked(signals=[signal.SIGTERM]))
    thread.start()
    thread.join(10.0)

    assert signal.getsignal(signal.SIGTERM) == before
    assert "SIGTERM will not stop this job" in caplog.text


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
