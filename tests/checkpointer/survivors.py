"""A job of which processes are lost and come, and the others stay alive.

``worlds`` lists, for each life of the job, the processes (by their numbers) in the order of their
ranks. Who is in no later life is lost at the end of one, by SIGKILL in the middle of a step.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import localckpt
from tests.checkpointer.loops import stores
from tests.ranks import DeadRank, node_store, run_ranks

STEPS_OF_A_LIFE = 7
SAVE_EVERY = 3


@dataclass
class Life:
    """One life of the job, as one process saw it."""

    rank: int
    first: int
    is_as_saved: bool
    rejoined: localckpt.Rejoined | None
    read_nbytes: int


def connect(prefix: str) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False))


def begin(
    life: int, world: Sequence[int], home: int, *, in_place: bool = False, limit_s: float = 30.0
) -> None:
    if in_place:
        _change_in_place(life, world, home)
        return
    dist.init_process_group(
        "gloo",
        store=connect(f"life{life}"),
        rank=world.index(home),
        world_size=len(world),
        timeout=timedelta(seconds=limit_s),
    )


def _change_in_place(life: int, world: Sequence[int], home: int) -> None:
    """Change the members of the process group, which a new process makes first."""
    store = connect("in place")
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=store, rank=home, world_size=len(world), enable_reconfigure=True
        )
    own = dist._get_reconfigure_handle()  # type: ignore[attr-defined]
    store.set(f"{life}.{home}", own)
    handles = [store.get(f"{life}.{other}").decode() for other in world]
    limit = timedelta(seconds=30)
    dist._reconfigure(life + 1, handles, timeout=limit).wait()  # type: ignore[attr-defined]


def make_state(shape: tuple[int, ...] = (), width: int = 64) -> dict[str, Any]:
    """A model sharded over a mesh of this shape, (-1,) for all ranks, or equal on all."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
    trained: torch.nn.Module = model
    if shape:
        sizes = shape if shape != (-1,) else (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(sizes) :]
        fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    else:
        trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    return {"model": trained, "optimizer": optimizer}


def train_step(state: dict[str, Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    state["model"](torch.randn(16, 8, generator=generator)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def digest(state: dict[str, Any]) -> str:
    """Digest of all values, whole, also where they are sharded: all ranks call it together."""
    hasher = hashlib.sha256()
    states = [state["model"].state_dict(), *state["optimizer"].state_dict()["state"].values()]
    for values in states:
        for name, value in values.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            hasher.update(f"{name.removeprefix('module.')} {whole.shape}".encode())
            hasher.update(whole.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def train_through(
    home: int,
    world_size: int,
    digests: Path,
    worlds: Sequence[Sequence[int]],
    options: dict[str, Any],
    shape: tuple[int, ...] = (),
    width: int = 64,
    in_place: bool = False,
    keep: Literal["live"] | None = None,
) -> list[Life]:
    """Train through all lives; what it was at the end of each step is noted in ``digests``."""
    seen, checkpointer, counters = list[Life](), None, psutil.Process().io_counters
    for number, world in enumerate(worlds):
        if home not in world:
            continue
        begin(number, world, home, in_place=in_place)
        state = make_state(shape, width)
        rejoined, read_before = None, counters().read_bytes
        if checkpointer is None:
            checkpointer = localckpt.Checkpointer(
                state,
                local=node_store(),
                every=SAVE_EVERY,
                on_resize="drop",
                timeout_s=20.0,
                **options,
            )
            if keep is not None:
                checkpointer.whole_step(state["optimizer"])
            first = checkpointer.resume()
        else:
            if keep is not None:
                checkpointer.whole_step(state["optimizer"])
            rejoined = checkpointer.rejoin(state, keep=keep)
            first = rejoined.step
        read = counters().read_bytes - read_before
        known = digests / str(first - 1)
        is_as_saved = first == 0 or known.read_text() == digest(state)
        seen.append(Life(dist.get_rank(), first, is_as_saved, rejoined, read))
        is_last = number == len(worlds) - 1
        is_lost = not is_last and not any(home in later for later in worlds[number + 1 :])
        try:
            for step in range(first, first + STEPS_OF_A_LIFE):
                train_step(state, step)
                now = digest(state)
                if dist.get_rank() == 0:
                    (digests / str(step)).write_text(now)
                checkpointer.step(step)
                if not is_last and step == first + STEPS_OF_A_LIFE - 2:
                    checkpointer.wait_until_finished()
            if not is_last:
                # All are cut off in the next step, before its gradients.
                state["model"](torch.ones(16, 8))
                if is_lost:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()
        except RuntimeError:
            assert not is_last
        if not is_last:
            checkpointer.abort()
        else:
            checkpointer.close()
        if is_last or not in_place:
            dist.destroy_process_group()
    return seen


def survive(
    worlds: list[list[int]],
    tmp_path: Path,
    shape: tuple[int, ...] = (),
    width: int = 64,
    in_place: bool = False,
    keep: Literal["live"] | None = None,
) -> dict[int, list[Life]]:
    """Run the job; the lives of each process that is not lost."""
    homes = 1 + max(home for world in worlds for home in world)
    digests = tmp_path / "digests"
    digests.mkdir()
    outcomes = run_ranks(
        *(train_through, homes, digests, worlds, {"replication_factor": 2}),
        *(shape, width, in_place, keep),
        init_group=False,
        store_per_node=stores(tmp_path / "nodes", homes),
        expect_dead=[home for home in range(homes) if home not in worlds[-1]],
        timeout_s=120.0,
    )
    return {n: seen for n, seen in enumerate(outcomes) if not isinstance(seen, DeadRank)}
