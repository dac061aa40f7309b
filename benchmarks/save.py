"""What training waits for at a save, and how long it takes until the bytes are durable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

import localckpt
from benchmarks.limits import RecycledFile, settle
from benchmarks.report import Comparison, Report, compare
from benchmarks.setup import Options, Saver, Setting, closing_all, make_setting
from benchmarks.state import flat_tensors
from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.copying import BlockCopies, Copier
from localckpt.memory.digests import BlockHasher
from localckpt.state_dict.image import ImagePlanner

__all__ = ["measure"]

# To look at each of many tensors has its price.
_LARGE_TENSORS = ("gpt2", "one")
_LARGE_GOAL, _SMALL_GOAL = 1.15, 1.5
_COPY = "one flat memcpy, 1 thread"
_DURABLE_GOAL = 1.15


def measure(options: Options) -> Report:
    """Both async workers beside one copy and one raw write, then the usual ways beside the same."""
    report = Report("save", options.state)
    setting = make_setting(options)
    _measure_copy_loop(report, setting, options)
    file = RecycledFile(options.directory / "limit", setting.buffer)
    _measure_ours(report, setting, file, options)
    settle()
    _measure_usual_ways(report, setting, file, options)
    file.close()
    return report


def _measure_copy_loop(report: Report, setting: Setting, options: Options) -> None:
    """What of the stall is copying, without finding the tensors and comparing their structure."""
    capture = ImagePlanner().capture(setting.state)
    copies = BlockCopies((run.offset, run.nbytes) for run in capture.plan.runs)
    copier = Copier()

    def copy_loop_s(hasher: BlockHasher | None) -> float:
        began = time.perf_counter()
        view, sources = setting.buffer.view, capture.sources
        data, digests = view[: capture.data_nbytes], view[capture.data_nbytes :]
        digest = None if hasher is None else partial(hasher.fill_block, digests)
        copies.copy(data, 0, sources, copier, digest)
        return time.perf_counter() - began

    hasher = BlockHasher(ShardIdentity("", Generation(1, 1), 1, 0, 1))
    alone = report.compared("copy loop of a save", _COPY, setting.nbytes, _LARGE_GOAL)
    hashing = report.compared("the same, hashing each block", _COPY, setting.nbytes)
    loops = [(alone, lambda: copy_loop_s(None)), (hashing, lambda: copy_loop_s(hasher))]
    compare(options.rounds, setting.copy_flat_s, loops)


def _measure_ours(report: Report, setting: Setting, file: RecycledFile, options: Options) -> None:
    saver = Saver(localckpt.LocalCheckpointManager(options.directory / "ours"), setting.state)
    write = "flat memcpy + O_DIRECT write + fsync"
    goal = _LARGE_GOAL if options.state in _LARGE_TENSORS else _SMALL_GOAL
    stall = report.compared("stall of save", _COPY, setting.nbytes, goal)
    # What others do on the machine counts less in it.
    processor = report.compared("the same, processor time of its thread", _COPY, setting.nbytes)
    durable = report.compared("durable", write, setting.nbytes, _DURABLE_GOAL)
    with closing_all([saver]):
        saver.warm_up()
        for _ in range(options.rounds):
            write_s = file.write_s()
            copy_s, copy_processor_s = _with_processor_s(setting.copy_flat_s)
            stall_s, processor_s = _with_processor_s(saver.start)
            durable_s = saver.finish()
            stall.add(copy_s, stall_s)
            processor.add(copy_processor_s, processor_s)
            durable.add(copy_s + write_s, durable_s)


def _with_processor_s(timed: Callable[[], float]) -> tuple[float, float]:
    began = time.thread_time()
    return timed(), time.thread_time() - began


def _measure_usual_ways(
    report: Report, setting: Setting, file: RecycledFile, options: Options
) -> None:
    def limit() -> float:
        return setting.copy_flat_s() + file.write_s()

    def arm(name: str, save: Callable[[Path], None]) -> tuple[Comparison, Callable[[], float]]:
        comparison = report.compared(
            f"durable, {name}", "flat memcpy + O_DIRECT write + fsync", setting.nbytes
        )
        return comparison, lambda: _timed_save(options.directory / "usual", save)

    flat = flat_tensors(setting.state)
    compare(
        min(5, options.rounds),
        limit,
        [
            arm("torch.save + fsync", lambda path: torch.save(setting.state, path)),
            arm("safetensors + fsync", lambda path: safetensors.torch.save_file(flat, path)),
        ],
    )


def _timed_save(path: Path, save: Callable[[Path], None]) -> float:
    began = time.perf_counter()
    save(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - began
    # These ways remove the old file at every save; that cost is kept out of all samples.
    path.unlink()
    settle()
    return seconds
