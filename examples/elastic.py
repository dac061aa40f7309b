"""The training script of the demo's last training: sharded over however many ranks there are.

The loop is that of `minimal.py`. A step takes the same batch whatever the number of ranks, and
there is no dropout, so that losses can be compared. Digests of the whole state are for the demo
alone.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor

import localckpt
from examples.journal import Journal, parse_options
from examples.model import GPT, Text

BATCH = 4


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # more would share the cores with the other ranks
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    journal = Journal(options.results / f"rank{rank}.jsonl", node=options.store.name)

    torch.manual_seed(0)
    model = GPT().shard().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = Text(0, 1, batch=BATCH)

    checkpointer = localckpt.Checkpointer(
        {"model": model, "optimizer": optimizer},
        local=options.store,
        every=localckpt.Every(steps=options.save_every),
        rng=False,
        timeout_s=30,
    )
    began = time.monotonic()
    start = checkpointer.resume()
    if start:
        report = checkpointer.manager.last_load
        assert report is not None, "it was loaded from the nodes"
        journal.write(
            "load",
            iteration=start - 1,
            nbytes=report.nbytes,
            source=report.source,
            seconds=time.monotonic() - began,
            digest=digest_of(model, optimizer),
        )

    for step in range(start, options.iterations):
        inputs, targets = text.batch_at(step)
        loss = model(inputs[rank::world_size], targets[rank::world_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
        if (step + 1) % options.save_every == 0:
            journal.write("digest", iteration=step, digest=digest_of(model, optimizer))
        checkpointer.step(step)
        journal.write("iteration", iteration=step, loss=loss.item())

    checkpointer.close()
    dist.destroy_process_group()


def digest_of(model: GPT, optimizer: torch.optim.AdamW) -> str:
    """Digest of all parameters and moments, gathered from the parts of all ranks."""
    hasher = xxhash.xxh3_128()
    for parameter in model.parameters():
        for value in (parameter, *dict(sorted(optimizer.state[parameter].items())).values()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            hasher.update(whole.detach().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


if __name__ == "__main__":
    main()
