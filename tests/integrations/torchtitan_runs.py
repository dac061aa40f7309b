"""Runs of torchtitan's own trainer, by the configuration of the example."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torchtitan.trainer
from torchtitan import train
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.config.override import derive
from torchtitan.trainer import Trainer

from examples.integrations import torchtitan_training
from localckpt import LocalCheckpointManager
from localckpt.integrations.torchtitan import LocalCheckpoint, local_checkpoint
from tests.integrations.trainings import Run
from tests.managers.jobs import error_of

__all__ = ["kept_data", "refusals", "train_as_told", "train_by_example"]


def both() -> Trainer.Config:
    """The config of the example, with checkpoints in every second step, and torchtitan's own."""
    config = torchtitan_training.small()
    config.checkpoint = LocalCheckpoint.Config(
        enable=True, local_interval=2, interval=4, last_save_model_only=False
    )
    return config


def plain() -> Trainer.Config:
    """The same with torchtitan's own checkpoint manager, which is not enabled."""
    config = both()
    config.checkpoint = CheckpointManager.Config()
    return config


def train_as_told(run: Run, *options: str, config: str = "both") -> None:
    """Run torchtitan's command; the variables of ``torchrun`` say which rank this is."""
    seed = ["--debug.seed", "5"] if not run.is_new else []
    here = ["--module", "tests.integrations.torchtitan_runs", "--config", config]
    folder = run.local.parent / "titan"
    sys.argv[1:] = [*here, "--hf-assets-path", "/", "--dump-folder", f"{folder}", *seed, *options]
    if config == "both":
        sys.argv += ["--checkpoint.local", f"{run.local}"]
    _sleep_never()
    run.watch()
    train.main()


def train_by_example(rank: int, world_size: int, local: Path, last: int) -> int:
    """Run the example up to a step; how many steps it makes."""
    run = Run(rank, world_size, local)
    _sleep_never()
    run.watch()
    torchtitan_training.main(["--checkpoint.local", f"{local}", "--training.steps", f"{last}"])
    return len(run.noted)


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
