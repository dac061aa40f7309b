"""The queue on several ranks: all finalize the same call in the same poll, or all raise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from localckpt import AsyncCall, AsyncCallsQueue, AsyncRequest
from localckpt.async_save.request import runs_in_trainer
from localckpt.errors import CheckpointingException, StorageError
from localckpt.ranks.ranks import Ranks
from tests.async_save import work
from tests.async_save.test_queue import Owner
from tests.ranks import announce, await_announced, run_ranks, start_ranks

PATIENCE_S = 60.0
_STEPS = 300
# (type, message) of an exception, since ranks are compared by what crosses process borders.
Told = tuple[str, str]


class Rank(Owner):
    """One rank's queue, and what it was told."""

    def __init__(self, timeout_s: float = PATIENCE_S) -> None:
        super().__init__(AsyncCallsQueue(timeout_s=timeout_s))

    def told(self) -> list[Told]:
        return [told(error) for error in self.failed]

    def error_of(self, blocking: bool = True) -> Told | None:
        """What a poll raises; without ``blocking``, what the first of many does."""
        deadline, raised = time.monotonic() + PATIENCE_S, None
        while raised is None and time.monotonic() < deadline:
            try:
                self.queue.maybe_finalize_async_calls(blocking)
            except CheckpointingException as error:
                raised = told(error)
            if blocking:
                break
            time.sleep(0.002)
        return raised


def told(error: BaseException) -> Told:
    return (type(error).__name__, str(error))


@runs_in_trainer
def _nothing_in_a_thread() -> None:
    """A call that is over as soon as it has begun."""


def _schedule_in_every_step(rank: int, world_size: int) -> Any:
    """Poll as often as calls are scheduled; each is over on this rank when it polls next."""
    most, finalized, keys = 0, [], []
    with AsyncCallsQueue(timeout_s=PATIENCE_S) as queue:
        for step in range(_STEPS):
            finalized += queue.maybe_finalize_async_calls()
            queue.schedule_async_request(AsyncRequest(_nothing_in_a_thread, (), []))
            queue._entries[-1].call.wait(PATIENCE_S)
            most = max(most, queue.get_num_unfinalized_calls())
            if rank == 1:
                # It is always late.
                time.sleep(0.002)
            # Training keeps the ranks together.
            dist.all_reduce(torch.ones(1))
            if step == 20:
                # By now all ranks have begun to poll together.
                most = 0
            if step in (20, _STEPS - 1):
                dist.barrier()
                keys.append(_get_default_store().num_keys())
                dist.barrier()
    return most, finalized, keys


def test_calls_that_are_scheduled_as_often_as_they_are_polled_do_not_pile_up() -> None:
    results = run_ranks(_schedule_in_every_step, 3)

    for most, finalized, (keys_before, keys_after) in results:
        # As many as are scheduled while the ranks agree on those before, however many there are.
        assert most <= _STEPS // 10
        assert finalized == list(range(len(finalized)))
        assert len(finalized) >= _STEPS - most
        assert keys_after <= keys_before + 10


# One call fails on all ranks, whatever it is that fails, and the next one is good.

_CALLS: dict[str, Callable[[int, Path], tuple[Any, ...]]] = {
    "one fails": lambda rank, _: (work.fail_or_not, ("nothing", "fail_storage")[rank]),
    "each fails": lambda rank, _: (work.fail_or_not, ("fail_value", "fail_storage")[rank]),
    "another call": lambda rank, _: ((work.nothing, work.write)[rank],),
    "one hangs": lambda rank, path: (work.write_slowly, path / f"{rank}", 60 * rank),
}


def _fail(rank: int, world_size: int, how: str, blocking: bool, path: Path) -> Any:
    one = Rank(timeout_s=5.0 if how == "one hangs" else PATIENCE_S)
    one.schedule(*_CALLS[how](rank, path))
    raised = one.error_of(blocking)
    one.schedule(None if rank else work.nothing, name="next")
    one.queue.close()
    return raised, one.told(), one.finalized


@pytest.mark.fault("worker-dies", "disagreement")
@pytest.mark.parametrize(
    ("how", "blocking", "kind", "texts"),
    [
        ("one fails", True, "StorageError", ["failed on rank 1: StorageError: no space left"]),
        ("one fails", False, "StorageError", ["call 0 (fail_or_not) failed on rank 1"]),
        (
            *("each fails", True, "CheckpointingException"),
            ["rank 0: ValueError: a number is wrong", "rank 1: StorageError: no space left"],
        ),
        (
            *("another call", True, "MismatchError"),
            ["rank 0 is at call 0 (nothing), rank 1 is at call 0 (write)"],
        ),
        (
            *("one hangs", True, "CheckpointingException"),
            ["failed on rank 1: CheckpointingException: call 0 (write_slowly) was not over"],
        ),
    ],
)
def test_an_error_of_one_rank_is_the_same_error_on_every_rank(
    how: str, blocking: bool, kind: str, texts: list[str], tmp_path: Path
) -> None:
    first, second = run_ranks(_fail, 2, how, blocking, tmp_path)

    assert first == second
    raised, failed, finalized = first
    assert raised[0] == kind
    assert all(text in raised[1] for text in texts), raised
    assert failed == [raised]
    assert finalized == ["next"]


def _polls_ahead(rank: int, world_size: int, directory: Path) -> Any:
    one, gate = Rank(), directory / "gate"
    one.schedule(work.write_when, directory / f"{rank}", gate, name="a")
    one.queue.maybe_finalize_async_calls()
    dist.barrier()
    if rank == 0:
        await_announced("polled again")
    one.queue.maybe_finalize_async_calls()
    if rank == 1:
        announce("polled again")
    work.write(gate)
    one.queue.close()
    return one.finalized


def _polls_and_then_asks_nobody(rank: int, world_size: int, directory: Path) -> Any:
    one, gate = Rank(), directory / f"gate of {rank}"
    one.schedule(None, name="polled")
    one.queue.maybe_finalize_async_calls()
    dist.barrier()
    one.queue.maybe_finalize_async_calls(no_dist=True)
    one.schedule(work.write_when, directory / f"next of {rank}", gate, name="next")
    start = time.monotonic()
    early = one.queue.maybe_finalize_async_calls()
    seconds = time.monotonic() - start
    work.write(gate)
    one.queue.close()
    return early, seconds < 2.0, one.finalized


def test_polls_ask_no_more_of_the_others_than_they_must(tmp_path: Path) -> None:
    assert run_ranks(_polls_ahead, 2, tmp_path) == [["a"]] * 2
    # The verdict is void, since the call was finalized without the ranks.
    told = run_ranks(_polls_and_then_asks_nobody, 2, tmp_path)
    assert told == [([], True, ["polled", "next"])] * 2


def _one_is_ahead(rank: int, world_size: int) -> Any:
    one = Rank()
    if rank == 1:
        one.schedule(None, name="alone")
        one.queue.maybe_finalize_async_calls(no_dist=True)
    one.schedule(None, name=f"first of {rank}")
    if rank == 0:
        one.schedule(None, name="second of 0")
    raised = one.error_of()
    one.queue.close()
    return raised, one.finalized


def test_a_rank_that_is_ahead_keeps_its_call_for_when_the_others_have_come_there() -> None:
    (raised, first), (also_raised, second) = run_ranks(_one_is_ahead, 2)

    assert raised == also_raised
    assert "rank 0 is at call 0" in raised[1]
    assert "rank 1 is at call 1" in raised[1]
    assert (first, second) == (["second of 0"], ["alone", "first of 1"])


def _one_never_comes(rank: int, world_size: int, absent: int) -> Any:
    one = Rank(timeout_s=1.0)
    one.schedule(None)
    if rank == absent:
        await_announced("seen")
        one.queue.close(abort=True)
        return None
    start = time.monotonic()
    raised = one.error_of()
    seconds = time.monotonic() - start
    one.queue.close()
    return raised, seconds, one.told(), one.queue.get_num_unfinalized_calls()


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_within_the_timeout(absent: int) -> None:
    with start_ranks(_one_never_comes, 3, absent) as ranks:
        # The absent rank stays until the others are through, as one that hangs does.
        threading.Timer(2.0, ranks.announce, ["seen"]).start()
        results = ranks.join(30.0)

    for rank in {0, 1, 2} - {absent}:
        (kind, text), seconds, failed, left = results[rank]
        assert kind == "PeerLostError"
        assert f"rank {absent}" in text
        assert seconds < 1.0 + 0.5
        assert failed == [(kind, text)]
        assert left == 0


def _tell_what_came_of_it(rank: int, world_size: int, bad: int | None) -> Any:
    told: list[Any] = []

    def judge(numbers: list[int]) -> list[int]:
        if bad is not None:
            raise StorageError(f"rank {bad} has lost its copy")
        return [sum(numbers), *numbers]

    call = AsyncCall(
        _nothing_in_a_thread, report_fn=lambda: rank, judge_fn=judge, verdict_fn=told.append
    )
    with AsyncCallsQueue(timeout_s=PATIENCE_S) as queue:
        queue.schedule_async_request(AsyncRequest(call, (), [lambda: told.append("finalized")]))
        try:
            queue.wait_until_finished()
        except CheckpointingException as error:
            told.append(str(error))
    return told


def test_what_came_of_a_call_on_each_rank_is_judged_once_for_all() -> None:
    assert run_ranks(_tell_what_came_of_it, 3, None) == [[[3, 0, 1, 2], "finalized"]] * 3
    assert run_ranks(_tell_what_came_of_it, 3, 0) == [["rank 0 has lost its copy"]] * 3


def _sync(rank: int, world_size: int, bad: int | None) -> Any:
    seen: list[Any] = []

    def check_that_all_have_worked() -> None:
        seen.append(_get_default_store().check([f"worked/{r}" for r in range(world_size)]))

    def do() -> None:
        if rank == bad:
            work.fail_storage()
        time.sleep(0.05 * rank)
        _get_default_store().set(f"worked/{rank}", "")

    request = AsyncRequest(
        AsyncCall(do, failure_fns=[lambda error: seen.append(told(error))]),
        (),
        [check_that_all_have_worked],
    )
    for coordinator in (None, Ranks("mine", timeout_s=PATIENCE_S)):
        try:
            request.execute_sync(coordinator)
        except CheckpointingException as error:
            seen.append(told(error))
    return seen


def test_execute_sync_finalizes_when_all_ranks_are_done_or_raises_on_all() -> None:
    assert run_ranks(_sync, 3, None) == [[True, True]] * 3

    results = run_ranks(_sync, 3, 1)

    raised = results[0][0]
    assert raised[0] == "StorageError"
    assert "failed on rank 1" in raised[1]
    assert results == [[raised] * 4] * 3
