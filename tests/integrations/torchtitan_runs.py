"""Runs of torchtitan's own trainer that note after each step whether they were resumed."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
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

from examples.integrations import torchtitan_training
from localckpt import LocalCheckpointManager
from localckpt.integrations.torchtitan import LocalCheckpoint, local_checkpoint
from tests.integrations.trainings import Run
from tests.managers.jobs import error_of

__all__ = ["first_step_of_example", "kept_data", "refusals", "train_as_told"]

# Of this process, which is forked for a run.
_runs: list[Run] = []


class RecordingTrainer(Trainer):
    """torchtitan's trainer, which notes what it has after each step, and ends as a test says."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        super().train_step(data_iterator)
        _runs[-1].note(self.step, self._digest())
        _runs[-1].may_end(self.step, self.checkpointer.checkpointer)

    def close(self) -> None:
        _runs[-1].is_stopped = self.checkpointer.checkpointer.stopped is not None
        super().close()

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


def train_as_told(run: Run, *options: str, config: str = "recording") -> None:
    """Run torchtitan's command; the variables of ``torchrun`` say which rank this is."""
    _runs.append(run)
    seed = ["--debug.seed", "5"] if not run.is_new else []
    here = ["--module", "tests.integrations.torchtitan_runs", "--config", config]
    folder = run.local.parent / "titan"
    sys.argv[1:] = [*here, "--hf-assets-path", "/", "--dump-folder", f"{folder}", *seed, *options]
    if config == "recording":
        sys.argv += ["--checkpoint.local", f"{run.local}"]
    _sleep_never()
    train.main()


def first_step_of_example(rank: int, world_size: int, local: Path, last: int) -> int:
    """The step with which a run of the example begins."""
    steps, step = list[int](), Trainer.train_step

    def note(trainer: Any, data_iterator: Any) -> None:
        step(trainer, data_iterator)
        steps.append(trainer.step)

    Trainer.train_step = note
    _sleep_never()
    torchtitan_training.main(["--checkpoint.local", f"{local}", "--training.steps", f"{last}"])
    return steps[0]


def kept_data(local: Path) -> Any:
    """The state of the data loader in the newest checkpoint of a job of one process."""
    with LocalCheckpointManager(local, read_only=True) as manager:
        manager.find_latest()
        state: dict[str, Any] = manager.load()[0]
    return state["dataloader"]


def refusals(local: str) -> list[str]:
    """The errors that configs raise that make no sense."""
    config = partial(LocalCheckpoint.Config, enable=True)
    makes: list[Callable[[], Any]] = [
        lambda: config().build(),
        lambda: config(local=local, options={"shared": 1}).build(),
        lambda: config(local=local, options={"evry": 1}).build(),
        lambda: local_checkpoint(derive(LocalCheckpoint.Config(), _OtherConfig), local=local),
    ]
    return [error_of(make) for make in makes]


class _OtherManager(LocalCheckpoint):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalCheckpoint.Config):
        pass


_OtherConfig: type[BaseCheckpointManager.Config] = _OtherManager.Config


def _sleep_never() -> None:
    # The first rank would sleep for two seconds at the end of a run.
    torchtitan.trainer.time = types.SimpleNamespace(
        sleep=lambda _: None, perf_counter=time.perf_counter
    )


def _values(tensor: torch.Tensor) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().numpy()
