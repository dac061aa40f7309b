"""A training program that is killed at random moments, and started again by the same command.

A program records the losses of its steps, and at its end a digest of its state. Whatever is
recorded in any attempt must be what a run without kills has recorded, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
import xxhash

from localckpt.waiting import wait_until

__all__ = ["END", "record", "record_end", "run_both"]

END = "end"
"""Name under which the digest of the state at the end is recorded."""
_RECORD = "LOCALCKPT_TEST_RECORD"
# An attempt that is not killed is over within it, also on a busy machine.
_LONGEST_S = 300.0
# Steps of these programs are short: one would be at its end before a busy machine gets to kill it.
_SLOW_FROM = "LOCALCKPT_TEST_SLOW_FROM"
_SLOW_STEP_S = 0.2

_Recorded = list[dict[str, str]]


# In the program.


def record(step: int | str, value: float | str, rank: int) -> None:
    """Record what a step has come to; a kill right after it does not lose it."""
    text = float(value).hex() if isinstance(value, float) else value
    folder = Path(os.environ[_RECORD])
    with (folder / f"{rank}").open("a") as file:
        file.write(f"{step} {text}\n")
    if rank == 0 and _SLOW_FROM in os.environ and _lines(folder) >= int(os.environ[_SLOW_FROM]):
        time.sleep(_SLOW_STEP_S)


def record_end(tensors: Iterable[torch.Tensor], rank: int) -> None:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.detach().flatten().view(torch.uint8).numpy())
    record(END, digest.hexdigest(), rank)


# In the test.


def run_both(
    program: Sequence[str],
    folder: Path,
    *,
    kills: int,
    steps_between: int,
    seed: int,
    variables: Mapping[str, str],
) -> tuple[_Recorded, _Recorded]:
    """Run a program to its end and, in another directory, killed so often before.

    Each time either all processes are killed at the same moment, or one that is not the first.

    Args:
        program: The directory is its last argument.
        folder: The directories and all records are in it.
        kills: Number of attempts that are killed.
        steps_between: An attempt is killed after at most so many steps of it.
        seed: Of the moments.
        variables: Of the environment.

    Returns:
        For each rank the recorded values by step, of both.

    Raises:
        AssertionError: Attempts disagree on a step, or an attempt ended before it was killed.
    """
    chance, both = random.Random(seed), []
    for times in (0, kills):
        records, command = folder / f"records {times}", [*program, f"{folder}/{times}"]
        for _ in range(times):
            steps = chance.randint(1, steps_between)
            until = _lines(records) + steps
            slow = {**variables, _SLOW_FROM: f"{until}"}
            with _attempt(command, records, slow) as attempt:
                _await_lines(attempt, records, until)
                time.sleep(chance.random() * 0.1)
                if (ranks := _ranks(records)) and chance.random() < 0.3:
                    _kill([chance.choice(ranks)])
                    with suppress(subprocess.TimeoutExpired):
                        # Its launcher ends the others.
                        attempt.wait(_LONGEST_S / 10)
        with _attempt(command, records, variables) as attempt:
            code = attempt.wait(_LONGEST_S)
            assert code == 0, f"the program ended with {code}: {_said(records)}"
        both.append(_recorded(records))
    return both[0], both[1]


@contextmanager
def _attempt(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """One start of a program; leaving the block kills what still runs."""
    # Launchers that are killed leave their temporary files.
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("ab+") as log:
        program = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | environment | {_RECORD: str(folder), "TMPDIR": str(folder / "tmp")},
        )
        try:
            yield program
        finally:
            # One may have been started while the others were killed.
            while running := _processes(folder):
                _kill(running)
                psutil.wait_procs(running, timeout=_LONGEST_S / 10)
                program.poll()
            program.wait(_LONGEST_S)


def _await_lines(attempt: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    def is_there() -> bool:
        assert attempt.poll() is None, f"it ended before: {_said(folder)}"
        return _lines(folder) >= count

    assert wait_until(is_there, _LONGEST_S), f"no {count} steps were recorded: {_said(folder)}"


def _processes(folder: Path) -> list[psutil.Process]:
    """All processes of the program, also those whose parent is gone, the oldest first."""
    found = []
    for process in psutil.process_iter(["create_time"]):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_RECORD) == str(folder):
                found.append(process)
    return sorted(found, key=lambda process: process.info["create_time"])


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            # It ends by itself, and removes the semaphores of those that were killed.
            if not any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
                process.send_signal(signal.SIGKILL)


def _ranks(folder: Path) -> list[psutil.Process]:
    """Return the ranks: neither their launchers, nor workers that they started."""
    ranks: dict[str, psutil.Process] = {}
    for process in _processes(folder):
        with suppress(psutil.NoSuchProcess):
            if (rank := process.environ().get("RANK")) is not None:
                ranks.setdefault(rank, process)
    return list(ranks.values())


def _said(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-8000:]


def _lines(folder: Path) -> int:
    first = folder / "0"
    return first.read_bytes().count(b"\n") if first.exists() else 0


def _recorded(folder: Path) -> _Recorded:
    """Return what each rank has recorded, in all attempts, which agree on each step."""
    by_rank = []
    for file in sorted(folder.glob("[0-9]*"), key=lambda file: int(file.name)):
        values: dict[str, str] = {}
        for line in file.read_text().splitlines():
            step, _, value = line.partition(" ")
            before = values.setdefault(step, value)
            assert value == before, f"rank {file.name}, step {step}: {before}, then {value}"
        by_rank.append(values)
    return by_rank
