"""Very many saves in one life: memory, descriptors, threads, shared memory and keys stay flat."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import localckpt
from tests.managers.jobs import KINDS, MAX_S, assert_same, cliques, make_manager
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

_NUMEL = 500_000


@dataclass(frozen=True)
class _Held:
    """What one rank holds at one time."""

    resident: int
    descriptors: int
    threads: int
    on_node: int
    keys: int

    @classmethod
    def now(cls) -> _Held:
        on_node = 0
        for path in node_store().rglob("*"):
            # A save that is under way may rename it meanwhile.
            with suppress(FileNotFoundError):
                on_node += path.stat().st_size if path.is_file() else 0
        return cls(
            psutil.Process().memory_full_info().uss,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            on_node,
            _get_default_store().num_keys(),
        )


def _state(rank: int, iteration: int) -> dict[str, object]:
    return {"w": torch.full((_NUMEL,), float(iteration + rank)), "iteration": iteration}


def _save_on_and_on(
    rank: int, world_size: int, kind: str, saves: int, polls_every: int
) -> list[_Held]:
    held: list[_Held] = []
    with (
        cliques(1, 2) as replicas,
        make_manager(kind, node_store(), "job", replicas, keep_last=1) as manager,
        localckpt.AsyncCallsQueue(timeout_s=3 * MAX_S) as queue,
    ):
        for iteration in range(saves):
            queue.schedule_async_request(
                manager.save(_state(rank, iteration), iteration, is_async=True)
            )
            if iteration % polls_every == 0:
                queue.maybe_finalize_async_calls()
            # Training keeps the ranks together.
            dist.all_reduce(torch.ones(1))
            if (iteration + 1) % (saves // 4) == 0:
                dist.barrier()
                held.append(_Held.now())
                dist.barrier()
        queue.wait_until_finished()
        assert manager.find_latest() == saves - 1
        assert_same(manager.load()[0], _state(rank, saves - 1))
    return held


@pytest.mark.fault("many-saves")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("polls_every", [1, 7], ids=["polled each time", "polled rarely"])
def test_saves_at_every_step_hold_no_more_at_the_end_than_at_the_beginning(
    kind: str, polls_every: int, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    _check(kind, 48, polls_every, node_dirs, shm_roots)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.fault("many-saves")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("polls_every", [1, 7], ids=["polled each time", "polled rarely"])
def test_two_thousand_saves_hold_no_more_at_the_end_than_at_the_beginning(
    kind: str,
    polls_every: int,
    node_dirs: Dirs,
    shm_roots: Dirs,
    record_property: Callable[[str, object], None],
) -> None:
    _check(kind, 2000, polls_every, node_dirs, shm_roots)
    record_property("cases", 2000)


def _check(kind: str, saves: int, polls_every: int, node_dirs: Dirs, shm_roots: Dirs) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)

    told = run_ranks(
        *(_save_on_and_on, 2, kind, saves, polls_every),
        store_per_node=nodes,
        timeout_s=60.0 + saves,
    )

    image = 4 * _NUMEL
    for held in told:
        first, last = held[0], held[-1]
        print(*(astuple(h) for h in held), sep="\n")
        # Less than ten of the saves' images and replicas.
        assert last.resident - first.resident < 20 * image
        assert last.descriptors <= first.descriptors + 4
        assert last.threads <= first.threads + 3
        # Own shard and replica: one checkpoint that is kept, two in flight, one ahead of time.
        assert max(h.on_node for h in held) <= 2 * 4.5 * image
        assert last.keys <= first.keys + 20
