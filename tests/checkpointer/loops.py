"""Training loops over the front door whose losses tell whether they were resumed.

Data, dropout and shuffling draw random numbers, so a loss is the same bit for bit only if the
parameters, the optimizer, the schedule, the loader's position and all generators are.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import localckpt
from tests.ranks import announce, node_store

__all__ = ["Loader", "Outcome", "Part", "Sharding", "full_weights", "save_once", "stores", "train"]

Sharding = Literal["plain", "ddp", "fsdp2", "fsdp1", "hsdp"]

_WIDTH, _SAMPLES, _BATCH = 24, 40, 4


@dataclass
class Outcome:
    """What one rank's loop has done: its first step, the losses from there on, and its end."""

    first: int
    losses: list[str] = field(default_factory=list)
    stopped: str | None = None
    last: int = -1
    weights: str = ""
    buffers: str = ""


class Part:
    """A part of a training state, of one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Loader:
    """Batches in an order that is shuffled anew in each epoch, and a position in it."""

    def __init__(self, rank: int) -> None:
        self._data = torch.randn(
            _SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(1 + rank)
        )
        self._order: list[int] = []
        self._generator = torch.Generator().manual_seed(100 + rank)

    def next(self) -> torch.Tensor:
        if not self._order:
            self._order = torch.randperm(_SAMPLES, generator=self._generator).tolist()
        batch, self._order = self._order[:_BATCH], self._order[_BATCH:]
        return self._data[batch]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self._order), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = state["order"]
        self._generator.set_state(state["generator"])


def make_model(sharding: Sharding) -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(2)]
    model = torch.nn.Sequential(
        layers[0], torch.nn.BatchNorm1d(_WIDTH), torch.nn.Dropout(0.1), layers[1]
    )
    # Tied: one parameter under two names.
    model.append(torch.nn.Linear(_WIDTH, _WIDTH))
    model[4].weight = layers[0].weight
    if sharding == "ddp":
        # Else DDP makes its buckets anew after the first step of each process, and gloo sums in
        # another order where a gradient lies elsewhere: steps would differ by rounding.
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if sharding in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        replicas = 2 if sharding == "hsdp" else 1
        sizes = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh if sharding == "hsdp" else mesh["shards"])
    if sharding == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return model


def train(
    rank: int,
    world_size: int,
    sharding: Sharding,
    steps: int,
    options: dict[str, Any],
    step_s: float = 0.0,
) -> Outcome:
    """Run the loop of the README; it announces ``step <n>`` on rank 0."""
    # What is drawn before the state is loaded must not matter.
    random.seed(time.time_ns())
    model = make_model(sharding)
    torch.manual_seed(rank)
    random.seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    loader, seen = Loader(rank), [0]
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "seen": (lambda: seen[0], lambda value: seen.__setitem__(0, value)),
    }
    with _checkpointer(state, options) as checkpointer:
        outcome = Outcome(checkpointer.resume())
        assert seen[0] == outcome.first * _BATCH
        for step in range(outcome.first, steps):
            batch = loader.next()
            loss = model(batch * random.uniform(0.5, 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen[0] += len(batch)
            outcome.losses.append(float(loss.item()).hex())
            time.sleep(step_s)
            outcome.last = step
            if rank == 0:
                announce(f"step {step}")
            if checkpointer.step(step):
                outcome.stopped = checkpointer.stopped
                break
    outcome.weights = _bytes_of(model.parameters())
    outcome.buffers = _bytes_of(model.buffers())
    return outcome


def full_weights(
    rank: int, world_size: int, options: dict[str, Any], sharding: Sharding = "fsdp2"
) -> str:
    """The step that a sharded job resumes at, and its whole parameters and moments; or an error."""
    model = make_model(sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Loader(rank),
        "seen": (lambda: 0, lambda _: None),
    }
    try:
        with _checkpointer(state, options) as checkpointer:
            first = checkpointer.resume()
            moments = [values["exp_avg"] for values in optimizer.state.values()]
            whole = [tensor.full_tensor() for tensor in [*model.parameters(), *moments]]  # type: ignore[attr-defined]
            texts = [str(tensor.flatten().tolist()) for tensor in whole]
            return f"{first} {scheduler.last_epoch} {texts}"
    except localckpt.MismatchError as error:
        return str(error)


@contextlib.contextmanager
def _checkpointer(
    state: dict[str, Any], options: dict[str, Any]
) -> Iterator[localckpt.Checkpointer]:
    options = {"timeout_s": 60.0} | options
    with localckpt.Checkpointer(state, local=node_store(), **options) as checkpointer:
        yield checkpointer


def _bytes_of(tensors: Iterable[torch.Tensor]) -> str:
    """This rank's part of some tensors, as text."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return "".join(bytes(t.detach().reshape(-1).view(torch.uint8).tolist()).hex() for t in local)


def save_once(state: dict[str, Any], **options: Any) -> None:
    """Save one step of a training state, also to shared storage if there is one."""
    with localckpt.Checkpointer(state, **options) as checkpointer:
        checkpointer.step(checkpointer.resume())
        checkpointer.save(0, shared="shared" in options)


def stores(tmp_path: Path, count: int) -> list[Path]:
    return [tmp_path / f"node {number}" for number in range(count)]
