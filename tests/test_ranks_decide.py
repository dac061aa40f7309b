"""Ranks come to one outcome, however late some are, and the root acts on it; what fails is told."""

from __future__ import annotations

import random
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
from tests.ranks import die, init_group_with_store_on, on_ranks, same_on_all
from tests.simulated import gather

# Far more than it takes to be told, far less than the timeout.
_AT_ONCE_S, _TIMEOUT_S = 10.0, 30.0
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


@on_ranks(3)
def test_bytes_of_any_size_come_to_the_root_and_each_rank_hears_its_own_part(
    rank: int, world_size: int
) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S, root=2)
    assert ranks.is_root == (rank == 2)
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


@on_ranks(4)
def test_the_ranks_of_a_group_act_by_themselves(rank: int) -> None:
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


# What fails.


@on_ranks(3)
def test_what_fails_on_one_rank_is_raised_on_all_at_once_with_its_type(
    rank: int, world_size: int
) -> None:
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


@on_ranks(3)
def test_a_rank_at_work_is_told_that_another_has_failed_and_raises_the_same(
    rank: int, world_size: int
) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    for _ in range(2):
        on_failure = threading.Event()

        def work(on_failure: threading.Event = on_failure) -> None:
            if rank == 2:
                raise StorageError("full")
            # Far longer than the test has.
            on_failure.wait(10 * _TIMEOUT_S)
            raise ValueError("ended")

        commit = partial(ranks.commit, "write", work, list, on_failure=on_failure.set)
        told = _told_at_once(commit, StorageError)
        assert told == "StorageError: could not write: rank 2: full"
        assert ranks.commit("go on", lambda: 1, sum, on_failure=on_failure.set) == world_size


@pytest.mark.fault("silent-peer")
@on_ranks(3, init_group=False, expect_dead=[0])
def test_a_rank_at_work_is_told_that_the_store_has_died_with_its_host(
    rank: int, world_size: int
) -> None:
    init_group_with_store_on(0, rank, world_size)
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    on_failure = threading.Event()

    def work() -> None:
        dist.barrier()
        if rank == 0:
            die()
        on_failure.wait(10 * _TIMEOUT_S)
        raise ValueError("ended")

    text = _told_at_once(
        lambda: ranks.commit("write", work, list, on_failure=on_failure.set), PeerLostError
    )
    assert "the job's key-value store does not answer" in text
    # Without the frames of torch's code.
    assert "\n" not in text


class Unforeseen(BaseException):
    """As torch's own CheckpointException, no ``Exception``."""


@pytest.mark.fault("interrupted")
@on_ranks(2)
def test_what_is_no_exception_is_raised_on_all_at_once_too(rank: int) -> None:
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


# Keys in the store.


@on_ranks(3)
def test_rounds_leave_no_more_in_the_store_than_those_before(rank: int) -> None:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    counts = []

    def to_each(said: list[Message]) -> PerRank:
        return PerRank(0, dict(enumerate(said)))

    for _ in range(2):
        for _ in range(25):
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


# Late ranks.


@pytest.mark.fault("cut-network")
@on_ranks(3)
def test_whenever_ranks_come_all_have_the_answer_or_none_has(rank: int) -> None:
    outcomes = []
    coordinator = Ranks("race", None, timeout_s=30.0)
    moments = random.Random(rank)
    for _ in range(150):
        gather(coordinator, "wait for all", None)
        time.sleep(moments.choice([0.0, 0.0, 0.018, 0.02, 0.022, 0.025, 0.03]))
        try:
            deadline = Deadline.after(0.02)
            told = coordinator.decide("meet", lambda: rank, list, deadline=deadline)
            assert told == [0, 1, 2]
            outcomes.append(True)
        except PeerLostError:
            outcomes.append(False)
    assert {True, False} == set(same_on_all(outcomes))


@on_ranks(3)
def test_a_rank_that_is_done_waits_for_others_deadlines_and_hears_whom_they_lost(rank: int) -> None:
    coordinator = Ranks("patience", None, timeout_s=1.0)
    gather(coordinator, "wait for all", None)
    with Attempt() as exchanging:
        if rank == 0:
            time.sleep(2.0)
            raise PeerLostError("rank 7 is lost")
    deadline = Deadline.after(31.0)
    told = error_of(lambda: coordinator.decide("exchange", exchanging, deadline=deadline))
    assert told == "PeerLostError: could not exchange: rank 0: rank 7 is lost"


@on_ranks(3)
def test_of_calls_for_several_iterations_the_earlier_fails_and_ranks_meet_at_the_later(
    rank: int,
) -> None:
    ranks = Ranks("order", None, timeout_s=30.0)

    def save(step: int) -> Any:
        return ranks.decide(f"save {step}", lambda: step, list, kind="save", order=step)

    if rank == 0:
        assert "rank 0: save 7; ranks 1 and 2: save 9" in error_of(lambda: save(7), MismatchError)
    assert [save(9), save(10)] == [[9, 9, 9], [10, 10, 10]]
