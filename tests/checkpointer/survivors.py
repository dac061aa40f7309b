"""A job of which processes are lost and come, and the others stay alive.

``worlds`` lists, for each life of the job, the processes (by their numbers) in the order of their
ranks. Who is in no later life is lost at the end of one, by SIGKILL in the middle of a step.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import localckpt
from tests.ranks import node_store

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


@dataclass
class Survivor:
    lives: list[Life] = field(default_factory=list)


def connect(prefix: str) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False))


def begin(life: int, world: Sequence[int], home: int, *, in_place: bool = False) -> None:
    if in_place:
        _change_in_place(life, world, home)
        return
    dist.init_process_group(
        "gloo",
        store=connect(f"life{life}"),
        rank=world.index(home),
        world_size=len(world),
        timeout=timedelta(seconds=30),
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


def make_state(*, sharded: bool, width: int = 64) -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
    if sharded:
        fully_shard(model)
    trained = model if sharded else torch.nn.parallel.DistributedDataParallel(model)
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


def read_nbytes() -> int:
    """Bytes that this process has read from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def train_through(
    home: int,
    world_size: int,
    digests: Path,
    worlds: Sequence[Sequence[int]],
    options: dict[str, Any],
    sharded: bool = False,
    width: int = 64,
    in_place: bool = False,
) -> Survivor:
    """Train through all lives; what it was at the end of each step is noted in ``digests``."""
    seen, checkpointer = Survivor(), None
    for number, world in enumerate(worlds):
        if home not in world:
            continue
        begin(number, world, home, in_place=in_place)
        state = make_state(sharded=sharded, width=width)
        rejoined, read_before = None, read_nbytes()
        if checkpointer is None:
            checkpointer = localckpt.Checkpointer(
                state,
                local=node_store(),
                every=SAVE_EVERY,
                on_resize="drop",
                timeout_s=20.0,
                **options,
            )
            first = checkpointer.resume()
        else:
            rejoined = checkpointer.rejoin(state)
            first = rejoined.step
        read = read_nbytes() - read_before
        known = digests / str(first - 1)
        is_as_saved = first == 0 or known.read_text() == digest(state)
        seen.lives.append(Life(dist.get_rank(), first, is_as_saved, rejoined, read))
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
                if is_lost and step == first + STEPS_OF_A_LIFE - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            if not is_last:
                # Somebody does not come.
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
