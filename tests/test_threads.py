"""Waits for other threads, and descriptors, when the main thread is interrupted at any moment."""

from __future__ import annotations

import _thread
import _weakrefset
import dis
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

import pytest

from localckpt.memory.copying import Copier
from localckpt.ranks.deadline import Patience, StoreWait, ask_until_stopped, interruptible
from localckpt.threads import Latch, Task, end_all
from localckpt.waiting import wait_until
from tests.interrupts import Interrupter

_PATIENCE_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Keeps garbage of other tests from being collected in a call that is interrupted.

    Python drops what is raised there. To collect takes longer than some calls wait.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@cache
def _moments(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which Python may handle a signal.

    It looks for signals when a function begins, after calls, and when a loop goes round.
    """
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if before.startswith("CALL") or instruction.opname in ("RESUME", "JUMP_BACKWARD"):
            found.add(instruction.offset)
        before = instruction.opname
    return frozenset(found)


def _interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Interrupt a call at the ``number``-th moment that it can be; whether it has so many."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename == _weakrefset.__file__:
            # Python drops what callbacks of weak references raise.
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode" and frame.f_lasti in _moments(frame.f_code)
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # Python 3.12 traces instructions only if some frame has asked for it before settrace().
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_moment_of_a_wait_harms_neither_the_setter_nor_later_waits() -> None:
    number, is_interrupted = 0, True
    while is_interrupted:
        number += 1
        latch = Latch()
        # Late enough that the wait has begun, also on a busy machine: else it has few moments.
        setter = threading.Timer(0.1, latch.set)
        setter.start()

        is_interrupted = _interrupted_at(number, partial(latch.wait, _PATIENCE_S))

        setter.join(_PATIENCE_S)
        assert not setter.is_alive()
        later = Task(partial(latch.wait, _PATIENCE_S))
        later.start("later", daemon=True)
        assert later.result(_PATIENCE_S)
    assert number > 5


def _is_running(name: str) -> bool:
    # In a thread that waits to say that it began, is_alive() is not true.
    return not wait_until(
        lambda: not any(t.name == name and t.ident for t in threading.enumerate()), _PATIENCE_S
    )


def test_an_interrupt_at_any_moment_of_starting_a_thread_leaves_none_that_does_not_end() -> None:
    number, is_interrupted, begun = 0, True, 0
    while is_interrupted:
        number += 1
        task = Task(lambda: time.sleep(0.001))

        is_interrupted = _interrupted_at(number, lambda t=task: t.start("started", daemon=True))

        end_all([task])
        begun += task.done()
    assert not _is_running("started")
    assert number > 5
    assert begun == number


def test_a_call_that_is_stopped_is_abandoned_and_its_thread_ends_with_it() -> None:
    stopped, over = Latch(), Latch()

    def wait_on(wait: StoreWait) -> bool:
        wait.begun.set()
        return over.wait(_PATIENCE_S)

    ask = partial(ask_until_stopped, "ask", 60.0, whom=str, patience=Patience(0, "ask"))
    call = Task(partial(ask, wait_on, stopped))
    call.start("asks", daemon=True)
    stopped.set()

    assert call.result(_PATIENCE_S) is None
    assert ask(lambda _: 1, Latch()) == 1
    over.set()
    assert not _is_running("localckpt-ranks")


def test_work_that_was_begun_is_over_when_its_owner_goes_on_and_other_work_never_begins() -> None:
    interrupter, running, begun_late = Interrupter(5), [0], 0

    def work() -> None:
        running[0] += 1
        time.sleep(0.0005)
        running[0] -= 1

    for _ in range(300):
        task = Task(work)

        def own(task: Task[None] = task) -> None:
            try:
                task.start("work", daemon=True)
                task.wait()
            finally:
                end_all([task])

        interrupter.call("own", own)
        if not task.done():
            # The interrupt came between two instructions of the call above.
            end_all([task])
        assert running == [0]
        begun_late += task.call_off() is False
    assert begun_late == 0
    assert interrupter.interrupts > 30


def test_work_that_hangs_in_a_library_is_stopped_by_the_first_interrupt() -> None:
    interrupter, stops = Interrupter(1), 0
    for _ in range(20):
        hang = Latch()

        def work(hang: Latch = hang) -> bool:
            return hang.wait(_PATIENCE_S)

        began = time.monotonic()
        interrupter.call("hang", lambda w=work, h=hang: interruptible(w, h.set))
        stops += hang.is_set()

        assert time.monotonic() - began < _PATIENCE_S / 2
    assert interrupter.interrupts == 20
    assert stops > 10


def _lose_starts(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Have new threads never begin, as where there is no memory for their first frame."""
    lost: list[Callable[[], object]] = []
    of_this_python = [
        n for n in ("_start_joinable_thread", "_start_new_thread") if hasattr(threading, n)
    ]
    monkeypatch.setattr(threading, of_this_python[0], lambda begin, *_, **__: lost.append(begin))
    monkeypatch.setattr("localckpt.threads._STARTED_S", 0.05)
    return lost


def test_the_work_of_a_thread_that_never_begins_is_done_by_its_caller_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = list(range(100))
    done: list[int] = []
    lost = _lose_starts(monkeypatch)

    Copier(4).share(pieces, done.extend)
    assert interruptible(lambda: "called", lambda: None) == "called"
    monkeypatch.undo()
    # They begin after all.
    for begin in lost:
        _thread.start_new_thread(begin, ())
    time.sleep(0.5)

    assert sorted(done) == pieces
    assert len(lost) == 2
