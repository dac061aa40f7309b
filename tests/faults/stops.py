"""Stops a process after each of its system calls of some kinds, as long as somebody looks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil

__all__ = ["stops_of"]

_PATIENCE_S = 60.0
_DETACHING_S = 5.0
_POLL_S = 0.001
_STOPPED = re.compile(r"^(\d+) .*--- stopped by SIGSTOP ---$")


@contextmanager
def stops_of(pid: int, calls: Mapping[str, str], log: Path) -> Iterator[Iterator[str]]:
    """Trace a process and its children; they stop at the end of each of these calls.

    Args:
        pid: The process.
        calls: System calls as strace names them, with commas; and what happens in place of them, as
            strace's ``inject`` has it, or nothing.
        log: Where the trace goes.

    Yields:
        One value for each stop: the line of the call. The process goes on when the next is asked
        for; the values end when the process does.
    """
    log.touch()
    command = [
        "strace",
        "-f",
        "-y",
        "-o",
        str(log),
        "-p",
        str(pid),
        "-e",
        f"trace={','.join(calls)}",
    ]
    for names, instead in calls.items():
        command += ["-e", ":".join(filter(None, [f"inject={names}", "signal=SIGSTOP", instead]))]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _await_attached(pid, tracer)
        yield _stops(pid, log)
    finally:
        tracer.terminate()
        try:
            tracer.wait(_DETACHING_S)
        except subprocess.TimeoutExpired:
            # It may lose a thread that ends in a stop, and then waits for the process without end.
            tracer.kill()
            tracer.wait(_PATIENCE_S)


def _await_attached(pid: int, tracer: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    threads = [path / "status" for path in Path(f"/proc/{pid}/task").iterdir()]
    while any(f"TracerPid:\t{tracer.pid}\n" not in path.read_text() for path in threads):
        assert tracer.poll() is None, "strace has ended"
        assert time.monotonic() < deadline, "strace does not attach"
        time.sleep(_POLL_S)


def _stops(pid: int, log: Path) -> Iterator[str]:
    with log.open() as trace:
        while True:
            stopped, call = _await_stop(pid, trace)
            if not stopped:
                return
            yield call
            for process in stopped:
                os.kill(process, signal.SIGCONT)


def _await_stop(pid: int, trace: TextIO) -> tuple[set[int], str]:
    """Processes of which every thread has stopped, and the call after which they have."""
    deadline = time.monotonic() + _PATIENCE_S
    waiting: dict[int, set[int]] = {}
    call = line = ""
    while True:
        while part := trace.readline():
            line += part
            if not line.endswith("\n"):
                continue
            line, told = "", line
            if found := _STOPPED.match(told):
                thread = int(found[1])
                if (owner := _process_of(thread)) is not None:
                    waiting.setdefault(owner, set()).add(thread)
            elif "(" in told and "---" not in told:
                call = told.strip()
        if waiting and all(_threads_of(owner) <= halted for owner, halted in waiting.items()):
            return set(waiting), call
        if not waiting and not _runs(pid):
            return set(), call
        assert time.monotonic() < deadline, f"neither stopped nor over after {call}"
        time.sleep(_POLL_S)


def _process_of(thread: int) -> int | None:
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = re.search(r"^Tgid:\t(\d+)$", status, re.MULTILINE)
    return int(found[1]) if found else None


def _threads_of(pid: int) -> set[int]:
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except (FileNotFoundError, ProcessLookupError):
        return set()


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
