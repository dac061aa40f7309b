"""Train with checkpoints on the nodes, often, and on shared storage, seldom; resume from the newer.

    torchrun --nproc-per-node 2 -m examples.two_tiers

Stop it at any time and run it again: it goes on, and once it has saved to shared storage also with
another number of ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import localckpt
from examples.model import GPT, Text


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.set_num_threads(1)  # more would share the cores with the other ranks
    dist.init_process_group("gloo")
    training = Training()

    # With more than one node, let the nodes keep copies for each other: repl_strategy=...
    local = localckpt.LocalCheckpointManager(options.local_root, "two-tiers")
    # local=: what one loads, the other's next checkpoints descend from.
    shared = localckpt.GlobalCheckpointManager(
        options.shared_root, "two-tiers", keep_last=2, local=local
    )
    with local, shared, localckpt.AsyncCallsQueue() as queue:
        last = resume(training, local, shared)
        for iteration in range(last + 1, options.iterations):
            loss = training.step(iteration)
            done = iteration + 1
            if done % options.local_every == 0:
                request = local.save(training.state_dict(), iteration, is_async=True)
                queue.schedule_async_request(request)
            if done % options.shared_every == 0 or done == options.iterations:
                shared.save({"training": training}, iteration, is_async=True)
            queue.maybe_finalize_async_calls()  # raises what a local save failed with
            shared.check_for_errors()  # and what the last global one did
            if done % options.local_every == 0:
                say(f"{done} of {options.iterations} iterations, loss {loss:.3f}")
    dist.destroy_process_group()


def resume(
    training: Training,
    local: localckpt.LocalCheckpointManager,
    shared: localckpt.GlobalCheckpointManager,
) -> int:
    """Take the newer of the two checkpoints, its iteration; ``-1`` if there is none."""
    on_shared = shared.find_latest()
    try:
        if local.find_latest() >= max(on_shared, 0):
            state, ckpt_id = local.load()
            # A damaged checkpoint makes way for the one before, which may be too old.
            if ckpt_id.iteration >= on_shared:
                training.load_state_dict(state)
                say(f"goes on after iteration {ckpt_id.iteration}, from the nodes")
                return ckpt_id.iteration
    except (localckpt.MismatchError, localckpt.NoReplicasAvailableError) as error:
        # It is of another number of ranks, or no node has it whole. With nothing on shared storage
        # either, that is for people to decide.
        if on_shared < 0:
            raise
        say(f"the nodes' checkpoints are left: {error}")
    if on_shared < 0:
        return -1
    _, ckpt_id = shared.load(into={"training": training})
    say(f"goes on after iteration {ckpt_id.iteration}, from shared storage")
    return ckpt_id.iteration


class Training:
    """A GPT and its optimizer, sharded by FSDP, and the text that it learns."""

    def __init__(self) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self._world_size,))
        torch.manual_seed(0)  # all ranks start from the same weights
        self._model = GPT()
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._text = Text(self._rank, self._world_size)

    def step(self, iteration: int) -> float:
        """Learn from one batch; the loss."""
        # So what dropout draws is known from the iteration, and no checkpoint need hold it.
        torch.manual_seed(iteration * self._world_size + self._rank)
        loss = self._model(*self._text.next_batch())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())

    def state_dict(self) -> dict[str, Any]:
        """What both tiers save: names as without FSDP, and DTensors that know their sharding."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "position": self._text.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self._text.position = state["position"]


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    folder = "/tmp/localckpt-two-tiers"
    parser.add_argument("--local-root", default=f"{folder}/local", help="a disk of this node")
    parser.add_argument("--shared-root", default=f"{folder}/shared", help="storage of all nodes")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--local-every", type=int, default=5)
    parser.add_argument("--shared-every", type=int, default=20)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
