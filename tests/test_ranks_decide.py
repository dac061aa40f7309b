"""All ranks come to one outcome of a gathering, however late some of them are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from localckpt.errors import CheckpointingException, PeerLostError, StorageError
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from tests.ranks import run_ranks


def _come_late(rank: int, world_size: int) -> list[str]:
    told = []
    coordinator = Ranks("late", None, timeout_s=30.0)
    for late_s in (0.0, 1.0, 0.0):
        if rank == 1:
            time.sleep(late_s)
        began = time.monotonic()
        try:
            deadline = Deadline.after(0.3)
            told.append(str(coordinator.agree("meet", Attempt(), rank, list, deadline=deadline)))
        except PeerLostError as error:
            told.append(str(error))
        assert time.monotonic() - began < 20.0
        # All start the next one together.
        coordinator.gather("wait for all", None)
    return told


@pytest.mark.fault("silent-peer")
def test_a_rank_that_comes_too_late_raises_and_the_next_gathering_works() -> None:
    waiting, late = run_ranks(_come_late, 2)

    assert waiting[0] == late[0] == "[0, 1]"
    assert "waited 0.3 s to meet, and rank 1 (last seen: wait for all) did not come" in waiting[1]
    assert "rank 1 came too late to meet: the others (rank 0) were not all" in late[1]
    assert waiting[2] == late[2] == "[0, 1]"


def _come_about_in_time(rank: int, world_size: int, rounds: int) -> list[bool]:
    outcomes = []
    coordinator = Ranks("race", None, timeout_s=30.0)
    moments = random.Random(rank)
    for _ in range(rounds):
        coordinator.gather("wait for all", None)
        time.sleep(moments.choice([0.0, 0.0, 0.018, 0.02, 0.022, 0.025, 0.03]))
        try:
            deadline = Deadline.after(0.02)
            told = coordinator.agree("meet", Attempt(), rank, list, deadline=deadline)
            assert told == [0, 1, 2]
            outcomes.append(True)
        except PeerLostError:
            outcomes.append(False)
    return outcomes


@pytest.mark.fault("cut-network")
def test_whenever_ranks_come_all_have_the_answer_or_none_has() -> None:
    told = run_ranks(_come_about_in_time, 3, 150)

    assert told[0] == told[1] == told[2]
    assert {True, False} == set(told[0])


def _fail_and_come_late(rank: int, world_size: int) -> str:
    coordinator = Ranks("cause", None, timeout_s=30.0)
    if rank == 1:
        time.sleep(1.0)
    with Attempt() as looking:
        if rank == 0:
            raise StorageError("/disk cannot be read")
    return _outcome(lambda: coordinator.agree("look", looking, grace_s=0.2))


def _outcome(agreeing: Callable[[], object]) -> str:
    try:
        agreeing()
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_come_late_hear_why_another_failed_and_not_only_that_they_were_late() -> None:
    told = run_ranks(_fail_and_come_late, 3)

    assert told == ["StorageError: could not look: rank 0: /disk cannot be read"] * 3


def _succeed_and_wait(rank: int, world_size: int) -> str:
    coordinator = Ranks("patience", None, timeout_s=1.0)
    coordinator.gather("wait for all", None)
    with Attempt() as exchanging:
        if rank == 0:
            time.sleep(2.0)
            raise PeerLostError("rank 7 is lost")
    return _outcome(
        lambda: coordinator.agree("exchange", exchanging, deadline=Deadline.after(31.0))
    )


def test_a_rank_that_is_done_waits_for_others_deadlines_and_hears_whom_they_lost() -> None:
    told = run_ranks(_succeed_and_wait, 3)

    assert told == ["PeerLostError: could not exchange: rank 0: rank 7 is lost"] * 3
