"""Signals of a process that has, had, or inherited the handlers of a checkpointer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException

_AT_ONCE_S = 5.0


def _wait(begun: Any) -> None:
    begun.set()
    time.sleep(60)


def test_a_signal_ends_a_child_that_the_trainer_forked(tmp_path: Path) -> None:
    forks = multiprocessing.get_context("fork")
    before = signal.getsignal(signal.SIGTERM)
    with (
        Checkpointer({"m": torch.nn.Linear(1, 1)}, local=tmp_path / "a", events=()) as outer,
        Checkpointer({"m": torch.nn.Linear(1, 1)}, local=tmp_path / "b", events=()) as inner,
    ):
        outer.resume()
        inner.resume()
        begun = forks.Event()
        child = forks.Process(target=_wait, args=(begun,))
        child.start()
        # Python forgets signals that come while it forks, where it has a handler for them.
        assert begun.wait(60)
        began = time.monotonic()

        child.terminate()
        child.join(60)
        with forks.Pool(1) as pool:
            pool.apply(os.getpid)
            pool.terminate()
            pool.join()

        assert time.monotonic() - began < _AT_ONCE_S
        assert child.exitcode == -signal.SIGTERM
        assert outer.stopped is inner.stopped is None
    assert signal.getsignal(signal.SIGTERM) == before


def test_of_two_the_open_one_hears_a_signal_that_the_closed_one_left_to_it(tmp_path: Path) -> None:
    with Checkpointer({"m": torch.nn.Linear(1, 1)}, local=tmp_path / "b", events=()) as inner:
        first = inner._stop_requests
        with Checkpointer({"m": torch.nn.Linear(1, 1)}, local=tmp_path / "a", events=()) as outer:
            second = outer._stop_requests
            first.close()
            signal.raise_signal(signal.SIGTERM)

            assert (first.why(), second.why()) == (None, "signal SIGTERM")


@pytest.fixture
def pythons_ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, whatever a framework that was used before has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    yield

    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_ctrl_c")
def test_ctrl_c_among_the_stop_signals_stops_in_order_and_interrupts_when_it_comes_again(
    tmp_path: Path,
) -> None:
    with Checkpointer(
        {"m": torch.nn.Linear(1, 1)}, local=tmp_path, stop_signals=[signal.SIGINT], events=()
    ) as checkpointer:
        checkpointer.resume()
        signal.raise_signal(signal.SIGINT)
        while not checkpointer.step():
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert checkpointer.stopped


def test_an_interrupt_in_a_call_is_said_by_the_next_and_nothing_on_disk_is_lost(
    tmp_path: Path,
) -> None:
    steps: list[int] = []

    def give() -> int:
        if len(steps) == 2:
            raise KeyboardInterrupt
        return len(steps)

    parts = {"m": torch.nn.Linear(1, 1), "own": (give, lambda _: None)}
    with Checkpointer(parts, local=tmp_path, every=1, events=()) as checkpointer:
        steps.append(checkpointer.resume())
        checkpointer.step(0)
        checkpointer.wait_until_finished()
        steps.append(1)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.step(1)

        for call in (checkpointer.step, checkpointer.wait_until_finished):
            with pytest.raises(CheckpointingException, match=r"step\(\) of this Checkpointer was"):
                call()
        checkpointer.close()

    steps.clear()
    with Checkpointer(parts, local=tmp_path, events=()) as checkpointer:
        assert checkpointer.resume() == 1
