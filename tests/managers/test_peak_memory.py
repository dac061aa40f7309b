"""How much memory saving and loading take beyond the state itself, as the kernel counts it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import localckpt
from tests.managers.jobs import MAX_S, make_manager
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

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


@pytest.mark.parametrize("cold", [False, True], ids=["cached", "cold"])
def test_on_disk_saving_takes_two_images_and_loading_in_place_none(
    cold: bool, node_dirs: Dirs
) -> None:
    (peaks,) = run_ranks(_measure, 1, "disk", cold, store_per_node=node_dirs(1))

    assert peaks["save"] < 2.05 * _STATE + _MARGIN
    assert peaks["load(into=)"] < _MARGIN
    assert _STATE - _MARGIN < peaks["load()"] < _STATE + _MARGIN


def test_in_memory_saving_takes_what_is_kept_and_one_more_and_loading_in_place_none(
    shm_roots: Dirs,
) -> None:
    (peaks,) = run_ranks(_measure, 1, "memory", False, store_per_node=shm_roots(1))

    assert peaks["save"] < 2.05 * _STATE + _MARGIN
    assert peaks["load(into=)"] < _MARGIN
    assert _STATE - _MARGIN < peaks["load()"] < _STATE + _MARGIN
