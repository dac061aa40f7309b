"""The loop of the README. Run it twice, alone or with `torchrun --nproc-per-node=2`: it resumes."""

import os
import sys

import torch
import torch.distributed as dist

import localckpt

if "RANK" in os.environ:
    dist.init_process_group("gloo")
world_size = os.environ.get("WORLD_SIZE", "1")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())

checkpointer = localckpt.Checkpointer(
    {"model": model, "optimizer": optimizer},
    local="/tmp/localckpt-minimal",
    session_id=f"{world_size}-ranks",
    every=localckpt.Every(steps=10),
)
start = checkpointer.resume()
print(f"starts at step {start}")
for step in range(start, start + 30):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if checkpointer.step(step):
        break
checkpointer.close()
if checkpointer.stopped:
    sys.exit(f"stopped: {checkpointer.stopped}")  # not 0, so that a scheduler starts it again
