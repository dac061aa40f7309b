"""Loops with Accelerate whose losses tell whether they were resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import DataLoaderShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from localckpt import CheckpointingException, Every
from localckpt.integrations.accelerate import LocalCheckpoints
from tests.integrations.trainings import Run
from tests.ranks import node_store

__all__ = ["can_resume_stateful_loaders", "refuse_miscounted", "train", "wrong_uses"]

_COUNTS = "adjust_state_dict_for_prefetch"

# An epoch of one rank has 6 steps of 2 batches, and one of the last batch.
_SAMPLES_OF_RANK = 26


class _Count:
    """An object of the program's own, registered with the accelerator."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def train(run: Run, loading: dict[str, bool] | None = None, is_sharded: bool = False) -> list[Any]:
    """Train a model, as far as this run gets.

    Args:
        run: Notes the losses of batches, and a random number after each epoch.
        loading: How the accelerator loads data.
        is_sharded: Whether FSDP2 shards the model.
    """
    # Known to all ranks, since Accelerate has the first one's order of the batches for all.
    run.seed(0)
    accelerator, loader, model, optimizer, schedule = _prepared(
        run.world_size, loading or {}, is_sharded=is_sharded
    )
    count = _Count()
    accelerator.register_for_checkpointing(count)
    torch.manual_seed(run.rank)
    with LocalCheckpoints(
        accelerator, local=run.local, every=Every(steps=run.every), max_attempts=None
    ) as checkpoints:
        for epoch in checkpoints.epochs(3):
            for batch, (samples,) in enumerate(checkpoints.batches(loader), start=count.samples):
                run.may_end(batch, checkpoints.checkpointer)
                with accelerator.accumulate(model):
                    loss = model(samples).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                count.samples += 1
                run.note(batch, samples.sum().item(), loss.item())
            if checkpoints.stopped is None:
                run.note(f"epoch {epoch}", torch.rand(()).item())
    run.is_stopped = checkpoints.stopped is not None
    total = sum(float(_local(p).double().abs().sum()) for p in model.parameters())
    return [count.samples, total.hex(), checkpoints.steps]


def wrong_uses(rank: int, world_size: int) -> list[str]:
    """Use local checkpoints in ways that are wrong; the errors that this raises."""
    told = []
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)))

    def attempt(fn: Callable[[LocalCheckpoints], Any]) -> None:
        try:
            with LocalCheckpoints(accelerator, local=node_store()) as checkpoints:
                fn(checkpoints)
        except CheckpointingException as error:
            told.append(str(error))

    attempt(lambda checkpoints: next(checkpoints.epochs(1)))
    attempt(lambda checkpoints: next(checkpoints.batches(loader)))
    return told


def can_resume_stateful_loaders() -> bool:
    """Whether this release notes the position of stateful loaders on several ranks as it is."""
    return _COUNTS in vars(DataLoaderShard)


def refuse_miscounted(rank: int, world_size: int) -> str:
    """Begin a loop with a stateful loader of an older release; the error that this raises."""
    if can_resume_stateful_loaders():
        delattr(DataLoaderShard, _COUNTS)
    try:
        run = Run(rank, world_size, node_store() / "miscounted")
        train(run, loading={"use_stateful_dataloader": True})
    except CheckpointingException as error:
        return str(error)
    return "no error"


def _prepared(world_size: int, loading: dict[str, bool], *, is_sharded: bool) -> tuple[Any, ...]:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(**loading),
    )
    layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    model: Any = torch.nn.Sequential(*layers)
    if is_sharded:
        # Accelerate leaves its plugin for FSDP out where ranks have no accelerators.
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model = accelerator.prepare_model(model, evaluation_mode=is_sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    generator = torch.Generator().manual_seed(100)
    data = TensorDataset(torch.randn(_SAMPLES_OF_RANK * world_size, 4, generator=generator))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    loader, optimizer, schedule = accelerator.prepare(loader, optimizer, schedule)
    return accelerator, loader, model, optimizer, schedule


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
