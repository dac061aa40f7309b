"""Lightning on local checkpoints. Run it twice, alone or with `torchrun`: it resumes."""

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from localckpt import Every
from localckpt.integrations.lightning import LocalCheckpoint


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        self.layers = torch.nn.Sequential(*layers)

    def configure_model(self) -> None:
        # Of a strategy that shards, such as ModelParallelStrategy.
        if self.device_mesh is not None:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(local: str, epochs: int, strategy: Any = "auto") -> None:
    data = TensorDataset(torch.randn(60, 8, generator=torch.Generator().manual_seed(0)))
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=strategy,
        callbacks=[
            EarlyStopping("validation_loss", patience=epochs),
            LocalCheckpoint(local=local, every=Every(steps=5)),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Regression(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
    )
    print(f"trained up to step {trainer.global_step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/tmp/localckpt-lightning")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    main(arguments.directory, arguments.epochs)
