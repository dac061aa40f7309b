"""Tree of a session's lineages, for display: the parent and the checkpoints of each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from localckpt.ids import Checkpoint
from localckpt.lineage import EpochId, Lineage, Origin, Point

__all__ = ["Branch", "branches", "tree"]

_SHOWN = 4
_DEEPEST = 16


@dataclass(frozen=True, slots=True)
class Branch:
    """Epoch that has checkpoints, or from which several such epochs descend.

    Attributes:
        epoch: The epoch.
        origin: Kind of the source that the epoch resumed from; ``None`` if unknown.
        resumed_at: Iteration that the epoch resumed from; -1 for the beginning, or if unknown.
        parent: Epoch of the checkpoint that this epoch resumed from; ``None`` if unknown.
        under: Nearest ancestor that is a branch of the tree; ``None`` if there is none.
        iterations: Iterations of the epoch's checkpoints, complete or not, in ascending order.
        given_up: Epochs that the job went back from, each with its highest iteration then.
    """

    epoch: EpochId
    origin: Origin | None
    resumed_at: int
    parent: EpochId | None
    under: EpochId | None
    iterations: tuple[int, ...]
    given_up: tuple[Point, ...]

    @property
    def source(self) -> str:
        """Text of the source that the epoch resumed from."""
        if self.origin == "nothing":
            return "from the beginning"
        if self.origin == "elsewhere":
            return f"from elsewhere, after iteration {self.resumed_at}"
        if self.origin is None and self.parent is None:
            return "nothing more is known of it"
        where = "of shared storage, " if self.origin == "shared" else ""
        return f"from iteration {self.resumed_at} {where}of epoch {self.parent}"

    @property
    def left(self) -> str:
        """Text of the epoch's checkpoints."""
        if len(self.iterations) > _SHOWN:
            first, *_, last = self.iterations
            return f"{len(self.iterations)} iterations from {first} to {last}"
        word = f"iteration{'s'[: len(self.iterations) > 1]}"
        return f"{word} {', '.join(map(str, self.iterations))}" if self.iterations else "nothing"

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": str(self.epoch),
            "origin": self.origin,
            "resumed_at": self.resumed_at,
            "parent": None if self.parent is None else str(self.parent),
            "iterations": list(self.iterations),
            "given_up": {str(point.epoch): point.iteration for point in self.given_up},
        }


def branches(
    checkpoints: Iterable[Checkpoint], lineages: Mapping[EpochId, Lineage]
) -> tuple[Branch, ...]:
    """Return the branches of the tree, each one after its ancestors.

    Args:
        checkpoints: Existing checkpoints, complete or not.
        lineages: Lineages of epochs, with or without checkpoints.
    """
    left: dict[EpochId, set[int]] = {}
    for checkpoint in checkpoints:
        left.setdefault(checkpoint.generation.epoch_id, set()).add(checkpoint.iteration)
    parents = _parents(lineages.values())
    lines = {epoch: _line(epoch, parents) for epoch in left}
    # An epoch where the lines of descent fork is a branch even if it has no checkpoints.
    children: dict[EpochId, set[EpochId]] = {}
    for line in lines.values():
        for child, parent in pairwise(line):
            children.setdefault(parent, set()).add(child)
    forks = {parent for parent, of_it in children.items() if len(of_it) > 1}
    under: dict[EpochId | None, list[Branch]] = {}
    for epoch in left.keys() | forks:
        above = (e for e in _line(epoch, parents)[1:] if e in left or e in forks)
        branch = _branch(
            epoch, lineages.get(epoch), parents.get(epoch), next(above, None), left.get(epoch, ())
        )
        under.setdefault(branch.under, []).append(branch)
    ordered: list[Branch] = []
    waiting = _from_new_to_old(under.get(None, ()))
    while waiting:
        ordered.append(waiting.pop())
        waiting += _from_new_to_old(under.get(ordered[-1].epoch, ()))
    return tuple(ordered)


def tree(found: Sequence[Branch]) -> list[str]:
    """Draw the tree as lines of text, each branch indented under its ancestor."""
    depth: dict[EpochId | None, int] = {None: 0}
    lines = []
    for branch in found:
        depth[branch.epoch] = depth[branch.under] + 1
        back = ", ".join(str(point) for point in branch.given_up)
        lines.append(
            f"{'  ' * min(depth[branch.epoch], _DEEPEST)}epoch {branch.epoch}, {branch.source}: "
            f"{branch.left}" + (f"; it went back from {back}" if back else "")
        )
    return lines


def _branch(
    epoch: EpochId,
    lineage: Lineage | None,
    came_from: Point | None,
    under: EpochId | None,
    iterations: Iterable[int],
) -> Branch:
    default = (None, -1 if came_from is None else came_from.iteration, ())
    origin, resumed_at, given_up = (
        default if lineage is None else (lineage.origin, lineage.resumed_at, lineage.given_up)
    )
    parent = None if came_from is None else came_from.epoch
    still = tuple(point for point in given_up if point.iteration > resumed_at)
    return Branch(epoch, origin, resumed_at, parent, under, tuple(sorted(iterations)), still)


def _parents(lineages: Iterable[Lineage]) -> dict[EpochId, Point]:
    """Return the point at which each epoch left its parent, as far as any lineage names it."""
    found: dict[EpochId, Point] = {}
    for lineage in lineages:
        line = (lineage.epoch, *(point.epoch for point in lineage.ancestors))
        found.update(zip(line, lineage.ancestors, strict=False))
    return found


def _line(epoch: EpochId, parents: Mapping[EpochId, Point]) -> list[EpochId]:
    """Return an epoch and its ancestors, the nearest first."""
    line = [epoch]
    # Forged lineages may form a cycle, which ends the loop.
    while (point := parents.get(line[-1])) is not None and point.epoch not in line:
        line.append(point.epoch)
    return line


def _from_new_to_old(found: Iterable[Branch]) -> list[Branch]:
    return sorted(found, key=lambda branch: (branch.resumed_at, branch.epoch), reverse=True)
