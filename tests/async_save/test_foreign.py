"""Calls that a process of a foreign queue carries out, and how the trainer hears of them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from localckpt.async_save.callers import HandedOver

_PATIENCE_S = 20.0


def _handed_over(error: str | None = None, timeout_s: float = _PATIENCE_S) -> HandedOver:
    return HandedOver(lambda: error, timeout_s)


def _ends_when(call: HandedOver, event: Callable[[], object]) -> bool:
    """Whether a waiting process waits until an event, and not after it."""
    waiting = threading.Thread(target=call.function)
    waiting.start()
    time.sleep(0.1)
    waited = waiting.is_alive()
    event()
    waiting.join(_PATIENCE_S / 2)
    return waited and not waiting.is_alive()


def test_a_process_waits_until_the_trainer_is_done_or_has_closed() -> None:
    good, bad, closed = _handed_over(), _handed_over("it went wrong"), _handed_over()

    assert _ends_when(good, good.task.run)
    assert _ends_when(bad, bad.task.run)
    assert _ends_when(closed, closed.close)
    assert good.await_error() is None
    assert bad.await_error() == "it went wrong"


def test_a_process_does_not_wait_for_a_trainer_that_is_dead() -> None:
    code = (
        "import os, pickle, time\n"
        "from localckpt.async_save.callers import HandedOver\n"
        "call = HandedOver(lambda: None, 20.0)\n"
        "os.write(1, pickle.dumps(call.function))\n"
        "os.close(1)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        waiting = threading.Thread(target=pickle.loads(trainer.stdout.read()))
        waiting.start()
        waiting.join(0.1)
        waited = waiting.is_alive()

        trainer.kill()
        trainer.wait()

    waiting.join(_PATIENCE_S / 2)
    assert waited
    assert not waiting.is_alive()
