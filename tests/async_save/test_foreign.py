"""Calls that a process of a foreign queue carries out, and how the trainer hears of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from localckpt.async_save.foreign import ForeignOutcome, WaitForTrainer

_PATIENCE_S = 20.0


def test_who_comes_after_the_trainer_has_closed_does_nothing_to_what_has_its_place(
    tmp_path: Path,
) -> None:
    outcome = ForeignOutcome()
    outcome.close()
    outcome.close()

    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    if other != outcome.place.fd:
        os.dup2(other, outcome.place.fd)
        os.close(other)
    WaitForTrainer(outcome.place, _PATIENCE_S)()
    outcome.report("too late")

    os.close(outcome.place.fd)
    assert (tmp_path / "other").read_bytes() == b""


def _ends_when(outcome: ForeignOutcome, event: Callable[[], object]) -> bool:
    """Whether a waiting process waits until an event, and not after it."""
    waiting = threading.Thread(target=WaitForTrainer(outcome.place, _PATIENCE_S))
    waiting.start()
    time.sleep(0.1)
    waited = waiting.is_alive()
    event()
    waiting.join(_PATIENCE_S / 2)
    return waited and not waiting.is_alive()


def test_a_process_waits_until_the_trainer_has_reported_or_closed() -> None:
    told, closed = ForeignOutcome(), ForeignOutcome()

    assert _ends_when(told, lambda: told.report(None))
    assert _ends_when(closed, closed.close)
    told.close()


def test_a_process_does_not_wait_for_a_trainer_that_is_dead() -> None:
    code = (
        "import os, pickle, time\n"
        "from localckpt.async_save.foreign import ForeignOutcome\n"
        "outcome = ForeignOutcome()\n"
        "os.write(1, pickle.dumps(outcome.place))\n"
        "os.close(1)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        place = pickle.loads(trainer.stdout.read())
        waiting = threading.Thread(target=WaitForTrainer(place, _PATIENCE_S))
        waiting.start()
        waiting.join(0.1)
        waited = waiting.is_alive()

        trainer.kill()
        trainer.wait()

    waiting.join(_PATIENCE_S / 2)
    assert waited
    assert not waiting.is_alive()


def test_a_process_waits_no_longer_than_it_may() -> None:
    outcome = ForeignOutcome()
    began = time.monotonic()

    WaitForTrainer(outcome.place, 0.05)()

    assert 0.05 <= time.monotonic() - began < _PATIENCE_S
    outcome.close()
