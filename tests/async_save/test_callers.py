"""Who carries out a call: a thread, a worker process, a forked child, or a foreign queue."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from localckpt.async_save.callers import (
    AsyncCaller,
    HandedOver,
    PendingCall,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)
from localckpt.async_save.processes import NotSendableError, Priority
from localckpt.async_save.request import AsyncRequest
from localckpt.errors import CheckpointingException, StorageError, WorkerDiedError
from tests.async_save import work

PATIENCE_S = 20.0
Children = Callable[[], list[psutil.Process]]
ALL = [ThreadAsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller]
PROCESSES = [PersistentAsyncCaller, TemporalAsyncCaller]


def request(function: Any, *args: Any, **kwargs: Any) -> AsyncRequest:
    return AsyncRequest(function, args, [], kwargs)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[AsyncCaller] = []

    def make_caller(kind: type[AsyncCaller], timeout_s: float = PATIENCE_S) -> AsyncCaller:
        made.append(kind(timeout_s=timeout_s))
        return made[-1]

    yield make_caller

    for caller in made:
        caller.close(abort=True)


def outcome(caller: AsyncCaller, function: Any, *args: Any, **kwargs: Any) -> BaseException | None:
    call = caller.schedule_async_call(request(function, *args, **kwargs))
    assert call.wait(PATIENCE_S)
    return call.error


@pytest.mark.parametrize("kind", ALL)
class TestEveryCaller:
    def test_runs_calls_in_order_beside_who_schedules_and_leaves_nothing(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path, our_children: Children
    ) -> None:
        caller, gate = make(kind), tmp_path / "gate"

        call = caller.schedule_async_call(request(work.write_when, tmp_path / "a", gate))
        for word in "bcd":
            caller.schedule_async_call(request(work.append, tmp_path / "log", word, after_s=0.02))

        assert not call.done()
        assert not caller.is_current_async_call_done()
        work.write(gate)
        assert caller.is_current_async_call_done(blocking=True)
        assert (tmp_path / "a").exists()
        assert (tmp_path / "log").read_text() == "+b -b +c -c +d -d "

        caller.schedule_async_call(request(work.write_slowly, tmp_path / "e", 0.1))
        caller.schedule_async_call(request(work.write, tmp_path / "f"))
        caller.close()
        caller.close()

        assert (tmp_path / "e").exists()
        assert (tmp_path / "f").exists()
        assert work.await_ends_of_threads()
        assert not our_children()
        with pytest.raises(CheckpointingException, match="closed"):
            caller.schedule_async_call(request(work.nothing))

    def test_gives_back_the_error_with_type_text_and_place(
        self, make: Any, kind: type[AsyncCaller]
    ) -> None:
        caller = make(kind)

        error = outcome(caller, work.fail_storage)

        assert type(error) is StorageError
        assert str(error) == "no space left in /somewhere"
        if kind is not ThreadAsyncCaller:
            assert "in fail_storage" in str(error.__cause__)
        with pytest.raises(CheckpointingException, match="no space left"):
            caller.is_current_async_call_done()

    def test_an_idle_caller_holds_no_thread_and_is_collected(
        self, kind: type[AsyncCaller], our_children: Children
    ) -> None:
        caller = kind(timeout_s=PATIENCE_S)
        assert outcome(caller, work.nothing) is None
        caller._join(time.monotonic() + PATIENCE_S)
        children = our_children()
        assert len(children) == (kind is PersistentAsyncCaller)
        gone = weakref.ref(caller)

        assert work.await_ends_of_threads()
        del caller
        gc.collect()

        assert gone() is None
        assert not [c for c in children if c.is_running()]

    def test_a_call_that_was_given_up_does_not_stop_those_after_it(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path
    ) -> None:
        caller, gate = make(kind), tmp_path / "gate"
        stuck = caller.schedule_async_call(request(work.write_when, tmp_path / "a", gate))
        never = caller.schedule_async_call(request(work.write, tmp_path / "b"))
        after = caller.schedule_async_call(request(work.write, tmp_path / "c"))
        work.await_file(tmp_path / "a.started")

        given_up = CheckpointingException("given up")
        assert caller.give_up(never, given_up)
        ended = caller.give_up(stuck, given_up)

        assert ended is (kind is not ThreadAsyncCaller)
        assert stuck.error is given_up
        assert never.error is given_up
        assert after.wait(PATIENCE_S)
        assert after.error is None
        assert (tmp_path / "c").exists()
        assert not (tmp_path / "b").exists()
        work.write(gate)


@pytest.mark.parametrize("kind", PROCESSES)
class TestEveryProcess:
    def test_steps_back_behind_training_and_leaves_its_process_group(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path
    ) -> None:
        assert outcome(make(kind), work.describe_process, tmp_path / "a") is None

        told = json.loads((tmp_path / "a").read_text())
        assert told["pid"] != os.getpid()
        assert told["niceness"] == min(os.nice(0) + 10, 19)
        assert told["io_class"] == psutil.IOPRIO_CLASS_IDLE
        assert told["leads_session"]

    def test_deaths_and_errors_that_cannot_be_rebuilt_are_named_and_the_next_call_works(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path
    ) -> None:
        caller = make(kind)

        error = outcome(caller, work.die, signal.SIGKILL)

        assert type(error) is WorkerDiedError
        assert "SIGKILL: out of memory?" in str(error)
        assert "exit code 5" in str(outcome(caller, os._exit, 5))
        error = outcome(caller, work.fail_unrebuildable)
        assert type(error) is CheckpointingException
        assert str(error) == "UnrebuildableError: kept apart: this"
        assert "in fail_unrebuildable" in str(error.__cause__)
        assert outcome(caller, work.write, tmp_path / "a") is None

    def test_one_that_does_not_answer_is_told_in_time_and_ended_by_close(
        self,
        make: Any,
        kind: type[AsyncCaller],
        tmp_path: Path,
        our_children: Children,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caller = make(kind, timeout_s=0.5)
        call = caller.schedule_async_call(request(work.write_slowly, tmp_path / "a", 60))
        stopped = int(work.await_file(tmp_path / "a.started"))
        os.kill(stopped, signal.SIGSTOP)

        with pytest.raises(CheckpointingException, match=r"write_slowly.* was not over after 0\."):
            caller.is_current_async_call_done(blocking=True, no_dist=True)
        caller.close()

        assert isinstance(call.error, CheckpointingException)
        assert not our_children()
        with caplog.at_level("INFO"):
            Priority(10, idle_io=True).give(stopped)
        assert f"process {stopped} keeps" in caplog.text


class TestWorker:
    @pytest.mark.parametrize(
        ("function", "args"), [(lambda: None, ()), (work.nothing, (threading.Lock(),))]
    )
    def test_refuses_what_cannot_be_pickled(self, make: Any, function: Any, args: Any) -> None:
        with pytest.raises(NotSendableError, match="cannot be sent"):
            make(PersistentAsyncCaller).schedule_async_call(request(function, *args))

    def test_what_it_cannot_read_and_how_it_ends_is_told_and_one_that_died_idle_is_replaced(
        self, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caller = make(PersistentAsyncCaller)

        error = outcome(caller, print, work.Unreadable())

        assert type(error) is ValueError
        assert str(error) == "a number is wrong"
        assert outcome(caller, print, "a word on the way") is None
        assert "a word on the way" in caplog.text
        error = outcome(caller, work.die, signal.SIGABRT, "so it ends")
        assert "SIGABRT" in str(error)
        assert "so it ends" in str(error)

        outcome(caller, work.nothing)
        first = caller.worker_pid
        os.kill(first, signal.SIGKILL)
        assert work.await_end(first)

        assert outcome(caller, work.nothing) is None

        assert caller.worker_pid != first


def test_a_call_that_cannot_be_given_back_holds_up_no_call_after_it(make: Any) -> None:
    caller = make(ThreadAsyncCaller)

    def fail() -> None:
        raise StorageError("no")

    caller._enqueue(PendingCall("first", release=fail))

    assert outcome(caller, work.nothing) is None


def _handed_over(error: str | None = None) -> HandedOver:
    return HandedOver(lambda: error, PATIENCE_S)


def _ends_when(wait: Callable[[], object], event: Callable[[], object]) -> bool:
    """Whether a waiting process waits until an event, and not after it."""
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    waited = waiting.is_alive()
    event()
    waiting.join(PATIENCE_S / 2)
    return waited and not waiting.is_alive()


_TRAINER = """
import os, pickle, time
from localckpt.async_save.callers import HandedOver
call = HandedOver(lambda: None, 20.0)
os.write(1, pickle.dumps(call.function))
os.close(1)
time.sleep(60)
"""


def test_a_process_waits_until_the_trainer_is_done_or_has_closed_or_is_dead() -> None:
    good, bad, closed = _handed_over(), _handed_over("it went wrong"), _handed_over()

    assert _ends_when(good.function, good.task.run)
    assert _ends_when(bad.function, bad.task.run)
    assert _ends_when(closed.function, closed.close)
    assert good.await_error() is None
    assert bad.await_error() == "it went wrong"
    with subprocess.Popen([sys.executable, "-c", _TRAINER], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert _ends_when(pickle.loads(trainer.stdout.read()), trainer.kill)
