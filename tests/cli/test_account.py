"""What a job's time went to, computed from its events alone, against jobs of which all is known."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.cli.account import Account, account
from localckpt.cli.starts import starts_of
from localckpt.cli.status import status_of
from localckpt.events.event import Event
from tests.cli.jobs import STEP_S, PaperJob


def account_of(events: list[Event]) -> Account:
    (starts,) = starts_of(events).values()
    return account(starts)


def test_steps_and_seconds_that_restarts_have_lost_are_counted() -> None:
    job = PaperJob(ranks=2)
    job.start()
    job.train(10)
    job.save(0.5)
    job.train(3)
    job.start(down_s=7)
    job.train(4)
    job.save(0.25)
    job.train(1)
    job.save(0.25, outcome=None)
    job.start(down_s=11, split=(1, 1, 1, 1, 1))
    job.train(6)
    job.end()

    told = account_of(job.events)

    first, second, third = told.restarts
    assert [r.lost_steps for r in told.restarts] == [None, 3, 1]
    assert [r.repeated_s for r in told.restarts] == [0, 3 * STEP_S, 1 * STEP_S]
    assert [r.down_s for r in told.restarts] == [0, 7, 11]
    assert [r.recovery_s for r in told.restarts] == [15, 15, 5]
    assert second.parts_s == {"start": 1, "meet": 2, "find": 3, "fetch": 4, "read": 5}
    assert [r.start.ending for r in told.restarts] == ["killed", "killed", "ok"]
    assert first.start.silent_ranks == (0, 1)
    assert (first.on_nodes.ok, first.on_nodes.blocking_s, first.on_nodes.nbytes) == (1, 0.5, 200)
    assert (second.on_nodes.ok, second.on_nodes.cut_off) == (1, 1)
    assert third.start.resumed_step == 13
    assert third.sources == {"local": 2}
    assert told.seconds == {
        "training": 20 * STEP_S,
        "blocking": 1.0,
        "waiting": 0,
        "repeated": 4 * STEP_S,
        "recovery": 35,
        "down": 18,
    }
    assert told.goodput == pytest.approx(40 / 102)


def test_too_few_copies_end_with_a_save_that_has_all_or_when_copies_are_made() -> None:
    job = PaperJob(ranks=2)
    job.start()

    def since() -> float | None:
        (starts,) = starts_of(job.events).values()
        return status_of(starts).degraded_since

    job.train(2)
    job.save()
    noted = job.at
    job.note("degraded", step=job.done)
    first = since()
    job.train(2)
    job.save()
    job.note("degraded", step=job.done)
    assert since() == first == noted
    job.train(1)
    job.save(tier="replicated")
    assert since() is None
    job.train(1)
    job.save()
    job.note("degraded", step=job.done)
    assert since() not in (None, first)
    job.train(2)
    job.note("reprotected")
    assert since() is None


def test_the_ends_of_ranks_are_one_end_of_the_start() -> None:
    job = PaperJob(ranks=3)
    job.start()
    job.train(1)
    job.end("failed", error_class="PeerLostError")
    dead = next(e.run for e in job.events if e.rank == 1)
    job.events = [e for e in job.events if (e.run, e.name) != (dead, "run_ended")]
    job.start()
    job.note("wait", 3.0)
    job.end("stopped")

    first, second = account_of(job.events).restarts

    assert (first.start.ending, first.start.silent_ranks) == ("killed", (1,))
    assert (second.start.ending, second.start.world_size) == ("stopped", 3)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 5)),
        st.tuples(st.just("save"), st.floats(0, 3)),
        st.tuples(st.just("start"), st.floats(0, 20)),
        st.tuples(st.just("go back"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.floats(0, 3)),
    ),
    max_size=25,
)


@given(st.integers(1, 3), ACTIONS, st.randoms())
def test_every_second_is_accounted_for_once_and_training_that_counts_is_what_was_kept(
    ranks: int, actions: list[tuple[str, Any]], order: random.Random
) -> None:
    job = PaperJob(ranks)
    job.start()
    lost = []
    for action, value in actions:
        if action == "train":
            job.train(value)
        elif action == "save":
            job.save(value)
        elif action == "wait":
            job.note("wait", value)
        else:
            if action == "go back":
                job.saved = min(job.saved, value)
            lost.append(job.done - job.saved)
            job.start(down_s=value)
    order.shuffle(job.events)

    told = account_of(job.events)

    assert all(left.ended == pytest.approx(right.began) for left, right in pairwise(told.stretches))
    assert told.total_s == pytest.approx(job.at - 1000.0)
    assert [restart.lost_steps for restart in told.restarts[1:]] == lost
    assert told.unsaved_steps == job.done - job.saved
    assert told.seconds["training"] == pytest.approx((job.done + 1) * STEP_S)
    assert told.seconds["repeated"] == pytest.approx(sum(lost) * STEP_S)
    assert told.seconds["repeated"] == pytest.approx(sum(r.repeated_s for r in told.restarts))


def test_a_start_that_never_resumed_is_recovery_and_loses_nothing_more() -> None:
    job = PaperJob(ranks=2)
    job.start()
    job.train(2)
    job.save()
    job.train(2)
    job.fail_to_start(30)
    job.start(down_s=5)
    job.train(1)
    job.end()

    told = account_of(job.events)

    assert [r.start.resumed_step for r in told.restarts] == [-1, None, 1]
    assert [r.start.last_step for r in told.restarts] == [3, None, 2]
    assert [r.lost_steps for r in told.restarts] == [None, 0, 2]
    assert told.restarts[1].start.silent_ranks == (0, 1)
    assert told.seconds["recovery"] == 15 + 30 + 15
