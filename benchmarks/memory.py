"""Peak memory that saving takes beyond the model, beside the two images that it may stage."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

import localckpt
from benchmarks.report import Report
from benchmarks.setup import Options, Saver, closing_all, largest_file
from benchmarks.state import build_state, state_nbytes

__all__ = ["measure"]

_SAVES = 3


def measure(options: Options) -> Report:
    """Both async workers; the kernel's own high-water mark, and samples over the whole family."""
    report = Report("memory")
    state = build_state(options.width)
    report.fact("state", state_nbytes(state) / 1e9, "GB")
    for worker in ("thread", "process"):
        root = options.directory / worker
        family_before, own_before = _family_bytes(), _reset_high_water()
        with _sampled_peak() as peak:
            saver = Saver(localckpt.LocalCheckpointManager(root, async_worker=worker), state)
            with closing_all([saver]):
                for _ in range(_SAVES):
                    # The second starts while the first may be under way, so both buffers are used.
                    saver.start()
                    saver.start()
                    saver.finish()
                image = largest_file(root).stat().st_size
                own = _status_bytes("VmHWM") - own_before
        family = peak[0] - family_before
        note = f"{_SAVES} times two saves at once; goal: 2 images and little more"
        report.fact(f"image, {worker}", image / 1e9, "GB")
        report.fact(f"trainer's peak (VmHWM), {worker}", own / image, "images", note)
        report.fact(
            f"trainer, worker and unmapped shm, {worker}",
            family / image,
            "images",
            "sampled: private memory + used /dev/shm",
        )
    return report


def _reset_high_water() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str, pid: int | None = None) -> int:
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _family_bytes() -> int:
    """Private memory of this process and its children, and shared memory counted once."""
    me = psutil.Process()
    total = sum(_private_bytes(process.pid) for process in [me, *me.children(recursive=True)])
    usage = os.statvfs("/dev/shm")
    return total + (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _private_bytes(pid: int) -> int:
    try:
        return _status_bytes("RssAnon", pid)
    except (FileNotFoundError, ProcessLookupError, RuntimeError):
        return 0  # it ended in the meantime


@contextmanager
def _sampled_peak() -> Iterator[list[int]]:
    peak, stop = [_family_bytes()], threading.Event()

    def sample() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], _family_bytes())

    thread = threading.Thread(target=sample, name="memory-sampler")
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
