"""The loop of the README. Run it twice, alone or with `torchrun --nproc-per-node=2`: it resumes."""

import os

import torch
import torch.distributed as dist

import localckpt

if "RANK" in os.environ:
    dist.init_process_group("gloo")
world_size = os.environ.get("WORLD_SIZE", "1")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())

directory, session = "/tmp/localckpt-minimal", f"{world_size}-ranks"
manager = localckpt.LocalCheckpointManager(directory, session)
with manager, localckpt.AsyncCallsQueue() as queue:
    start = 0
    if manager.find_latest() >= 0:
        state, ckpt_id = manager.load()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = ckpt_id.iteration + 1
    print(f"starts at iteration {start}")
    for iteration in range(start, start + 30):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if iteration % 10 == 9:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            queue.schedule_async_request(manager.save(state, iteration, is_async=True))
        queue.maybe_finalize_async_calls()
