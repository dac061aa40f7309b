"""The training script that `torchrun` runs on every node of the demo.

`main` is the whole loop of a user: make the job, resume, train, save. The journal and the result
file are for the demo's table only.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import localckpt
from examples.journal import Journal, fields, parse_options
from examples.model import GPT, ShardedAdamW, Text


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # more would share the cores with the other ranks
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    journal = Journal(options.results / f"rank{rank}.jsonl", node=options.store.name)

    torch.manual_seed(0)  # all ranks start from the same weights
    model = GPT()
    optimizer = ShardedAdamW(model, lr=1e-3)
    text = Text(rank, world_size)
    losses: list[float] = []
    torch.manual_seed(1 + rank)  # and each draws its own dropout

    def state_dict() -> dict[str, Any]:
        return {
            "optimizer": optimizer.state_dict(),
            "position": text.position,
            "rng": torch.get_rng_state(),
            "losses": losses,
        }

    # Each rank and one on the other node hold each other's shards.
    replication = localckpt.CliqueReplicationStrategy.from_replication_params(replication_factor=2)
    manager: localckpt.CheckpointManager
    if options.tier == "disk":
        manager = localckpt.LocalCheckpointManager(options.store, "demo", replication, timeout=30)
    else:
        manager = localckpt.InMemoryCheckpointManager(
            "demo", replication, root=options.store, timeout=30
        )
    queue = localckpt.AsyncCallsQueue()

    start = 0
    began = time.monotonic()
    if manager.find_latest() >= 0:
        found = time.monotonic()
        state, ckpt_id = manager.load()
        optimizer.load_state_dict(state["optimizer"])
        text.position = state["position"]
        torch.set_rng_state(state["rng"])
        losses = state["losses"]
        start = ckpt_id.iteration + 1
        journal.write("load", find_latest_s=found - began, **fields(manager.last_load))

    for iteration in range(start, options.iterations):
        loss = model(*text.next_batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if iteration % options.save_every == 0:
            request = manager.save(state_dict(), iteration, is_async=True)
            queue.schedule_async_request(request)
        if queue.maybe_finalize_async_calls(blocking=False):
            journal.write("save", **fields(manager.last_save))
        journal.write("iteration", iteration=iteration, loss=losses[-1])

    if queue.maybe_finalize_async_calls(blocking=True):
        journal.write("save", **fields(manager.last_save))
    queue.close()
    manager.close()
    torch.save(state_dict(), options.results / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
