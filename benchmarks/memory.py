"""Peak memory that saving takes beyond the model, beside the two images that it may stage."""

from __future__ import annotations

from pathlib import Path

import localckpt
from benchmarks.footprint import family_bytes, sampled_peak, status_bytes
from benchmarks.report import Report
from benchmarks.setup import Options, Saver, closing_all, largest_file
from benchmarks.state import build_state, state_nbytes

__all__ = ["measure"]

_SAVES = 3


def measure(options: Options) -> Report:
    """The kernel's own high-water mark, and samples over the whole family of processes."""
    report = Report("memory")
    state = build_state(options.width)
    report.fact("state", state_nbytes(state) / 1e9, "GB")
    root = options.directory / "ours"
    family_before, own_before = family_bytes(), _reset_high_water()
    with sampled_peak() as peak:
        saver = Saver(localckpt.LocalCheckpointManager(root), state)
        with closing_all([saver]):
            for _ in range(_SAVES):
                # The second starts while the first may be under way, so both buffers are used.
                saver.start()
                saver.start()
                saver.finish()
            image = largest_file(root).stat().st_size
            own = status_bytes("VmHWM") - own_before
    family = peak[0] - family_before
    note = f"{_SAVES} times two saves at once; goal: 2 images and little more"
    report.fact("image", image / 1e9, "GB")
    report.fact("trainer's peak (VmHWM)", own / image, "images", note)
    report.fact(
        "trainer and unmapped shm",
        family / image,
        "images",
        "sampled: private memory + used /dev/shm",
    )
    return report


def _reset_high_water() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")
