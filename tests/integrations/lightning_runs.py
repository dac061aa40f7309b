"""Runs of Lightning's ``Trainer`` whose losses tell whether they were resumed."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from localckpt import CheckpointingException, Every
from localckpt.integrations.lightning import LocalCheckpoint
from tests.integrations.trainings import Run
from tests.ranks import node_store

__all__ = ["fit", "refuse_a_path"]

_EPOCHS, _BATCHES = 4, 7


class _Model(LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
        self._is_sharded = False
        self._run = run
        self.tokens = 0

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self._is_sharded:
            assert self.device_mesh is not None
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
            self._is_sharded = True

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        total = self.trainer.fit_loop.total_batch_idx
        loss = self.layers(batch[0]).square().mean()
        self.tokens += len(batch[0])
        self._run.note(total, batch[0].sum().item(), loss.item())
        self._run.may_end(total, self.trainer.callbacks[-1].checkpointer)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokens"] = self.tokens

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokens = checkpoint["tokens"]


class _CountValidations(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.count += not trainer.sanity_checking

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def fit(run: Run, is_sharded: bool = False) -> list[int]:
    """Fit a model, as far as this run gets; FSDP2 shards it, or it is in DDP on two ranks.

    Returns:
        The samples that were seen, and the validations that were made.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run.seed(run.rank)
    generator = torch.Generator().manual_seed(100 + run.rank)
    samples = torch.randn(2 * _BATCHES, 4, generator=generator)
    model, validations = _Model(run), _CountValidations()
    callbacks = [validations, _checkpoints(run.local, run.every)]
    trainer = _trainer(run.world_size, callbacks, is_sharded=is_sharded)
    trainer.fit(
        model,
        DataLoader(TensorDataset(samples), batch_size=2, shuffle=True),
        DataLoader(TensorDataset(torch.ones(2, 4)), batch_size=2),
    )
    run.is_stopped = bool(trainer.should_stop)
    return [model.tokens, validations.count]


def refuse_a_path(rank: int, world_size: int) -> str:
    """Fit twice, the second time from a file of Lightning's; the error that this raises."""
    run = Run(rank, world_size, node_store() / "refused")
    run.local.mkdir()
    file = run.local / "lightning.ckpt"
    data = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    trainer = _trainer(1, [_checkpoints(run.local, 1)])
    trainer.fit(_Model(run), data)
    trainer.save_checkpoint(file)
    try:
        _trainer(1, [_checkpoints(run.local, 1)]).fit(_Model(run), data, ckpt_path=file)
    except CheckpointingException as error:
        return str(error)
    return "no error"


def _checkpoints(local: Path, every: int) -> LocalCheckpoint:
    # An attempt that is killed before its first save is one in vain.
    return LocalCheckpoint(local=local, every=Every(steps=every), max_attempts=None)


def _trainer(world_size: int, callbacks: list[Callback], *, is_sharded: bool = False) -> Trainer:
    strategy: Any = "auto"
    if is_sharded:
        strategy = ModelParallelStrategy(world_size, tensor_parallel_size=1)
    elif world_size > 1:
        # Without the option DDP rounds the first step of a process in another way.
        strategy = DDPStrategy(find_unused_parameters=True)
    return Trainer(
        max_epochs=_EPOCHS,
        accelerator="cpu",
        devices=world_size,
        # The loader of each rank draws the order of its own samples.
        use_distributed_sampler=False,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()] if world_size > 1 else [],
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
