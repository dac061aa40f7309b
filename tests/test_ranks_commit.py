"""Decisions that the root acts on: bytes of any size, and who is told of what fails, and when."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from localckpt import CheckpointingException, PeerLostError, StorageError
from localckpt.ranks.job_store import default_store
from localckpt.ranks.ranks import PerRank, Ranks
from localckpt.ranks.values import Message
from localckpt.ranks.verdict import Verdict
from tests.managers.jobs import error_of
from tests.ranks import announce, await_announced, run_ranks
from tests.simulated import PATIENCE_S, World, gather

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


@pytest.mark.parametrize(("world_size", "root"), [(1, 0), (3, 0), (3, 2)])
def test_bytes_of_any_size_come_to_the_root_and_each_rank_hears_its_own_part(
    world_size: int, root: int
) -> None:
    run_ranks(_say_and_hear, world_size, root)


def test_without_torch_distributed_a_rank_acts_by_itself() -> None:
    ranks = Ranks("test")

    heard = ranks.commit("meet", lambda: Message(1, b"said"), lambda said: said[0].data.decode())

    assert heard == "said"
    told = error_of(lambda: ranks.commit("meet", lambda: _fail(ValueError("no")), list))
    assert told == "CheckpointingException: could not meet: rank 0: ValueError: no"


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


def _fail_in_turn(rank: int, world_size: int) -> list[str]:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    told = []
    for failing in range(world_size):
        for error, kind in (
            (StorageError(f"full {failing}"), StorageError),
            (ValueError(f"odd {failing}"), CheckpointingException),
        ):

            def work(failing: int = failing, error: Exception = error) -> Message:
                return _fail(error) if rank == failing else Message(0, b"data")

            told.append(_told_at_once(lambda work=work: ranks.commit("try", work, list), kind))
    no = StorageError("no")
    told.append(_told_at_once(lambda: ranks.commit("try", int, lambda _: _fail(no)), StorageError))
    _go_on(ranks)
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
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)

    def work() -> None:
        if rank == 2:
            raise StorageError("the first")
        if rank == 0:
            # The root is still at work when the others are told.
            await_announced("told 1")
            raise StorageError("the second")

    told = _told_at_once(lambda: ranks.commit("try", work, list), StorageError)
    announce(f"told {rank}")
    _go_on(ranks)
    return told


def test_of_two_errors_all_ranks_raise_the_first_though_the_root_is_at_work() -> None:
    told = run_ranks(_fail_on_two, 3)

    assert told == ["StorageError: could not try: rank 2: the first"] * 3


def _end_work_in_vain(rank: int, world_size: int, failing: int) -> list[str]:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    told = []
    for _ in range(2):
        on_failure = threading.Event()

        def work(on_failure: threading.Event = on_failure) -> None:
            if rank == failing:
                raise StorageError("full")
            # Far longer than the test has.
            on_failure.wait(10 * _TIMEOUT_S)
            raise ValueError("ended")

        told.append(
            _told_at_once(
                lambda work=work, on_failure=on_failure: ranks.commit(
                    "write", work, list, on_failure=on_failure.set
                ),
                StorageError,
            )
        )
        assert ranks.commit("go on", lambda: 1, sum, on_failure=on_failure.set) == world_size
    return told


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_at_work_is_told_that_another_has_failed_and_raises_the_same(failing: int) -> None:
    told = run_ranks(_end_work_in_vain, 3, failing)

    assert told == [[f"StorageError: could not write: rank {failing}: full"] * 2] * 3


def _lose_the_store(rank: int, world_size: int, told: Path) -> str:
    """The first rank hosts the job's store, and dies."""
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        told.write_text(str(store.port))
        announce("port")
    else:
        await_announced("port")
        port = int(told.read_text())
        store = TCPStore("127.0.0.1", port, world_size, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    on_failure = threading.Event()

    def work() -> None:
        announce(f"at work {rank}")
        for other in range(world_size):
            await_announced(f"at work {other}")
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        on_failure.wait(10 * _TIMEOUT_S)
        raise ValueError("ended")

    return _told_at_once(
        lambda: ranks.commit("write", work, list, on_failure=on_failure.set), PeerLostError
    )


@pytest.mark.fault("silent-peer")
def test_a_rank_at_work_is_told_that_the_store_has_died_with_its_host(tmp_path: Path) -> None:
    told = run_ranks(_lose_the_store, 3, tmp_path / "port", init_group=False, expect_dead=[0])

    for text in told[1:]:
        assert "the job's key-value store does not answer" in text


class Unforeseen(BaseException):
    """As torch's own CheckpointException, no ``Exception``."""


def _fail_with_what_is_no_exception(rank: int, world_size: int, failing: str) -> list[str]:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    gather(ranks, "begin", None)
    error = Unforeseen("out of the ordinary")
    work = (lambda: _fail(error)) if failing == "work" and rank == 1 else int
    judge: Any = (lambda _: _fail(error)) if failing == "judge" else list
    began = time.monotonic()
    with pytest.raises((CheckpointingException, Unforeseen)) as raised:
        ranks.commit("try", work, judge)
    assert time.monotonic() - began < _AT_ONCE_S
    _go_on(ranks)
    return [raised.type.__name__, str(raised.value)]


@pytest.mark.fault("interrupted")
@pytest.mark.parametrize("failing", ["work", "judge"])
def test_what_is_no_exception_is_raised_on_all_at_once_too(failing: str) -> None:
    told = run_ranks(_fail_with_what_is_no_exception, 2, failing)

    at = 1 if failing == "work" else 0
    assert told[at] == ["Unforeseen", "out of the ordinary"]
    text = f"could not try: rank {at}: Unforeseen: out of the ordinary"
    assert told[1 - at] == ["CheckpointingException", text]


def _come_late(rank: int, world_size: int) -> list[str]:
    told = []
    ranks = Ranks("test", timeout_s=_LATE_S)
    for late in range(world_size):

        def work(late: int = late) -> Message:
            if rank == late:
                for other in {0, 1, 2} - {rank}:
                    await_announced(f"told {late} {other}")
            return Message(0, bytes(_LARGE))

        told.append(error_of(lambda work=work: ranks.commit("write", work, list), PeerLostError))
        announce(f"told {late} {rank}")
        await_announced(f"told {late} {late}")
        _go_on(ranks)
    return told


@pytest.mark.fault("silent-peer")
def test_a_rank_that_is_too_late_is_named_with_what_it_began_and_the_next_call_works() -> None:
    told = run_ranks(_come_late, 3)

    for late in range(3):
        for rank in {0, 1, 2} - {late}:
            assert (
                f"waited {_LATE_S:g} s to write, and rank {late} (last seen: write) did not come"
            ) in told[rank][late]
        assert f"rank {late} came too late to write" in told[late][late]


def _act_slowly(rank: int, world_size: int) -> str:
    ranks = Ranks("test", timeout_s=1.0)

    def act(_: list[Any]) -> str:
        await_announced("given up 1")
        await_announced("given up 2")
        return "done"

    told = ""
    try:
        told = ranks.commit("commit", int, act)
    except PeerLostError as error:
        told = str(error)
        announce(f"given up {rank}")
    ranks.timeout_s = _TIMEOUT_S
    _go_on(ranks)
    return told


@pytest.mark.fault("silent-peer")
def test_who_waits_in_vain_for_a_root_that_acts_does_not_decide_for_it() -> None:
    done, *others = run_ranks(_act_slowly, 3)

    assert done == "done"
    for told in others:
        assert "could not commit: all ranks had done their part, and rank 0 has not said" in told
        assert "Whether it was done is not known" in told


# Several at once.


def _act_in_two_threads(rank: int, world_size: int, rounds: int) -> None:
    before, behind = (Ranks(name, timeout_s=_TIMEOUT_S) for name in ("before", "behind"))
    heard: list[int] = []

    def act(ranks: Ranks, number: int) -> int:
        def judge(said: list[int]) -> int:
            assert said == [number] * world_size
            return number

        told: int = ranks.commit("meet", lambda: number, judge)
        return told

    thread = threading.Thread(target=lambda: heard.extend(act(behind, n) for n in range(rounds)))
    thread.start()
    for number in range(rounds):
        assert act(before, number) == number
    thread.join(_TIMEOUT_S)
    assert heard == list(range(rounds))


def test_calls_of_one_thread_and_those_of_another_are_apart() -> None:
    run_ranks(_act_in_two_threads, 3, 25)


def _miss_a_round(rank: int, world_size: int) -> list[Any]:
    before = Ranks("before", timeout_s=_TIMEOUT_S)
    behind = Ranks("behind", timeout_s=1.0)
    told: list[Any] = []
    for number in range(3):
        behind.rounds = before.decide("plan", lambda: rank, lambda _: behind.rounds)
        if (rank, number) == (1, 0):
            # As one that is interrupted before it has begun.
            continue
        try:
            told.append(behind.commit("save", lambda: rank, sum))
        except PeerLostError as error:
            told.append(type(error).__name__)
    return told


@pytest.mark.fault("interrupted")
def test_a_rank_that_missed_a_round_goes_on_with_the_others_at_the_number_it_is_given() -> None:
    lost, missed, lost_too = run_ranks(_miss_a_round, 3)

    assert lost == lost_too == ["PeerLostError", 3, 3]
    assert missed == [3, 3]


def _count_keys(rank: int, world_size: int, rounds: int) -> list[int]:
    ranks = Ranks("test", timeout_s=_TIMEOUT_S)
    counts = []

    def to_each(said: list[Message]) -> PerRank:
        return PerRank(0, dict(enumerate(said)))

    def act_often() -> None:
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

    act_often()
    act_often()
    return counts


def test_rounds_leave_no_more_in_the_store_than_those_before() -> None:
    told = run_ranks(_count_keys, 3, 25)

    for first, second in told:
        assert first == second


def test_what_a_root_gives_too_late_leaves_no_more_in_the_store_than_before() -> None:
    world, counts = World(3, 1.0), []

    def give_late(ranks: Ranks, given_up: threading.Event) -> Any:
        def judge(_: list[Any]) -> PerRank:
            assert given_up.wait(PATIENCE_S)
            return PerRank("x" * _LARGE, dict.fromkeys(range(3), Message(None, bytes(_LARGE))))

        try:
            return ranks.decide("plan", lambda: None, judge)
        finally:
            if not ranks.is_root:
                given_up.set()

    for _ in range(3):
        given_up = threading.Event()
        late = world.all_do(lambda ranks, given_up=given_up: give_late(ranks, given_up))
        assert {type(outcome) for outcome in late.values()} == {PeerLostError}
        for _ in range(2):
            world.all_do(lambda ranks: gather(ranks, "go on", None))
        counts.append(world.num_keys())

    # By turns there are two parts for each rank, of three keys each.
    assert counts[2] <= counts[1] <= counts[0] + 9


def test_a_rank_that_is_aborted_as_it_reads_a_verdict_hears_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, received = World(2, PATIENCE_S), Verdict.received
    is_to_abort = threading.Event()

    def receive(fields: Any, part: Callable[[], bytes | None]) -> Verdict:
        verdict = received(fields, part)
        if is_to_abort.is_set() and part.__self__._place.rank == 1:  # type: ignore[attr-defined]
            is_to_abort.clear()
            world.ranks[1].abort()
            # The rank goes on in the meantime.
            time.sleep(0.3)
        return verdict

    monkeypatch.setattr(Verdict, "received", receive)
    is_to_abort.set()
    heard = world.all_do(
        lambda ranks: ranks.decide("plan", lambda: None, lambda _: PerRank("all", {1: "its own"}))
    )

    assert not is_to_abort.is_set()
    assert heard == {0: ["all", None], 1: ["all", "its own"]}
