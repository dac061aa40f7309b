"""Accelerate on local checkpoints. Run it twice, alone or with `torchrun`: it resumes."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from localckpt import Every
from localckpt.integrations.accelerate import LocalCheckpoints


def main(local: str, epochs: int) -> None:
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.randn(32 * accelerator.num_processes, 8))
    model = torch.nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4, shuffle=True)
    )
    with LocalCheckpoints(accelerator, local=local, every=Every(steps=4)) as checkpoints:
        for _ in checkpoints.epochs(epochs):
            for (samples,) in checkpoints.batches(loader):
                accelerator.backward(model(samples).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        print(f"trained up to step {checkpoints.steps}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/tmp/localckpt-accelerate", epochs=4)
