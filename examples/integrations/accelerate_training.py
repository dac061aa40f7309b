"""Accelerate on local checkpoints. Run it twice, alone or with `torchrun`: it resumes."""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

from localckpt import Every
from localckpt.integrations.accelerate import LocalCheckpoints


def main(local: str, epochs: int, **loading: bool) -> None:
    configuration = DataLoaderConfiguration(**loading)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=configuration
    )
    samples = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(52 * accelerator.num_processes, 8, generator=samples))
    layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    model = accelerator.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader, optimizer, schedule = accelerator.prepare(
        DataLoader(data, batch_size=4, shuffle=True), optimizer, schedule
    )
    with LocalCheckpoints(accelerator, local=local, every=Every(steps=4)) as checkpoints:
        for _ in checkpoints.epochs(epochs):
            for (batch,) in checkpoints.batches(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        print(f"trained up to step {checkpoints.steps}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/tmp/localckpt-accelerate", epochs=4)
