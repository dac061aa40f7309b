"""A training program with a data loader's workers, to be stopped by a signal to all processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import localckpt


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = TensorDataset(torch.ones(100_000, 4))
    loader = iter(DataLoader(data, num_workers=2, worker_init_fn=localckpt.worker_init_fn))
    state = {"model": model, "optimizer": optimizer}
    places = {"local": folder / str(dist.get_rank()), "shared": folder / "shared"}
    with localckpt.Checkpointer(state, **places, every=100_000, grace_s=10.0) as checkpointer:
        first = checkpointer.resume()
        print(f"resumed {first}", flush=True)
        for step in range(first, first + 10_000):
            (batch,) = next(loader)
            model(batch).sum().backward()
            dist.barrier()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            print(f"step {step}", flush=True)
            if checkpointer.step(step):
                print(f"stopped {step}", flush=True)
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
