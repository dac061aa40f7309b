"""Runs of torchtitan's own trainer that record after each step whether they were resumed.

A record is the same bit for bit only if the parameters, the optimizer, the schedule, the position
in the data and the random numbers are. Importing torchtitan takes longer than all that is done with
it, so jobs are forked from a process that has done so.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torchtitan.trainer
import xxhash
from torch.distributed.tensor import DTensor
from torchtitan import train
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.config.override import derive
from torchtitan.trainer import Trainer

from benchmarks.stores import serve_store
from examples.integrations import torchtitan_training
from localckpt import CheckpointingException, LocalCheckpointManager
from localckpt.integrations.torchtitan import LocalCheckpoint, local_checkpoint
from tests.integrations.kills import record

__all__ = ["Job", "kept_data", "refusals", "run_example", "train_as_told", "train_plain"]

_LONGEST_S = 120.0
_fork = multiprocessing.get_context("fork")


class RecordingTrainer(Trainer):
    """torchtitan's trainer, which records what it has after each step, and ends as a test says."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        end: str = ""
        """Name of a signal that this rank sends itself."""

        end_at: int = 0
        """The step in which it does."""

        pause_s: float = 0.0
        """Length of each step, in seconds."""

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        super().train_step(data_iterator)
        time.sleep(self.config.pause_s)
        record(self.step, self._digest(), torch.distributed.get_rank())
        if self.config.end and self.step == self.config.end_at:
            # Else the step that the run is resumed at would depend on how fast saves are.
            self.checkpointer.checkpointer.wait_until_finished()
            os.kill(os.getpid(), getattr(signal, self.config.end))

    def _digest(self) -> str:
        digest = xxhash.xxh3_64()
        for part in self.model_parts:
            for parameter in part.parameters():
                digest.update(_values(parameter))
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                for value in values.values():
                    digest.update(_values(value))
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        # Last, since torchtitan's own checkpoints do not have it.
        random = xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy())
        return f"{digest.hexdigest()} {rates} {self.ntokens_seen} {random}"


def recording() -> RecordingTrainer.Config:
    """The config of the example, with checkpoints in every second step, and torchtitan's own."""
    example = torchtitan_training.small()
    given = {item.name: getattr(example, item.name) for item in fields(type(example))}
    config = RecordingTrainer.Config(**given)
    config.checkpoint = LocalCheckpoint.Config(
        enable=True, local_interval=2, interval=4, last_save_model_only=False
    )
    return config


def plain() -> RecordingTrainer.Config:
    """The same with torchtitan's own checkpoint manager, which is not enabled."""
    config = recording()
    config.checkpoint = CheckpointManager.Config()
    return config


def train_as_told(options: Sequence[str], config: str = "recording") -> None:
    """Run torchtitan's command; the variables of ``torchrun`` say which rank this is."""
    here = ["--module", "tests.integrations.torchtitan_runs", "--config", config]
    sys.argv[1:] = [*here, "--hf-assets-path", "/", *options]
    train.main()


def train_plain(options: Sequence[str]) -> None:
    """Run torchtitan's command with its own checkpoint manager."""
    train_as_told(options, "plain")


def run_example(options: Sequence[str]) -> None:
    torchtitan_training.main(list(options))


@dataclass(frozen=True)
class Job:
    """A job of torchtitan, in a folder of its own.

    Attributes:
        folder: Has torchtitan's folder, and the directory of the node.
        world_size: Number of ranks.
        main: Runs it on one rank, with options of torchtitan's command line.
    """

    folder: Path
    world_size: int
    main: Callable[[Sequence[str]], None] = train_as_told

    @property
    def local(self) -> Path:
        return self.folder / "node"

    def run(self, *options: str, last_rank: Sequence[str] = ()) -> list[list[str]]:
        """Train, as far as the ranks get.

        Args:
            options: Of torchtitan's command line.
            last_rank: More of them for the last rank.

        Returns:
            What each rank has recorded.
        """
        places = ["--dump-folder", f"{self.folder}/titan"]
        if self.main is train_as_told:
            places += ["--checkpoint.local", str(self.local)]
        records = self._run([*places, *options], last_rank)
        files = [records / f"{rank}" for rank in range(self.world_size)]
        return [file.read_text().splitlines() for file in files]

    def first_steps(self, *options: str) -> list[str]:
        """Train, and return the step that each rank says to begin with."""
        records = self._run(["--checkpoint.local", str(self.local), *options], ())
        logs = [records / f"log{rank}" for rank in range(self.world_size)]
        return [re.findall(r"Training starts at step (\d+)", log.read_text())[-1] for log in logs]

    def _run(self, options: Sequence[str], last_rank: Sequence[str]) -> Path:
        records = self.folder / f"records{time.time_ns()}"
        records.mkdir(parents=True)
        store = serve_store()
        variables = {
            "WORLD_SIZE": f"{self.world_size}",
            "LOCALCKPT_TEST_RECORD": str(records),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{store.port}",
            # The store is in this process.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks = range(self.world_size)
        processes = [
            _fork.Process(
                target=_run_rank,
                args=(
                    self.main,
                    variables | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                    [*options, *(last_rank if rank == ranks[-1] else ())],
                    records / f"log{rank}",
                ),
            )
            for rank in ranks
        ]
        for process in processes:
            process.start()
        codes = _reap(processes)
        if set(codes) - {0, -signal.SIGKILL}:
            said = "".join(log.read_text()[-8000:] for log in sorted(records.glob("log*")))
            raise RuntimeError(f"the ranks ended with {codes}: {said}")
        return records


def kept_data(local: Path) -> Any:
    """The state of the data loader in the newest checkpoint of a job of one process."""
    with LocalCheckpointManager(local, read_only=True) as manager:
        manager.find_latest()
        state: dict[str, Any] = manager.load()[0]
    return state["dataloader"]


def refusals(folder: Path) -> list[str]:
    """The errors that configs raise that make no sense."""
    local = f"{folder}/unused"
    configs = [
        lambda: LocalCheckpoint.Config(enable=True).build(),
        lambda: LocalCheckpoint.Config(enable=True, local=local, options={"shared": 1}).build(),
        lambda: LocalCheckpoint.Config(enable=True, local=local, options={"evry": 1}).build(),
        lambda: local_checkpoint(derive(LocalCheckpoint.Config(), _OtherConfig), local=local),
    ]
    return [_refusal(make) for make in configs]


class _OtherManager(LocalCheckpoint):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalCheckpoint.Config):
        pass


_OtherConfig: type[BaseCheckpointManager.Config] = _OtherManager.Config


def _refusal(make: Any) -> str:
    try:
        make()
    except CheckpointingException as error:
        return str(error)
    return "no error"


def _run_rank(
    main: Callable[[Sequence[str]], None],
    variables: dict[str, str],
    options: Sequence[str],
    log: Path,
) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    # The first rank would sleep for two seconds at the end of a run.
    torchtitan.trainer.time = types.SimpleNamespace(
        sleep=lambda _: None, perf_counter=time.perf_counter
    )
    main(options)


def _reap(processes: Sequence[Any]) -> list[int]:
    """Exit codes of processes; those that are too late are killed, and have the code 1."""
    deadline = time.monotonic() + _LONGEST_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    return [1 if process in late else process.exitcode for process in processes]


def _values(tensor: torch.Tensor) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().numpy()
