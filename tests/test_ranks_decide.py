"""All ranks come to one outcome of a gathering, however late some of them are."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError, StorageError
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from tests.managers.jobs import error_of
from tests.ranks import init_group_with_store_on, run_ranks
from tests.simulated import gather


def _come_late(rank: int, world_size: int) -> list[str]:
    told = []
    coordinator = Ranks("late", None, timeout_s=30.0)
    for late_s in (0.0, 1.0, 0.0):
        if rank == 1:
            time.sleep(late_s)
        began = time.monotonic()
        try:
            deadline = Deadline.after(0.3)
            told.append(str(coordinator.decide("meet", lambda: rank, list, deadline=deadline)))
        except PeerLostError as error:
            told.append(str(error))
        assert time.monotonic() - began < 20.0
        # All start the next one together.
        gather(coordinator, "wait for all", None)
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
        gather(coordinator, "wait for all", None)
        time.sleep(moments.choice([0.0, 0.0, 0.018, 0.02, 0.022, 0.025, 0.03]))
        try:
            deadline = Deadline.after(0.02)
            told = coordinator.decide("meet", lambda: rank, list, deadline=deadline)
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
    return _outcome(lambda: coordinator.decide("look", looking, grace_s=0.2))


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
    gather(coordinator, "wait for all", None)
    with Attempt() as exchanging:
        if rank == 0:
            time.sleep(2.0)
            raise PeerLostError("rank 7 is lost")
    return _outcome(
        lambda: coordinator.decide("exchange", exchanging, deadline=Deadline.after(31.0))
    )


def test_a_rank_that_is_done_waits_for_others_deadlines_and_hears_whom_they_lost() -> None:
    told = run_ranks(_succeed_and_wait, 3)

    assert told == ["PeerLostError: could not exchange: rank 0: rank 7 is lost"] * 3


def _ask_alone(rank: int, world_size: int, asking: int) -> list[Any]:
    ranks = Ranks("alone", None, timeout_s=30.0)
    gather(ranks, "wait for all", None)
    told: list[Any] = []
    for what in ("look", "look again"):
        if rank == asking:
            ask = partial(gather, ranks, what, rank, deadline=Deadline.after(0.2))
            told.append(error_of(ask, PeerLostError))
    dist.barrier()
    told.append(gather(ranks, "look at all", rank))
    if rank == asking:
        ask = partial(ranks.commit, "act alone", lambda: rank, list, timeout_s=0.2)
        told.append(error_of(ask, PeerLostError))
    dist.barrier()
    told.append(ranks.commit("act", lambda: rank, list, on_failure=lambda: None))
    return told


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("asking", [0, 1])
def test_a_call_that_one_rank_made_alone_fails_there_and_the_next_ones_work(asking: int) -> None:
    *others, alone = (told := run_ranks(_ask_alone, 2, asking))[1 - asking], told[asking]

    assert others == [[[0, 1], [0, 1]]]
    assert f"rank {asking} waited 0.2 s to look, and rank {1 - asking} (last seen" in alone[0]
    assert "to look again" in alone[1]
    assert "to act alone" in alone[3]
    assert alone[2] == alone[4] == [0, 1]


def _fall_apart(rank: int, world_size: int) -> list[Any]:
    ranks = Ranks("order", None, timeout_s=30.0)

    def save(step: int) -> Any:
        return ranks.decide(f"save {step}", lambda: step, list, kind="save", order=step)

    alone = [error_of(lambda: save(7), MismatchError)] if rank == 0 else []
    return [*alone, save(9), save(10)]


def test_of_calls_for_several_iterations_the_earlier_fails_and_the_ranks_meet_at_the_later() -> (
    None
):
    (alone, *first), second, third = run_ranks(_fall_apart, 3)

    assert "rank 0: save 7; ranks 1 and 2: save 9" in alone
    assert first == second == third == [[9, 9, 9], [10, 10, 10]]


def _fail_and_leave(rank: int, world_size: int) -> str:
    """Rank 0 judges, hosts the store, and is gone as soon as it knows what failed."""
    init_group_with_store_on(0, rank, world_size)
    ranks = Ranks("leaving", None, timeout_s=20.0)

    def refuse() -> None:
        if rank == 1:
            raise MismatchError("it does not fit")

    told = error_of(lambda: ranks.decide("load", refuse, len), MismatchError)
    if rank == 0:
        os._exit(1)
    return told


@pytest.mark.parametrize("turn", range(3))
def test_a_failure_reaches_all_ranks_before_the_one_with_the_store_ends(turn: int) -> None:
    _, *told = run_ranks(_fail_and_leave, 4, init_group=False, expect_dead=[0])

    assert told == ["MismatchError: could not load: rank 1: it does not fit"] * 3


def _lose_the_store(rank: int, world_size: int) -> str:
    init_group_with_store_on(0, rank, world_size)
    ranks = Ranks("losing", None, timeout_s=2.0)
    gather(ranks, "meet", rank)
    dist.barrier()
    if rank == 0:
        os._exit(1)
    return error_of(lambda: gather(ranks, "meet again", rank), PeerLostError)


def test_a_lost_store_is_told_without_the_frames_of_torchs_code() -> None:
    _, told = run_ranks(_lose_the_store, 2, init_group=False, expect_dead=[0])

    assert "the job's key-value store does not answer" in told
    assert "\n" not in told
    assert "frame #" not in told
