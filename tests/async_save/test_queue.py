"""The queue on one rank: who carries out what, order, errors, ends."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from localckpt import AsyncCall, AsyncCallsQueue, AsyncRequest
from localckpt.async_save.request import runs_in_trainer
from localckpt.errors import CheckpointingException
from localckpt.waiting import wait_until
from tests.async_save import work

PATIENCE_S = 20.0
Children = Callable[[], list[psutil.Process]]


class Owner:
    """Schedules requests and notes what the queue tells it."""

    def __init__(self, queue: AsyncCallsQueue) -> None:
        self.queue = queue
        self.finalized: list[str] = []
        self.failed: list[BaseException] = []

    def schedule(self, function: Any, *args: Any, name: str = "") -> int:
        return self.queue.schedule_async_request(
            AsyncRequest(
                AsyncCall(function, failure_fns=[self.failed.append]),
                args,
                [lambda: self.finalized.append(name)],
            )
        )


@pytest.fixture(params=[True, False], ids=["worker", "fork"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    queue = AsyncCallsQueue(persistent=request.param, timeout_s=PATIENCE_S)
    yield Owner(queue)
    queue.close(abort=True)


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_later_call_that_is_over_first_is_finalized_after_and_close_leaves_nothing(
    owner: Owner, tmp_path: Path, no_dist: bool, our_children: Children
) -> None:
    gate, pids = tmp_path / "gate", list[int]()
    owner.schedule(work.write_when, tmp_path / "a", gate, name="a")
    owner.schedule(work.note_pid, pids, name="b")
    assert wait_until(lambda: bool(pids), PATIENCE_S)

    assert owner.queue.maybe_finalize_async_calls(no_dist=no_dist) == []

    work.write(gate)
    assert owner.queue.maybe_finalize_async_calls(blocking=True, no_dist=no_dist) == [0, 1]
    assert owner.finalized == ["a", "b"]
    assert pids == [os.getpid()]

    owner.schedule(work.write_slowly, tmp_path / "c", 0.1, name="c")
    owner.schedule(work.note_pid, [], name="d")
    owner.queue.close()
    owner.queue.close()

    assert owner.finalized == ["a", "b", "c", "d"]
    assert not our_children()
    assert work.await_ends_of_threads()
    with pytest.raises(CheckpointingException, match="closed"):
        owner.schedule(None)


def test_the_worker_that_was_warmed_up_takes_what_can_be_sent_and_a_fork_the_rest(
    tmp_path: Path,
) -> None:
    with AsyncCallsQueue(timeout_s=PATIENCE_S) as queue:
        owner = Owner(queue)
        queue.warm_up()
        queue._worker._join(time.monotonic() + PATIENCE_S)
        ready = queue._worker.worker_pid

        owner.schedule(work.describe_process, tmp_path / "a")
        owner.schedule(lambda: work.describe_process(tmp_path / "b"))
        owner.schedule(work.describe_process, tmp_path / "c")

    a, b, c = (json.loads((tmp_path / name).read_text())["pid"] for name in "abc")
    assert a == c == ready
    assert len({a, b, os.getpid()}) == 3


@pytest.mark.parametrize("persistent", [True, False])
def test_its_processes_have_the_priority_that_is_asked_for(
    tmp_path: Path, persistent: bool
) -> None:
    with AsyncCallsQueue(persistent, timeout_s=PATIENCE_S, nice=1, idle_io=False) as queue:
        Owner(queue).schedule(work.describe_process, tmp_path / "a")

    told = json.loads((tmp_path / "a").read_text())
    assert told["niceness"] == min(os.nice(0) + 1, 19)
    assert told["io_class"] == psutil.Process().ionice().ioclass


def test_check_for_errors_raises_without_waiting_and_keeps_the_call(
    owner: Owner, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    owner.schedule(work.write_when, tmp_path / "a", gate)
    owner.queue.check_for_errors()
    owner.schedule(runs_in_trainer(_fail), name="bad")
    assert owner.queue._entries[1].call.wait(PATIENCE_S)

    with pytest.raises(CheckpointingException, match=r"call 1 \(_fail\) has failed on this rank"):
        owner.queue.check_for_errors()

    assert owner.queue.get_num_unfinalized_calls() == 2
    work.write(gate)
    with pytest.raises(CheckpointingException, match="failed on rank 0"):
        owner.queue.wait_until_finished()


def _fail() -> None:
    raise OSError("it fails")


def test_close_with_abort_finalizes_nothing_and_runs_the_failure_functions(
    owner: Owner, tmp_path: Path, our_children: Children
) -> None:
    owner.schedule(work.write_when, tmp_path / "a", tmp_path / "gate", name="a")
    owner.schedule(None, name="b")
    pid = int(work.await_file(tmp_path / "a.started"))

    began = time.monotonic()
    owner.queue.close(abort=True)

    assert time.monotonic() - began < PATIENCE_S / 2
    assert work.await_end(pid, 5.0)
    assert owner.finalized == []
    assert [type(error) for error in owner.failed] == [CheckpointingException] * 2
    assert "call 0 (write_when) was given up" in str(owner.failed[0])
    assert owner.queue.get_num_unfinalized_calls() == 0
    assert not our_children()


@pytest.mark.parametrize("how", ["left with an error", "aborted"])
def test_stop_functions_run_before_the_queue_waits_for_its_calls(how: str) -> None:
    begun, told, over = threading.Event(), threading.Event(), list[bool]()
    queue = AsyncCallsQueue(timeout_s=PATIENCE_S)

    @runs_in_trainer
    def wait_for_a_peer() -> None:
        begun.set()
        over.append(told.wait(PATIENCE_S))

    def fail() -> None:
        raise ZeroDivisionError

    # A function that fails keeps no other call from being told.
    queue.schedule_async_request(AsyncRequest(AsyncCall(None, stop_fns=[fail]), (), []))
    waiting = AsyncCall(wait_for_a_peer, stop_fns=[told.set])
    queue.schedule_async_request(AsyncRequest(waiting, (), []))
    assert begun.wait(PATIENCE_S)
    if how == "aborted":
        queue.close(abort=True)
    else:
        with pytest.raises(ZeroDivisionError), queue:
            fail()

    assert over == [True]
