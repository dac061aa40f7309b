"""A loop that is written for NVRx, on local checkpoints in its place. Run it twice: it resumes.

python -m localckpt.integrations.nvrx run -m torch.distributed.run --nproc-per-node 2 \
  -m examples.integrations.nvrx_training
"""

import argparse

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)


def main(local: str, iterations: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    manager = LocalCheckpointManager(local)
    queue = AsyncCallsQueue(persistent=True)

    first = manager.find_latest() + 1
    if first > 0:
        loaded, _ = manager.load()
        model.load_state_dict(loaded.state_dict["model"])
        optimizer.load_state_dict(loaded.state_dict["optimizer"])

    for iteration in range(first, iterations):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        queue.maybe_finalize_async_calls(blocking=False)
        if iteration % 4 == 3:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saving = manager.save(BasicTensorAwareStateDict(state), iteration, is_async=True)
            queue.schedule_async_request(saving)

    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    if dist.get_rank() == 0:
        print(f"trained iteration {first} to iteration {iterations - 1}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/tmp/localckpt-nvrx")
    parser.add_argument("--iterations", type=int, default=20, help="more than the last time")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    main(arguments.directory, arguments.iterations)
    dist.destroy_process_group()
