"""A stream waits for no sink, outlives those that fail, and says what it has dropped."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from localckpt.errors import StorageError
from localckpt.events.event import Event
from localckpt.events.stream import EventStream
from tests.events.sinks import Kept


class _Hanging(Kept):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write(self, event: Event) -> None:
        self.reached.set()
        self.go_on.wait(60)
        super().write(event)


class _Failing(Kept):
    def write(self, event: Event) -> None:
        super().write(event)
        raise OSError(28, "no space left")


def test_events_reach_all_sinks_in_order_with_their_fields() -> None:
    sinks = Kept(), Kept()
    stream = EventStream(sinks, rank=3)
    began = time.monotonic() - 2.0

    stream.emit("blocking", began=began, ended=began + 0.5, step=7, nbytes=10, tier="local")
    stream.emit("save", began=began, step=7, error=StorageError("the disk is full"))
    stream.close()

    assert sinks[0].events == sinks[1].events
    blocking, save = sinks[0].events
    assert blocking.duration == pytest.approx(0.5)
    assert blocking.start == pytest.approx(time.time() - 2.0, abs=30.0)
    assert (blocking.step, blocking.nbytes, blocking.tier, blocking.rank) == (7, 10, "local", 3)
    assert blocking.is_lost
    assert not save.is_lost
    assert (save.outcome, save.error_class) == ("failed", "StorageError")
    assert save.details == {"error": "the disk is full"}
    assert [event.number for event in sinks[0].events] == [0, 1]
    assert {event.run for event in sinks[0].events} == {stream.run}
    assert [sink.closed for sink in sinks] == [1, 1]
    assert sinks[0].flushes


def test_a_sink_that_hangs_holds_up_nobody_and_what_is_dropped_is_a_gap() -> None:
    hanging = _Hanging()
    stream = EventStream([hanging], capacity=4)
    stream.emit("run_began")
    assert hanging.reached.wait(60)

    for step in range(10):
        stream.emit("steps", step=step)
    stream.close(timeout_s=0.05)
    hanging.go_on.set()
    late = time.monotonic() + 60
    while not hanging.closed and time.monotonic() < late:
        time.sleep(0.01)

    assert [event.number for event in hanging.events] == [0, 1, 2, 3, 4]
    assert hanging.closed == 1


def test_a_sink_that_fails_is_warned_of_once_and_closed_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, kept = _Failing(), Kept()
    stream = EventStream([failing, kept])

    with caplog.at_level(logging.WARNING, "localckpt"):
        for _ in range(3):
            stream.emit("steps")
        stream.close()

    assert len(kept.events) == 3
    assert (len(failing.events), failing.closed) == (1, 1)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "_Failing failed, and gets no more events"
    ]


def test_nothing_is_emitted_without_sinks_after_the_end_or_in_a_fork() -> None:
    EventStream().emit("steps")
    kept = Kept()
    stream = EventStream([kept])
    if (child := os.fork()) == 0:
        stream.emit("steps")
        stream.close()
        os._exit(stream._queue.qsize())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    stream.close()
    stream.emit("steps")
    stream.close()

    assert kept.events == []
    assert kept.closed == 1
