"""How a trainer may end, or fork, with calls in flight: nothing hangs and nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.async_save import work

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
KINDS = ["ThreadAsyncCaller", "PersistentAsyncCaller", "TemporalAsyncCaller"]
PROCESSES = KINDS[1:]

# Only callers, so that these trainers do without torch and start quickly.
PRELUDE = """
import os, sys, time, signal
from pathlib import Path
from localckpt.async_save import callers
from localckpt.async_save.request import AsyncRequest
from tests.async_save import work
here = Path(sys.argv[1])
assert "torch" not in sys.modules
def schedule(caller, function, *args):
    return caller.schedule_async_call(AsyncRequest(function, args, []))
"""


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a script as a user's would: from a file, without a guard."""
    with contextlib.ExitStack() as trainers:

        def begin(script: str) -> subprocess.Popen[str]:
            file = tmp_path / "train.py"
            file.write_text(PRELUDE + textwrap.dedent(script))
            trainer = subprocess.Popen(
                [sys.executable, str(file), str(tmp_path)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            trainers.enter_context(trainer)
            trainers.callback(trainer.kill)
            return trainer

        yield begin


def _end(trainer: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = trainer.communicate(timeout=PATIENCE_S)
    return trainer.returncode, output


@pytest.mark.fault("interrupted")
@pytest.mark.parametrize(
    ("kind", "way"), [(KINDS[0], "1 / 0"), (KINDS[1], ""), (KINDS[2], "sys.exit(0)")]
)
def test_interpreter_exit_lets_calls_end_well(
    start: Start, tmp_path: Path, kind: str, way: str
) -> None:
    trainer = start(
        f"""
        caller = callers.{kind}()
        schedule(caller, work.write_slowly, here / "a", 0.2)
        schedule(caller, work.write, here / "b")
        {way}
        """
    )

    code, output = _end(trainer)

    assert code == (1 if "/" in way else 0), output
    assert (tmp_path / "a").exists(), output
    assert (tmp_path / "b").exists(), output
    assert work.await_end(int((tmp_path / "a.started").read_text()))


@pytest.mark.fault("trainer-dies")
@pytest.mark.parametrize("kind", PROCESSES)
def test_when_the_trainer_is_killed_the_call_in_hand_is_finished_and_all_processes_end(
    start: Start, tmp_path: Path, kind: str
) -> None:
    trainer = start(
        f"""
        caller = callers.{kind}()
        schedule(caller, work.write_when, here / "a", here / "gate")
        schedule(caller, work.write, here / "b")
        work.await_file(here / "a.started")
        import psutil
        work.write(here / "pids", " ".join(str(c.pid) for c in psutil.Process().children()))
        time.sleep(600)
        """
    )
    work.await_file(tmp_path / "a.started")
    pids = [int(pid) for pid in work.await_file(tmp_path / "pids").split()]

    trainer.kill()
    trainer.wait(PATIENCE_S)
    work.write(tmp_path / "gate")

    assert work.await_file(tmp_path / "a") == "done"
    assert len(pids) == (1 if kind == "PersistentAsyncCaller" else 2)
    assert all(work.await_end(pid) for pid in pids)
    assert not (tmp_path / "b").exists()


@pytest.mark.fault("interrupted")
@pytest.mark.parametrize("kind", PROCESSES)
def test_ctrl_c_goes_to_the_trainer_alone(start: Start, tmp_path: Path, kind: str) -> None:
    trainer = start(
        f"""
        caller = callers.{kind}()
        call = schedule(caller, work.write_when, here / "a", here / "gate")
        try:
            work.await_file(here / "a.started")
            work.write(here / "waits")
            print(caller.is_current_async_call_done(blocking=True, no_dist=True))
        except KeyboardInterrupt:
            work.write(here / "gate")
            print(call.wait(20), call.error)
        """
    )
    pid = int(work.await_file(tmp_path / "a.started"))
    # A worker may have started before the call of the trainer that starts it is over.
    work.await_file(tmp_path / "waits")

    os.kill(pid, signal.SIGINT)
    trainer.send_signal(signal.SIGINT)

    code, output = _end(trainer)
    assert code == 0
    assert output.strip() == "True None"
