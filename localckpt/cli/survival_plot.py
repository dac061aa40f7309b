"""``localckpt survive --plot``: chances and costs of redundancy schemes as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from localckpt.errors import CheckpointingException, StorageError
from localckpt.replication.survival import Survival

__all__ = ["draw"]


def draw(told: Sequence[Survival], path: Path) -> None:
    """Write a PNG: how likely data is lost with how many nodes, and what each scheme costs.

    Args:
        told: Schemes for one job.
        path: The file, which is overwritten.

    Raises:
        CheckpointingException: matplotlib is not installed, or the file is to be no PNG.
        StorageError: The file cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise CheckpointingException(f"{path}: the picture is a PNG, give it a name in .png")
    try:
        # Only here: no other command needs it, and its import takes longer than they do.
        figure_module = import_module("matplotlib.figure")
    except ImportError as error:
        raise CheckpointingException(
            f"--plot needs the package matplotlib, which cannot be imported ({error}). Install it "
            f"(pip install matplotlib), or leave --plot out"
        ) from error
    figure = figure_module.Figure(figsize=(12, 5), layout="constrained")
    chances, costs = figure.subplots(1, 2)
    _draw_chances(chances, told)
    _draw_costs(costs, told)
    first = told[0]
    figure.suptitle(f"{first.nodes} nodes of {first.ranks_per_node} ranks")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise StorageError(
            f"the picture cannot be written to {path}: {error.strerror or error}"
        ) from error


def _draw_chances(axis: Any, told: Sequence[Survival]) -> None:
    for survival in told:
        # A logarithm has no place for what never happens.
        possible = [chance for chance in survival.chances if chance.probability]
        axis.plot(
            [chance.lost for chance in possible],
            [chance.probability for chance in possible],
            marker="o",
            label=f"{survival.scheme}: surely survives {survival.survives_any}",
        )
    axis.set_yscale("log")
    axis.set_xticks([chance.lost for chance in told[0].chances])
    axis.set_xlabel("nodes lost at once")
    axis.set_title("Probability that data is lost", fontsize=11, loc="left")
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=9)


def _draw_costs(axis: Any, told: Sequence[Survival]) -> None:
    height = 0.4
    for offset, colour, name, costs in (
        (-height / 2, "#0b6e4f", "extra memory", [s.extra_memory.mean for s in told]),
        (height / 2, "#9aa5b1", "sent per save", [s.bytes_sent.mean for s in told]),
    ):
        places = [place + offset for place in range(len(told))]
        bars = axis.barh(places, costs, height, color=colour, label=name)
        axis.bar_label(bars, [f"{cost:.3g}" for cost in costs], padding=3, fontsize=8)
    axis.set_yticks(range(len(told)), [str(survival.scheme) for survival in told])
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("shards, mean of all ranks")
    axis.set_title("What a rank pays", fontsize=11, loc="left")
    axis.legend(fontsize=9)
