"""How long a restart reads: into tensors that exist, and into new ones; warm and cold."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import localckpt
from benchmarks.limits import (
    drop_from_page_cache,
    read_direct_s,
    read_warm_into_new_memory_s,
    read_warm_s,
    settle,
)
from benchmarks.report import Report, compare
from benchmarks.setup import Options, Setting, largest_file, make_setting
from benchmarks.state import flat_tensors, state_tensors
from localckpt.memory.digests import BlockHasher

__all__ = ["measure"]

_VERIFYING_GOAL = 1.1


def measure(options: Options) -> Report:
    """Ours beside a raw read of the same file, then the usual ways beside a read of theirs."""
    report = Report("load", options.state)
    setting = make_setting(options)
    root = options.directory / "ours"
    with localckpt.LocalCheckpointManager(root) as manager:
        manager.save(setting.state, 0)
    shard = largest_file(root)
    finding: list[float] = []
    ours: list[tuple[str, Path, Callable[[], float]]] = [
        ("load(into=state)", shard, lambda: _load_ours_s(root, setting.state, finding)),
        ("load()", shard, lambda: _load_ours_s(root, None, finding)),
    ]
    usual = _usual_ways(setting, options.directory)
    settle()
    reused = "preadv, 2 threads"
    for name, path, load in ours + usual:
        limit = partial(read_warm_s, path, setting.buffer)
        limit()
        _compare(report, options, f"warm: {name}", path, (reused, limit), load, path == shard)
    name, path, load = ours[-1]
    new = (f"{reused}, into new memory", partial(read_warm_into_new_memory_s, path))
    _compare(report, options, f"warm: {name}", path, new, load, True)
    for name, path, load in ours + usual:
        direct = partial(_from_disk_s, path, partial(read_direct_s, path, setting.buffer))
        load = partial(_from_disk_s, path, load)
        named = ("O_DIRECT, 4 threads", direct)
        _compare(report, options, f"cold: {name}", path, named, load, path == shard)
    _measure_verifying(report, setting, root, shard, options)
    report.fact("find_latest", 1e3 * sorted(finding)[len(finding) // 2], "ms", "median")
    return report


def _measure_verifying(
    report: Report, setting: Setting, root: Path, shard: Path, options: Options
) -> None:
    """What of a load is verifying: the same load with the check of blocks taken out."""

    def without_verifying(load: Callable[[], float]) -> float:
        check = BlockHasher.check
        # From outside, since there is no option to leave it out.
        BlockHasher.check = lambda *_: None  # type: ignore[method-assign]
        try:
            return load()
        finally:
            BlockHasher.check = check  # type: ignore[method-assign]

    def load_s() -> float:
        return _load_ours_s(root, setting.state, [])

    ways: list[tuple[str, Callable[[], float]]] = [
        ("warm", load_s),
        ("cold", partial(_from_disk_s, shard, load_s)),
    ]
    for name, load in ways:
        # What was read past the page cache is not in it.
        read_warm_s(shard, setting.buffer)
        load()
        comparison = report.compared(
            f"{name}: load(into=state), verified",
            "the same, not verified",
            shard.stat().st_size,
            _VERIFYING_GOAL,
        )
        compare(options.rounds, partial(without_verifying, load), [(comparison, load)])


def _compare(
    report: Report,
    options: Options,
    name: str,
    path: Path,
    limit: tuple[str, Callable[[], float]],
    load: Callable[[], float],
    is_ours: bool,
) -> None:
    target = (1.25 if "into=" in name else 1.5) if is_ours else None
    comparison = report.compared(name, limit[0], path.stat().st_size, target)
    compare(options.rounds if is_ours else min(5, options.rounds), limit[1], [(comparison, load)])


def _from_disk_s(path: Path, measured: Callable[[], float]) -> float:
    drop_from_page_cache(path)
    return measured()


def _load_ours_s(root: Path, into: dict[str, Any] | None, finding: list[float]) -> float:
    """A new manager each time, as after a restart; freeing what was loaded is not timed."""
    with localckpt.LocalCheckpointManager(root) as manager:
        began = time.perf_counter()
        if manager.find_latest() != 0:
            raise RuntimeError(f"the checkpoint in {root} was not found")
        found = time.perf_counter()
        loaded = manager.load() if into is None else manager.load(into=into)
        seconds = time.perf_counter() - found
        finding.append(found - began)
        del loaded
    return seconds


def _usual_ways(setting: Setting, directory: Path) -> list[tuple[str, Path, Callable[[], float]]]:
    torch_file, safetensors_file = directory / "state.pt", directory / "state.safetensors"
    torch.save(setting.state, torch_file)
    flat = flat_tensors(setting.state)
    safetensors.torch.save_file(flat, safetensors_file)

    def torch_load_s() -> float:
        began = time.perf_counter()
        loaded = torch.load(torch_file, weights_only=True)
        for target, source in zip(state_tensors(setting.state), state_tensors(loaded), strict=True):
            target.copy_(source)
        return time.perf_counter() - began

    def safetensors_load_s() -> float:
        began = time.perf_counter()
        for name, source in safetensors.torch.load_file(safetensors_file).items():
            flat[name].copy_(source)
        return time.perf_counter() - began

    return [
        ("torch.load + copy", torch_file, torch_load_s),
        ("safetensors + copy", safetensors_file, safetensors_load_s),
    ]
