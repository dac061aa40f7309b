"""Training loops over the front door whose losses tell whether they were resumed.

Data, dropout and shuffling draw random numbers, so a loss is the same bit for bit only if the
parameters, the optimizer, the schedule, the loader's position and all generators are.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

import localckpt
from tests.ranks import announce, node_store

Sharding = Literal["plain", "ddp", "fsdp2", "fsdp1"]

_WIDTH, _SAMPLES, _BATCH = 24, 40, 4


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
    if sharding == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
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
) -> tuple[int, list[str], str]:
    """Run the loop of the README; its first step, the losses from there on, and its weights."""
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
    with localckpt.Checkpointer(
        state, local=node_store(), timeout_s=60.0, **options
    ) as checkpointer:
        first, losses = checkpointer.resume(), []
        assert seen[0] == first * _BATCH
        for step in range(first, steps):
            batch = loader.next()
            loss = model(batch * random.uniform(0.5, 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen[0] += len(batch)
            losses.append(float(loss.item()).hex())
            time.sleep(step_s)
            if rank == 0:
                announce(f"step {step}")
            checkpointer.step(step)
    tensors = [*model.parameters(), *model.buffers()]
    # This rank's part of each.
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return first, losses, str([t.detach().reshape(-1).view(torch.uint8).tolist() for t in local])


def save_once(state: dict[str, Any], **options: Any) -> None:
    """Save one step of a training state, also to shared storage if there is one."""
    with localckpt.Checkpointer(state, **options) as checkpointer:
        checkpointer.step(checkpointer.resume())
        checkpointer.save(0, shared="shared" in options)


def resume_once(
    state: dict[str, Any], *, partial: bool = False, only: list[str] | None = None, **options: Any
) -> int:
    """First step of a start that resumes a training state, and does nothing more."""
    with localckpt.Checkpointer(state, **options) as checkpointer:
        return checkpointer.resume(partial=partial, only=only)


def stores(tmp_path: Path, count: int) -> list[Path]:
    return [tmp_path / f"node {number}" for number in range(count)]


def slow_down(root: Path, flag: Path, seconds: float, *, hangs: bool) -> None:
    """Have system calls below a directory take longer while ``flag`` is there.

    ``hangs`` is for all calls that change something; without it, for those that make it durable.
    """

    def is_slow(place: Any) -> bool:
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)
        return path.startswith(str(root)) and flag.exists()

    def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(place: Any, *args: Any, **options: Any) -> Any:
            if is_slow(place):
                time.sleep(seconds)
            return call(place, *args, **options)

        return slow

    changes = ("open", "rename", "unlink", "mkdir", "rmdir", "fsync", "pwrite")
    for name in changes if hangs else ("fsync",):
        setattr(os, name, slowed(getattr(os, name)))


# Lives of a loop, begun anew in the same process.

Tier = Literal["nodes", "shared"]
Losses = dict[str, str]


class Killed(BaseException):
    """Ends a life: nothing more is saved, and everything is left as it is."""


def lives(
    rank: int, program: Any, node: Path, tier: Tier, shared: Path | None = None
) -> tuple[Losses, Losses, int]:
    """The losses of a program that is never killed, and of one killed after each of its steps.

    Every life has objects of its own, with other random numbers than any other.
    """

    def live(local: Path, dies_after: int | None) -> tuple[Losses, bool]:
        losses: Losses = {}

        class Mortal(localckpt.Checkpointer):
            def resume(self, *args: Any, **kwargs: Any) -> int:
                if (first := super().resume(*args, **kwargs)) == 0:
                    # Of equal models each rank draws numbers of its own.
                    torch.manual_seed(100 + rank)
                    random.seed(rank)
                return first

            def step(self, *args: Any, **kwargs: Any) -> bool:
                is_to_stop = super().step(*args, **kwargs)
                self._steps = getattr(self, "_steps", 0) + 1
                if self._steps == dies_after:
                    self.wait_until_finished()
                    raise Killed
                return is_to_stop

        def note(key: str, value: Any) -> None:
            assert key not in losses
            losses[key] = torch.as_tensor(value, dtype=torch.double).item().hex()

        options: dict[str, Any] = {"local": local, "max_attempts": None}
        if tier == "shared":
            options |= {"shared": shared, "shared_every": 1}
        if dies_after is None:
            options = {"local": local, "every": 10**6}
        else:
            options["every"] = 1
        with mock.patch.object(localckpt, "Checkpointer", Mortal):
            try:
                program(note, **options)
            except Killed:
                return losses, True
        return losses, False

    # The first life of both runs has the same ones. What is drawn by others does not matter.
    torch.manual_seed(0)
    expected, is_killed = live(node / "whole", None)
    assert not is_killed
    found: Losses = {}
    count = 0
    while is_killed or count == 0:
        torch.manual_seed(count)
        local = node / (f"{count}" if tier == "shared" else "killed")
        losses, is_killed = live(local, 1)
        assert all(found.get(key, value) == value for key, value in losses.items())
        found |= losses
        count += 1
        if tier == "shared":
            shutil.rmtree(local)
    return expected, found, count
