"""What saves and loads take: a fixed number of images, and no more after very many saves."""

from __future__ import annotations

import os
import re
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
from tests.managers.jobs import MAX_S, Dirs, assert_same, in_job, make_manager
from tests.ranks import node_store, run_ranks

_NUMEL = 500_000


@dataclass(frozen=True)
class _Held:
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
    with in_job(kind=kind, keep_last=1) as (manager, queue):
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
@pytest.mark.parametrize(("kind", "polls_every"), [("disk", 1), ("memory", 7)])
@pytest.mark.parametrize("saves", [48, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.timeout(2400)
def test_saves_at_every_step_hold_no_more_at_the_end_than_at_the_beginning(
    saves: int, kind: str, polls_every: int, node_dirs: Dirs, shm_roots: Dirs
) -> None:
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


_MIB = 1 << 20
_STATE = 256 * _MIB
# Threads' stacks, the skeleton, the bounce buffer of cold reads.
_MARGIN = 64 * _MIB


def _status(field: str) -> int:
    (kib,) = re.findall(
        rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return int(kib) << 10


def _peak_of(call: Callable[[], object]) -> int:
    """Bytes by which a call's peak exceeds what was resident before."""
    before = _status("VmRSS")
    # Has the kernel begin anew with the peak.
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return _status("VmHWM") - before


def _measure(rank: int, world_size: int, kind: str, cold: bool) -> dict[str, float]:
    """Peaks in sizes of the state."""
    state = {f"w{i}": torch.ones(_STATE // 32) for i in range(8)}
    with (
        make_manager(kind, node_store()) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):

        def save() -> None:
            for iteration in range(4):
                queue.schedule_async_request(manager.save(state, iteration, is_async=True))
                if kind == "memory":
                    # Until then older ones are kept, too.
                    queue.maybe_finalize_async_calls(blocking=True)
            queue.maybe_finalize_async_calls(blocking=True)

        saving = _peak_of(save)
    if cold:
        for path in node_store().rglob("*.safetensors"):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    with make_manager(kind, node_store()) as manager:
        assert manager.find_latest() == 3
        in_place = _peak_of(lambda: manager.load(into=state))
        new = _peak_of(manager.load)
    return {"save": saving, "load(into=)": in_place, "load()": new}


@pytest.mark.parametrize(("kind", "cold"), [("disk", False), ("disk", True), ("memory", False)])
def test_saving_takes_two_images_and_loading_in_place_none(
    kind: str, cold: bool, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(1)

    (peaks,) = run_ranks(_measure, 1, kind, cold, store_per_node=nodes)

    # In memory those are what is kept and one more.
    assert peaks["save"] < 2.05 * _STATE + _MARGIN
    assert peaks["load(into=)"] < _MARGIN
    assert _STATE - _MARGIN < peaks["load()"] < _STATE + _MARGIN
