"""Lightning on local checkpoints. Run it twice, alone or with `torchrun`: it resumes."""

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from localckpt import Every
from localckpt.integrations.lightning import LocalCheckpoint


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def main(local: str, epochs: int) -> None:
    data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4, shuffle=True)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        callbacks=[LocalCheckpoint(local=local, every=Every(steps=5))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data)
    print(f"trained up to step {trainer.global_step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/tmp/localckpt-lightning")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    main(arguments.directory, arguments.epochs)
