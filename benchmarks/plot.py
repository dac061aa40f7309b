"""``python -m benchmarks plot``: the newest figures of ``peers`` as a picture, docs/peers.png."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import RESULTS

__all__ = ["plot"]

_PICTURE = Path(__file__).parent.parent / "docs" / "peers.png"
_PANELS = {
    "first stall": "Training waits for the first save",
    "stall": "Training waits for a later save",
    "durable": "Durable, from the call of save",
    "load, cold": "Load, cold",
    "load, warm": "Load, in the page cache",
    "lost, matmul, 1 core": "Training lost per save: matmul on one core",
    "lost, small operations": "Training lost per save: small operations",
    "lost, matmul, 2 threads": "Training lost per save: matmul on both cores",
}
_OURS, _OTHERS, _LIMIT = "#0b6e4f", "#9aa5b1", "#c8553d"


def plot() -> Path:
    """Draw a panel for each figure, the best way on top and the limit as a line across.

    Raises:
        SystemExit: Nothing was measured yet.
    """
    measured = sorted(RESULTS.glob("peers-*.json"))
    if not measured:
        raise SystemExit("nothing to draw yet: run python -m benchmarks peers first")
    content = json.loads(measured[-1].read_text())
    # Only here, since measuring should not wait for its import.
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(4, 2, figsize=(13, 16))
    for axis, (metric, title) in zip(axes.flat, _PANELS.items(), strict=True):
        _draw(axis, metric, title, content["peers"])
    figure.suptitle(_title(content), fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(_PICTURE, dpi=110)
    pyplot.close(figure)
    return _PICTURE


def _draw(axis: Any, metric: str, title: str, peers: dict[str, Any]) -> None:
    figures = {
        name: 1e3 * median(samples["seconds"][metric])
        for name, samples in peers.items()
        if metric in samples["seconds"]
    }
    names = sorted(figures, key=figures.__getitem__, reverse=True)
    colours = [_OURS if name.startswith("localckpt") else _OTHERS for name in names]
    bars = axis.barh(names, [max(0.0, figures[name]) for name in names], color=colours)
    axis.bar_label(bars, [f"{figures[name]:,.0f} ms" for name in names], padding=3, fontsize=8)
    limits = [s for samples in peers.values() for s in samples["limits"].get(metric, [])]
    if limits:
        limit = 1e3 * median(limits)
        axis.axvline(limit, color=_LIMIT, linestyle="--", label=f"limit: {limit:,.0f} ms")
        axis.legend(loc="upper right", fontsize=9)
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel("ms, median (less is better)", fontsize=9)
    axis.tick_params(labelsize=9)
    axis.margins(x=0.14)
    axis.spines[["top", "right"]].set_visible(False)


def _title(content: dict[str, Any]) -> str:
    machine = content["machine"]
    gigabytes = max(samples["nbytes"] for samples in content["peers"].values()) / 1e9
    return (
        f"{gigabytes:.2f} GB on {machine['cores']} cores of an {machine['cpu']}, "
        f"{machine['file_system'].split()[0]}, torch {machine['torch']}"
    )
