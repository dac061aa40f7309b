"""Training programs that are killed at random moments, and started again by the same command.

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.utils._pytree
import xxhash

from tests.upstream.environment import UPSTREAM

__all__ = [
    "END",
    "program_environment",
    "record",
    "record_end",
    "run_both",
    "run_killed",
    "run_undisturbed",
]

END = "end"
"""Name under which the digest of the state at the end is recorded."""
_ROOT = Path(__file__).parents[2]
_RECORD = "LOCALCKPT_TEST_RECORD"
# An attempt that is not killed is over within it, also on a busy machine.
_LONGEST_S = 300.0
_LOOK_S = 0.02
# Steps of these programs are short: one would be at its end before a busy machine gets to kill it.
_SLOW_FROM = "LOCALCKPT_TEST_SLOW_FROM"
_SLOW_STEP_S = 0.2


# In the program.


def record(step: int | str, value: float | str, rank: int = 0) -> None:
    """Record what a step has come to; a kill right after it does not lose it."""
    text = float(value).hex() if isinstance(value, float) else value
    folder = Path(os.environ[_RECORD])
    with (folder / f"{rank}").open("a") as file:
        file.write(f"{step} {text}\n")
    if rank == 0 and _SLOW_FROM in os.environ and _lines(folder) >= int(os.environ[_SLOW_FROM]):
        time.sleep(_SLOW_STEP_S)


def record_end(state: Any, rank: int = 0) -> None:
    """Record a digest of a tree of tensors and plain values."""
    digest = xxhash.xxh3_64()
    for leaf in torch.utils._pytree.tree_leaves(state):
        local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
        is_tensor = isinstance(local, torch.Tensor)
        digest.update(
            local.detach().flatten().view(torch.uint8).numpy()
            if is_tensor
            else repr(local).encode()
        )
    record(END, digest.hexdigest(), rank)


# In the test.


def program_environment() -> dict[str, str]:
    """Variables of a program that imports frameworks, and this package from where it lies."""
    path = [str(_ROOT), os.environ.get("PYTHONPATH", ""), str(UPSTREAM)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONWARNINGS": "ignore"}


def run_undisturbed(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Run a program to its end.

    Returns:
        For each rank the recorded values by step.
    """
    with _Attempt(command, folder, environment) as attempt:
        attempt.wait()
    return _recorded(folder)


def run_killed(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    kills: int,
    steps_between: int,
    seed: int,
) -> list[dict[str, str]]:
    """Run a program that is killed at random moments, and then to its end.

    Each time either all processes are killed at the same moment, or one that is not the first.

    Args:
        kills: Number of attempts that are killed.
        steps_between: An attempt is killed after at most so many steps of it.
        seed: Of the moments.

    Returns:
        As of :func:`run_undisturbed`.

    Raises:
        AssertionError: Attempts disagree on a step, or an attempt ended before it was killed.
    """
    chance = random.Random(seed)
    for _ in range(kills):
        steps = chance.randint(1, steps_between)
        slow = {_SLOW_FROM: str(_lines(folder) + steps)}
        with _Attempt(command, folder, {**environment, **slow}) as attempt:
            attempt.await_steps(steps)
            time.sleep(chance.random() * 0.1)
            attempt.kill(chance)
    return run_undisturbed(command, folder, environment)


def run_both(
    program: Sequence[str],
    folder: Path,
    *,
    kills: int,
    steps_between: int,
    seed: int,
    variables: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Run a program, given a directory, to its end and, in another one, killed.

    Args:
        program: The directory is its last argument.
        folder: The directories and all records are in it.
        kills, steps_between, seed: As for :func:`run_killed`.
        variables: Of the environment, beside those of :func:`program_environment`.

    Returns:
        What :func:`run_undisturbed` and :func:`run_killed` return.
    """
    environment = program_environment() | (variables or {})
    whole = run_undisturbed([*program, f"{folder}/whole"], folder / "a", environment)
    killed = run_killed(
        *([*program, f"{folder}/killed"], folder / "b", environment),
        kills=kills,
        steps_between=steps_between,
        seed=seed,
    )
    return whole, killed


class _Attempt:
    """One start of a program; leaving the block kills what still runs."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        # Launchers that are killed leave their temporary files.
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._before = _lines(folder)
        self._log = (folder / "log").open("ab+")
        self._program = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | environment | {_RECORD: str(folder), "TMPDIR": str(folder / "tmp")},
        )

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        # One may have been started while the others were killed.
        while running := self._processes():
            _kill(running)
            psutil.wait_procs(running, timeout=_LONGEST_S / 10)
            self._program.poll()
        self._program.wait(_LONGEST_S)
        self._log.close()

    def await_steps(self, steps: int) -> None:
        """Wait until this attempt has recorded so many steps."""
        until = time.monotonic() + _LONGEST_S
        while _lines(self._folder) < self._before + steps:
            if self._program.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"no {steps} steps were recorded: {self._said()}")
            time.sleep(_LOOK_S)

    def kill(self, chance: random.Random) -> None:
        """Kill all processes at once, or one alone, after which its launcher ends the others."""
        ranks = _ranks(self._processes())
        if ranks and chance.random() < 0.3:
            _kill([chance.choice(ranks)])
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(_LONGEST_S / 10)

    def wait(self) -> None:
        try:
            code = self._program.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise AssertionError(f"the program ended with {code}: {self._said()}")

    def _processes(self) -> list[psutil.Process]:
        """All processes of the program, also those whose parent is gone, the oldest first."""
        found = []
        for process in psutil.process_iter(["create_time"]):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(_RECORD) == str(self._folder):
                    found.append(process)
        return sorted(found, key=lambda process: process.info["create_time"])

    def _said(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-8000:]


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            # It ends by itself, and removes the semaphores of those that were killed.
            if not any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
                process.send_signal(signal.SIGKILL)


def _ranks(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the ranks among processes: neither their launchers, nor workers that they started."""
    ranks: dict[str, psutil.Process] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if (rank := process.environ().get("RANK")) is not None:
                ranks.setdefault(rank, process)
    return list(ranks.values())


def _lines(folder: Path) -> int:
    first = folder / "0"
    return first.read_bytes().count(b"\n") if first.exists() else 0


def _recorded(folder: Path) -> list[dict[str, str]]:
    """Return what each rank has recorded, in all attempts.

    Raises:
        AssertionError: Two attempts have recorded different values of a step.
    """
    by_rank = []
    for file in sorted(folder.glob("[0-9]*"), key=lambda file: int(file.name)):
        values: dict[str, str] = {}
        for line in file.read_text().splitlines():
            step, _, value = line.partition(" ")
            before = values.setdefault(step, value)
            assert value == before, f"rank {file.name}, step {step}: {before}, then {value}"
        by_rank.append(values)
    return by_rank
