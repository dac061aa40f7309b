"""Training of one rank, which a launcher runs as a module; no rank keeps another one's shard."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import localckpt

STEPS = 40


def main(node: str) -> None:
    dist.init_process_group("gloo")
    tensor, rank, values = torch.zeros(1 << 18), dist.get_rank(), torch.nn.Module()
    values.register_buffer("tensor", tensor)
    checkpointer = localckpt.Checkpointer(
        {"values": values}, local=node, every=4, replication_factor=1, keep_last=3
    )
    first = checkpointer.resume()
    for step in range(first, STEPS):
        assert (tensor == (step + rank if step else 0)).all(), "as it was saved"
        tensor.fill_(step + 1 + rank)
        checkpointer.step(step)
        time.sleep(0.1)
        # Notices a rank that is lost.
        dist.barrier()
    checkpointer.close()
    dist.destroy_process_group()
    print(f"rank {rank} trained from step {first} to the end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
