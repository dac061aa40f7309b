"""Who carries out a call, each on its own rank: a thread, a worker process, a forked child."""

from __future__ import annotations

import gc
import json
import os
import signal
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
    PendingCall,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)
from localckpt.async_save.processes import NotSendableError
from localckpt.async_save.request import AsyncRequest
from localckpt.errors import CheckpointingException, StorageError, WorkerDiedError
from localckpt.waiting import wait_until
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
    def test_does_not_hold_up_who_schedules(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path
    ) -> None:
        caller, gate = make(kind), tmp_path / "gate"

        call = caller.schedule_async_call(request(work.write_when, tmp_path / "a", gate))

        assert not call.done()
        assert not caller.is_current_async_call_done()
        work.write(gate)
        assert caller.is_current_async_call_done(blocking=True)
        assert (tmp_path / "a").exists()

    def test_runs_calls_one_after_another_in_order(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path
    ) -> None:
        caller = make(kind)

        for word in "abc":
            caller.schedule_async_call(request(work.append, tmp_path / "log", word, after_s=0.02))

        assert caller.is_current_async_call_done(blocking=True)
        assert (tmp_path / "log").read_text() == "+a -a +b -b +c -c "

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

    def test_close_waits_for_what_is_scheduled_and_leaves_no_thread(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path, our_children: Children
    ) -> None:
        caller = make(kind)
        caller.schedule_async_call(request(work.write_slowly, tmp_path / "a", 0.1))
        caller.schedule_async_call(request(work.write, tmp_path / "b"))

        caller.close()
        caller.close()

        assert (tmp_path / "a").exists()
        assert (tmp_path / "b").exists()
        assert work.await_ends_of_threads()
        assert not our_children()
        with pytest.raises(CheckpointingException, match="closed"):
            caller.schedule_async_call(request(work.nothing))

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

    def test_a_call_that_is_not_over_in_time_is_an_error(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path
    ) -> None:
        caller, gate = make(kind, timeout_s=0.5), tmp_path / "gate"
        caller.schedule_async_call(request(work.write_when, tmp_path / "a", gate))

        with pytest.raises(CheckpointingException, match=r"write_when.* was not over after 0\."):
            caller.is_current_async_call_done(blocking=True)

        work.write(gate)
        # The process may take longer than its limit on a busy machine.
        assert wait_until(caller.is_current_async_call_done, PATIENCE_S)

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

    def test_death_is_named_and_the_next_call_works(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path
    ) -> None:
        caller = make(kind)

        error = outcome(caller, work.die, signal.SIGKILL)

        assert type(error) is WorkerDiedError
        assert "SIGKILL: out of memory?" in str(error)
        assert "exit code 5" in str(outcome(caller, os._exit, 5))
        assert outcome(caller, work.write, tmp_path / "a") is None

    def test_an_error_that_cannot_be_rebuilt_comes_as_text(
        self, make: Any, kind: type[AsyncCaller]
    ) -> None:
        error = outcome(make(kind), work.fail_unrebuildable)

        assert type(error) is CheckpointingException
        assert str(error) == "UnrebuildableError: kept apart: this"
        assert "in fail_unrebuildable" in str(error.__cause__)

    def test_abort_ends_what_runs_and_what_waits(
        self, make: Any, kind: type[AsyncCaller], tmp_path: Path, our_children: Children
    ) -> None:
        caller, gate = make(kind), tmp_path / "gate"
        runs = caller.schedule_async_call(request(work.write_when, tmp_path / "a", gate))
        waits = caller.schedule_async_call(request(work.write, tmp_path / "b"))
        pid = int(work.await_file(tmp_path / "a.started"))

        start = time.monotonic()
        caller.close(abort=True)

        assert time.monotonic() - start < PATIENCE_S / 2
        assert isinstance(runs.error, CheckpointingException)
        assert isinstance(waits.error, CheckpointingException)
        assert work.await_end(pid, 5.0)
        assert not our_children()
        assert not (tmp_path / "b").exists()


class TestWorker:
    @pytest.mark.parametrize(
        ("function", "args"), [(lambda: None, ()), (work.nothing, (threading.Lock(),))]
    )
    def test_refuses_what_cannot_be_pickled(self, make: Any, function: Any, args: Any) -> None:
        with pytest.raises(NotSendableError, match="cannot be sent"):
            make(PersistentAsyncCaller).schedule_async_call(request(function, *args))

    def test_an_argument_that_cannot_be_read_is_an_error_and_the_next_call_works(
        self, make: Any, tmp_path: Path
    ) -> None:
        caller = make(PersistentAsyncCaller)

        error = outcome(caller, print, work.Unreadable())

        assert type(error) is ValueError
        assert str(error) == "a number is wrong"
        assert outcome(caller, work.write, tmp_path / "a") is None

    def test_its_output_is_logged_and_its_last_is_in_the_error(
        self, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caller = make(PersistentAsyncCaller)
        assert outcome(caller, print, "a word on the way") is None
        assert "a word on the way" in caplog.text

        error = outcome(caller, work.die, signal.SIGABRT, "so it ends")

        assert "SIGABRT" in str(error)
        assert "so it ends" in str(error)

    def test_a_worker_that_died_while_idle_is_replaced_without_an_error(self, make: Any) -> None:
        caller = make(PersistentAsyncCaller)
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
