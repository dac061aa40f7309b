"""Timeline of a job on one line of text."""

from __future__ import annotations

from collections.abc import Sequence

from localckpt.report.account import Kind, Stretch

__all__ = ["cells", "place"]


def cells(stretches: Sequence[Stretch], width: int) -> list[Kind]:
    """Kind of each of so many equal parts of the time; what takes most of a part stands for it.

    Args:
        stretches: All of the time, in order and without holes; at least one.
        width: Number of parts.
    """
    began, ended = stretches[0].began, stretches[-1].ended
    length = (ended - began) / width
    found: list[Kind] = []
    first = 0
    for index in range(width):
        left, right = began + index * length, began + (index + 1) * length
        while first + 1 < len(stretches) and stretches[first].ended <= left:
            first += 1
        seconds: dict[Kind, float] = {}
        for stretch in stretches[first:]:
            if stretch.began >= right:
                break
            overlap = min(right, stretch.ended) - max(left, stretch.began)
            seconds[stretch.kind] = seconds.get(stretch.kind, 0.0) + overlap
        found.append(max(seconds, key=seconds.__getitem__))
    return found


def place(at: float, stretches: Sequence[Stretch], width: int) -> int:
    """Find the part of the time that a moment lies in, of equal parts."""
    began, ended = stretches[0].began, stretches[-1].ended
    return min(width - 1, max(0, int((at - began) / (ended - began) * width)))
