"""How long a restart reads: into tensors that exist, and into new ones; warm and cold."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import localckpt
from benchmarks.limits import drop_from_page_cache, read_direct_s, read_warm_s, settle
from benchmarks.report import Comparison, Report, compare
from benchmarks.save import flat_tensors
from benchmarks.setup import Options, Setting, largest_file, make_setting
from benchmarks.state import state_tensors

__all__ = ["measure"]


def measure(options: Options) -> Report:
    """Ours beside a raw read of the same file, then the usual ways beside a read of theirs."""
    report = Report("load")
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
    for temperature in ("warm", "cold"):
        for name, path, load in ours + usual:
            target = 1.5 if path == shard else None
            limit_name = {"warm": "preadv, 2 threads", "cold": "O_DIRECT, 4 threads"}[temperature]
            nbytes = path.stat().st_size
            comparison = report.compared(f"{temperature}: {name}", limit_name, nbytes, target)
            rounds = options.rounds if target else min(5, options.rounds)
            _measure_one(temperature, rounds, comparison, setting, path, load)
    report.fact("find_latest", 1e3 * sorted(finding)[len(finding) // 2], "ms", "median")
    return report


def _measure_one(
    temperature: str,
    rounds: int,
    comparison: Comparison,
    setting: Setting,
    path: Path,
    load: Callable[[], float],
) -> None:
    if temperature == "warm":
        read_warm_s(path, setting.buffer)
        compare(rounds, lambda: read_warm_s(path, setting.buffer), [(comparison, load)])
        return

    def from_disk(measured: Callable[[], float]) -> float:
        drop_from_page_cache(path)
        return measured()

    compare(
        rounds,
        lambda: from_disk(lambda: read_direct_s(path, setting.buffer)),
        [(comparison, lambda: from_disk(load))],
    )


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
