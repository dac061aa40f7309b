"""Cadences follow from what steps and saves take, and from nothing else."""

from __future__ import annotations

from math import expm1
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt import CheckpointingException, Every
from localckpt.checkpointer.cadence import Costs

_STEP_S = st.floats(1e-4, 100.0)
_SAVE_S = st.floats(1e-3, 100.0)


@given(n=st.integers(1, 10**6), step_s=_STEP_S | st.none(), save_s=_SAVE_S | st.none())
def test_steps_are_steps_whatever_is_measured(
    n: int, step_s: float | None, save_s: float | None
) -> None:
    assert Every(steps=n).interval(Costs(step_s, save_s)) == n


@given(minutes=st.floats(0.01, 1000.0), step_s=_STEP_S)
def test_minutes_pass_between_saves_and_not_a_step_more(minutes: float, step_s: float) -> None:
    interval = Every(minutes=minutes).interval(Costs(step_s))

    assert interval is not None
    assert interval * step_s >= 60 * minutes * (1 - 1e-9)
    assert (interval - 1) * step_s <= 60 * minutes * (1 + 1e-9) or interval == 1


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


@pytest.mark.parametrize("every", [Every(overhead=0.01), Every(mtbf_hours=8), Every(minutes=1)])
def test_nothing_is_known_before_it_is_measured(every: Every) -> None:
    assert every.interval(Costs()) is None
    if every.minutes is None:
        assert every.interval(Costs(0.1)) is None


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
