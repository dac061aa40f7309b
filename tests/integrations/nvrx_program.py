"""Program that is written for NVRx, and records its losses: ``nvrx_program.py DIRECTORY``.

Each rank has a directory of its own in place of a node's disk, and keeps a copy of the other's
shard.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)

from tests.integrations.kills import record, record_end

_ITERATIONS = 80


def train(rank: int, directory: Path) -> None:
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    replicas = CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = LocalCheckpointManager(str(directory / f"node{rank}"), repl_strategy=replicas)
    queue = AsyncCallsQueue(persistent=True)

    first = manager.find_latest() + 1
    if first > 0:
        loaded = manager.load()[0].state_dict
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])
        torch.set_rng_state(loaded["rng"])

    for iteration in range(first, _ITERATIONS):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        record(iteration, loss.item(), rank)
        queue.maybe_finalize_async_calls(blocking=False)
        if iteration % 3 == 2:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            }
            request = manager.save(BasicTensorAwareStateDict(state), iteration, is_async=True)
            queue.schedule_async_request(request)

    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    record_end([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], rank)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), Path(sys.argv[1]))
    dist.destroy_process_group()
