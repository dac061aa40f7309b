"""Rounds: what each rank says, what one of them answers, and who is told of what fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from localckpt import CheckpointingException, PeerLostError, StorageError
from localckpt.global_tier.rounds import Meeting
from localckpt.ranks.job_store import default_store
from tests.managers.jobs import error_of
from tests.ranks import announce, await_announced, run_ranks

# Far more than it takes to be told, far less than the timeout.
_AT_ONCE_S, _TIMEOUT_S = 10.0, 30.0
_LARGE = 9 << 20


def _told_at_once(call: Callable[[], Any], kind: type[Exception] = CheckpointingException) -> str:
    began = time.monotonic()
    told = error_of(call, kind)
    assert time.monotonic() - began < _AT_ONCE_S
    return told


def _fail(error: Exception) -> Any:
    raise error


# Answers.


def _say_and_hear(rank: int, world_size: int, coordinator: int) -> None:
    meeting = Meeting("test", coordinator=coordinator, timeout_s=_TIMEOUT_S)
    assert meeting.is_coordinator == (rank == coordinator)
    for nbytes in (0, 1, _LARGE):
        mine = bytes([rank]) * nbytes

        def to_each(said: list[bytes], nbytes: int = nbytes) -> list[bytes]:
            assert said == [bytes([one]) * nbytes for one in range(world_size)]
            return [text + b"!" * bool(text) for text in reversed(said)]

        def to_all(said: list[bytes]) -> list[bytes]:
            return [said[-1]]

        other = world_size - 1 - rank
        expected = bytes([other]) * nbytes + b"!" * bool(nbytes)
        assert meeting.hold("tell each", lambda mine=mine: mine, to_each) == expected
        assert meeting.hold("tell all", lambda mine=mine: mine, to_all) == (
            bytes([world_size - 1]) * nbytes
        )


@pytest.mark.parametrize(("world_size", "coordinator"), [(1, 0), (3, 0), (3, 2)])
def test_each_rank_hears_its_answer_or_the_one_for_all_of_any_size(
    world_size: int, coordinator: int
) -> None:
    run_ranks(_say_and_hear, world_size, coordinator)


def test_without_torch_distributed_a_rank_meets_itself() -> None:
    meeting = Meeting("test")

    assert meeting.hold("meet", lambda: b"said", lambda said: [said[0] + b" and heard"]) == (
        b"said and heard"
    )
    told = error_of(lambda: meeting.hold("meet", lambda: _fail(ValueError("no")), list))
    assert told == "CheckpointingException: could not meet: rank 0: ValueError: no"


def _meet_in_a_part(rank: int, world_size: int) -> list[int] | None:
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    group = groups[0] if rank % 2 else groups[1]
    # Other meetings of the same name, in groups with ranks in common.
    everybody = Meeting("test", timeout_s=_TIMEOUT_S)
    part = Meeting("test", group, coordinator=1, timeout_s=_TIMEOUT_S)
    again = Meeting("test", group, coordinator=1, timeout_s=_TIMEOUT_S)
    assert part.is_coordinator == (rank >= 2)
    heard = [
        meeting.hold("meet", lambda: bytes([rank]), lambda said: [b"".join(said)])
        for meeting in (again, everybody, part)
    ]
    mine = bytes([1, 3]) if rank % 2 else bytes([0, 2])
    assert heard == [mine, bytes(range(4)), mine]
    told = error_of(
        lambda: part.hold(
            "meet", lambda: b"" if rank < 2 else _fail(StorageError("full")), lambda _: [b""]
        ),
        StorageError,
    )
    # Ranks are named as the job knows them.
    assert f"could not meet: rank {2 + rank % 2}: full" in told


def test_the_ranks_of_a_group_meet_by_themselves() -> None:
    run_ranks(_meet_in_a_part, 4)


# What fails.


def _fail_in_turn(rank: int, world_size: int) -> list[str]:
    meeting = Meeting("test", timeout_s=_TIMEOUT_S)
    told = []
    for failing in range(world_size):
        for error, kind in (
            (StorageError(f"full {failing}"), StorageError),
            (ValueError(f"odd {failing}"), CheckpointingException),
        ):

            def say(failing: int = failing, error: Exception = error) -> bytes:
                return _fail(error) if rank == failing else b""

            told.append(_told_at_once(lambda: meeting.hold("try", say, lambda _: [b""]), kind))
    told.append(
        _told_at_once(
            lambda: meeting.hold("try", lambda: b"", lambda _: _fail(StorageError("no"))),
            StorageError,
        )
    )
    assert meeting.hold("go on", lambda: b"", lambda _: [b"on"]) == b"on"
    return told


def test_what_fails_on_one_rank_is_raised_on_all_at_once_with_its_type() -> None:
    told = run_ranks(_fail_in_turn, 3)

    expected = []
    for rank in range(3):
        expected += [
            f"StorageError: could not try: rank {rank}: full {rank}",
            f"CheckpointingException: could not try: rank {rank}: ValueError: odd {rank}",
        ]
    expected.append("StorageError: could not try: rank 0: no")
    assert told == [expected] * 3


def _fail_on_two(rank: int, world_size: int) -> str:
    meeting = Meeting("test", timeout_s=_TIMEOUT_S)

    def say() -> bytes:
        if rank == 2:
            raise StorageError("the first")
        if rank == 1:
            await_announced("told 0")
            raise StorageError("the second")
        return b""

    told = _told_at_once(lambda: meeting.hold("try", say, lambda _: [b""]), StorageError)
    announce(f"told {rank}")
    assert meeting.hold("go on", lambda: b"", lambda _: [b"on"]) == b"on"
    return told


def test_of_two_errors_all_ranks_are_told_the_first() -> None:
    told = run_ranks(_fail_on_two, 3)

    assert told == ["StorageError: could not try: rank 2: the first"] * 3


class Unforeseen(BaseException):
    """As torch's own CheckpointException, no ``Exception``."""


def _fail_with_what_is_no_exception(rank: int, world_size: int) -> str:
    meeting = Meeting("test", timeout_s=_TIMEOUT_S)

    def say() -> bytes:
        if rank == 1:
            raise Unforeseen("out of the ordinary")
        return b""

    began = time.monotonic()
    with pytest.raises((CheckpointingException, Unforeseen)) as raised:
        meeting.hold("try", say, lambda _: [b""])
    assert time.monotonic() - began < _AT_ONCE_S
    return str(raised.value)


def test_what_is_no_exception_is_told_to_all_at_once_too() -> None:
    told = run_ranks(_fail_with_what_is_no_exception, 2)

    for text in told:
        assert "out of the ordinary" in text


def _come_late(rank: int, world_size: int) -> list[str]:
    told = []
    meeting = Meeting("test", timeout_s=1.0)
    for late in range(world_size):
        if rank == late:
            for other in {0, 1, 2} - {rank}:
                await_announced(f"told {late} {other}")
        told.append(
            error_of(lambda: meeting.hold("meet", lambda: b"", lambda _: [b""]), PeerLostError)
        )
        announce(f"told {late} {rank}")
        await_announced(f"told {late} {late}")
        assert meeting.hold("go on", lambda: b"", lambda _: [b"on"]) == b"on"
    return told


@pytest.mark.fault("silent-peer")
def test_a_rank_that_is_too_late_is_named_on_all_and_the_next_round_works() -> None:
    told = run_ranks(_come_late, 3)

    assert told[0] == told[1] == told[2]
    for late, text in enumerate(told[0]):
        assert f"waited 1 s, and rank {late} (last seen: " in text


# Several at once.


def _meet_in_two_threads(rank: int, world_size: int, rounds: int) -> None:
    meeting = Meeting("test", timeout_s=_TIMEOUT_S)
    heard: list[bytes] = []

    def hold(kind: str, number: int, name: str | None) -> bytes:
        text = f"{kind} {number}".encode()

        def answer(said: list[bytes]) -> list[bytes]:
            assert said == [text] * world_size
            return [text]

        return meeting.hold(kind, lambda: text, answer, name)

    def behind() -> None:
        heard.extend(hold("behind", number, f"save/{number}") for number in range(rounds))

    thread = threading.Thread(target=behind)
    thread.start()
    for number in range(rounds):
        assert hold("before", number, None) == f"before {number}".encode()
    thread.join(_TIMEOUT_S)
    assert heard == [f"behind {number}".encode() for number in range(rounds)]


def test_named_rounds_of_one_thread_and_numbered_ones_of_another_are_apart() -> None:
    run_ranks(_meet_in_two_threads, 3, 25)


def _count_keys(rank: int, world_size: int, rounds: int) -> list[int]:
    meeting = Meeting("test", timeout_s=_TIMEOUT_S)
    counts = []

    def hold_some(name: str) -> None:
        for number in range(rounds):
            meeting.hold("tell each", lambda: b"said", lambda said: said)
            meeting.hold("tell all", lambda: b"said", lambda _: [b""], f"{name} {number}")
        meeting.hold("tell much", lambda: bytes(_LARGE), lambda said: said)
        # Nobody is inside of a round any more.
        dist.barrier()
        counts.append(default_store().num_keys())
        dist.barrier()

    hold_some("first")
    hold_some("second")
    return counts


def test_rounds_leave_nothing_in_the_store() -> None:
    told = run_ranks(_count_keys, 3, 25)

    for first, second in told:
        assert first == second
