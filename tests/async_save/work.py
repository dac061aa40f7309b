"""What the tests have done behind training; without torch, so that a worker starts quickly."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from localckpt.async_save.request import runs_in_trainer
from localckpt.errors import StorageError
from localckpt.waiting import wait_until


def write(path: Path, text: str = "done") -> None:
    """Write so that a reader sees all or nothing."""
    # Several processes may write the same.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


def append(path: Path, word: str, after_s: float = 0.0) -> None:
    with path.open("a") as file:
        file.write(f"+{word} ")
        file.flush()
        time.sleep(after_s)
        file.write(f"-{word} ")


def write_slowly(path: Path, seconds: float) -> None:
    started = path.with_suffix(".started")
    write(started, str(os.getpid()))
    time.sleep(seconds)
    write(path)


def write_when(path: Path, gate: Path) -> None:
    write(path.with_suffix(".started"), str(os.getpid()))
    await_file(gate)
    write(path)


@runs_in_trainer
def note_pid(pids: list[int]) -> None:
    pids.append(os.getpid())


def nothing() -> None:
    return


def fail_storage() -> None:
    raise StorageError("no space left in /somewhere")


def fail_value() -> None:
    raise ValueError("a number is wrong")


def fail_or_not(function: str) -> None:
    """One call on all ranks that fails on some."""
    globals()[function]()


class Unreadable:
    """An argument that can be sent, and not be received."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return fail_value, ()


class UnrebuildableError(Exception):
    def __init__(self, *, needed: str) -> None:
        super().__init__(f"kept apart: {needed}")


def fail_unrebuildable() -> None:
    raise UnrebuildableError(needed="this")


def die(number: int, last_words: str = "") -> None:
    print(last_words, file=sys.stderr, flush=True)
    os.kill(os.getpid(), number)
    time.sleep(10)


def describe_process(path: Path) -> None:
    write(
        path,
        json.dumps(
            {
                "pid": os.getpid(),
                "niceness": os.nice(0),
                "io_class": int(psutil.Process().ionice().ioclass),
                "leads_session": os.getsid(0) == os.getpid(),
            }
        ),
    )


def await_file(path: Path, timeout_s: float = 20.0) -> str:
    if not wait_until(path.exists, timeout_s):
        raise TimeoutError(f"{path} did not appear within {timeout_s:g} s")
    return path.read_text()


def await_end(pid: int, timeout_s: float = 20.0) -> bool:
    """Whether a process, which need not be a child, ends in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        # Whoever adopts it here may be slow to reap it; it runs nothing any more.
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def hang(path: Path, *args: object) -> None:
    """Tell who hangs, and live until that process is killed."""
    write(path, str(os.getpid()))
    await_file(path.with_suffix(".never"))


def await_ends_of_threads(timeout_s: float = 20.0) -> bool:
    """Whether all threads of ours end in time: one that has done its part takes a moment."""
    return wait_until(
        lambda: not any(thread.name.startswith("localckpt") for thread in threading.enumerate()),
        timeout_s,
    )
