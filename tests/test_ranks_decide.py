"""Ranks come to one outcome, however late some are, and the root acts on it; what fails is told."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from localckpt import CheckpointingException, MismatchError, PeerLostError, StorageError
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.job_store import default_store
from localckpt.ranks.ranks import PerRank, Ranks
from localckpt.ranks.values import Message
from tests.managers.jobs import error_of
from tests.ranks import announce, await_announced, init_group_with_store_on, run_ranks
from tests.simulated import gather

# Far more than it takes to be told, far less than the timeout.
_AT_ONCE_S, _TIMEOUT_S = 10.0, 30.0
# More than ranks that begin together are apart on a machine that does something else as well.
_LATE_S = 3.0
_LARGE = 9 << 20


def _told_at_once(call: Callable[[], Any], kind: type[Exception] = CheckpointingException) -> str:
    began = time.monotonic()
    told = error_of(call, kind)
    assert time.monotonic() - began < _AT_ONCE_S
    return told


def _fail(error: BaseException) -> Any:
    raise error


def _go_on(ranks: Ranks) -> None:
    assert ranks.commit("go on", lambda: 1, sum) == ranks.world_size


# Verdicts.


def _say_and_hear(rank: int, world_size: int, root: int) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S, root=root)
    assert ranks.is_root == (rank == root)
    for nbytes in (0, 1, _LARGE):
        mine = Message([rank], bytes([rank]) * nbytes)

        def to_each(said: list[Message], nbytes: int = nbytes) -> PerRank:
            assert said == [Message([r], bytes([r]) * nbytes) for r in range(world_size)]
            return PerRank(nbytes, dict(enumerate(reversed(said))))

        other = world_size - 1 - rank
        common, part = ranks.commit("tell each", lambda mine=mine: mine, to_each)
        assert common == nbytes
        assert part == Message([other], bytes([other]) * nbytes)
        assert ranks.commit("tell all", lambda: rank, lambda said: said) == list(range(world_size))
    # Two rounds later the parts of the first would lie where those of the third do.
    for to in (range(3), range(0), range(1, 2), range(2, 3)):
        parts = PerRank("shared out", {other: [other] for other in to})
        found = ranks.decide("share out", lambda: rank, lambda _, parts=parts: parts)
        assert found == ["shared out", [rank] if rank in to else None]


def test_bytes_of_any_size_come_to_the_root_and_each_rank_hears_its_own_part() -> None:
    run_ranks(_say_and_hear, 3, 2)


def _act_in_a_part(rank: int, world_size: int) -> None:
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    group = groups[0] if rank % 2 else groups[1]
    # Others of the same name, of groups with ranks in common.
    everybody = Ranks("test", timeout_s=_TIMEOUT_S)
    part = Ranks("test", group, timeout_s=_TIMEOUT_S, root=1)
    again = Ranks("test", group, timeout_s=_TIMEOUT_S, root=1)
    assert part.is_root == (rank >= 2)
    heard = [
        ranks.commit("meet", lambda: rank, lambda said: said) for ranks in (again, everybody, part)
    ]
    mine = [1, 3] if rank % 2 else [0, 2]
    assert heard == [mine, [0, 1, 2, 3], mine]
    work = (lambda: None) if rank < 2 else lambda: _fail(StorageError("full"))
    told = error_of(lambda: part.commit("meet", work, list), StorageError)
    # Ranks are named as the job knows them.
    assert f"could not meet: rank {2 + rank % 2}: full" in told


def test_the_ranks_of_a_group_act_by_themselves() -> None:
    run_ranks(_act_in_a_part, 4)


# What fails.


def _fail_in_turn(rank: int, world_size: int) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    for failing in range(world_size):
        for error, kind, said in (
            (StorageError("full"), StorageError, "StorageError: could not try: rank {}: full"),
            (
                *(ValueError("odd"), CheckpointingException),
                "CheckpointingException: could not try: rank {}: ValueError: odd",
            ),
        ):

            def work(failing: int = failing, error: Exception = error) -> Message:
                return _fail(error) if rank == failing else Message(0, b"data")

            told = _told_at_once(lambda work=work: ranks.commit("try", work, list), kind)
            assert told == said.format(failing)
    no = StorageError("no")
    told = _told_at_once(lambda: ranks.commit("try", int, lambda _: _fail(no)), StorageError)
    assert told == "StorageError: could not try: rank 0: no"
    _go_on(ranks)


def test_what_fails_on_one_rank_is_raised_on_all_at_once_with_its_type() -> None:
    run_ranks(_fail_in_turn, 3)


def _end_work_in_vain(rank: int, world_size: int, failing: int) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    for _ in range(2):
        on_failure = threading.Event()

        def work(on_failure: threading.Event = on_failure) -> None:
            if rank == failing:
                raise StorageError("full")
            # Far longer than the test has.
            on_failure.wait(10 * _TIMEOUT_S)
            raise ValueError("ended")

        commit = partial(ranks.commit, "write", work, list, on_failure=on_failure.set)
        told = _told_at_once(commit, StorageError)
        assert told == f"StorageError: could not write: rank {failing}: full"
        assert ranks.commit("go on", lambda: 1, sum, on_failure=on_failure.set) == world_size


def test_a_rank_at_work_is_told_that_another_has_failed_and_raises_the_same() -> None:
    run_ranks(_end_work_in_vain, 3, 2)


def _lose_the_store(rank: int, world_size: int) -> str:
    """The first rank hosts the job's store, and dies."""
    init_group_with_store_on(0, rank, world_size)
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    on_failure = threading.Event()

    def work() -> None:
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        on_failure.wait(10 * _TIMEOUT_S)
        raise ValueError("ended")

    return _told_at_once(
        lambda: ranks.commit("write", work, list, on_failure=on_failure.set), PeerLostError
    )


@pytest.mark.fault("silent-peer")
def test_a_rank_at_work_is_told_that_the_store_has_died_with_its_host() -> None:
    _, *told = run_ranks(_lose_the_store, 3, init_group=False, expect_dead=[0])

    for text in told:
        assert "the job's key-value store does not answer" in text
        # Without the frames of torch's code.
        assert "\n" not in text


class Unforeseen(BaseException):
    """As torch's own CheckpointException, no ``Exception``."""


def _fail_with_what_is_no_exception(rank: int, world_size: int) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    gather(ranks, "begin", None)
    error = Unforeseen("out of the ordinary")
    for failing, at in (("work", 1), ("judge", 0)):
        work = (lambda: _fail(error)) if failing == "work" and rank == 1 else int
        judge: Any = (lambda _: _fail(error)) if failing == "judge" else list
        began = time.monotonic()
        with pytest.raises((CheckpointingException, Unforeseen)) as raised:
            ranks.commit("try", work, judge)
        assert time.monotonic() - began < _AT_ONCE_S
        assert raised.type is (Unforeseen if rank == at else CheckpointingException)
        text = f"could not try: rank {at}: Unforeseen: out of the ordinary"
        assert str(raised.value) == ("out of the ordinary" if rank == at else text)
        _go_on(ranks)


@pytest.mark.fault("interrupted")
def test_what_is_no_exception_is_raised_on_all_at_once_too() -> None:
    run_ranks(_fail_with_what_is_no_exception, 2)


def _come_late(rank: int, world_size: int) -> None:
    ranks = Ranks("test", timeout_s=_LATE_S)
    for late in range(world_size):

        def work(late: int = late) -> Message:
            if rank == late:
                for other in {0, 1, 2} - {rank}:
                    await_announced(f"told {late} {other}")
            return Message(0, bytes(_LARGE))

        told = error_of(lambda work=work: ranks.commit("write", work, list), PeerLostError)
        missing = f"rank {late} (last seen: write) did not come"
        said = f"waited {_LATE_S:g} s to write, and {missing}"
        assert (f"rank {late} came too late to write" if rank == late else said) in told
        announce(f"told {late} {rank}")
        await_announced(f"told {late} {late}")
        _go_on(ranks)


@pytest.mark.fault("silent-peer")
def test_a_rank_that_is_too_late_is_named_with_what_it_began_and_the_next_call_works() -> None:
    run_ranks(_come_late, 3)


# Keys in the store.


def _count_keys(rank: int, world_size: int, rounds: int) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    counts = []

    def to_each(said: list[Message]) -> PerRank:
        return PerRank(0, dict(enumerate(said)))

    for _ in range(2):
        for _ in range(rounds):
            ranks.commit("tell each", lambda: Message(0, b"said"), to_each)
            work = (lambda: _fail(StorageError("full"))) if rank == 1 else lambda: Message(0, b"x")
            error_of(lambda work=work: ranks.commit("fail", work, to_each), StorageError)
        ranks.commit("tell much", lambda: Message(0, bytes(_LARGE)), to_each)
        for _ in range(3):
            ranks.commit("tell each", lambda: Message(0, b"said"), to_each)
        # Nobody is inside of a round any more.
        dist.barrier()
        counts.append(default_store().num_keys())
        dist.barrier()
    assert counts[0] == counts[1]


def test_rounds_leave_no_more_in_the_store_than_those_before() -> None:
    run_ranks(_count_keys, 3, 25)


# Late ranks.


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


def _succeed_and_wait(rank: int, world_size: int) -> None:
    coordinator = Ranks("patience", None, timeout_s=1.0)
    gather(coordinator, "wait for all", None)
    with Attempt() as exchanging:
        if rank == 0:
            time.sleep(2.0)
            raise PeerLostError("rank 7 is lost")
    deadline = Deadline.after(31.0)
    told = error_of(lambda: coordinator.decide("exchange", exchanging, deadline=deadline))
    assert told == "PeerLostError: could not exchange: rank 0: rank 7 is lost"


def test_a_rank_that_is_done_waits_for_others_deadlines_and_hears_whom_they_lost() -> None:
    run_ranks(_succeed_and_wait, 3)


def _fall_apart(rank: int, world_size: int) -> None:
    ranks = Ranks("order", None, timeout_s=30.0)

    def save(step: int) -> Any:
        return ranks.decide(f"save {step}", lambda: step, list, kind="save", order=step)

    if rank == 0:
        assert "rank 0: save 7; ranks 1 and 2: save 9" in error_of(lambda: save(7), MismatchError)
    assert [save(9), save(10)] == [[9, 9, 9], [10, 10, 10]]


def test_of_calls_for_several_iterations_the_earlier_fails_and_ranks_meet_at_the_later() -> None:
    run_ranks(_fall_apart, 3)
