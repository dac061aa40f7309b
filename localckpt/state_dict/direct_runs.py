"""Runs of an image's bytes that are read straight into the memory of the tensors that they fill.

Rows of a tensor, as FSDP divides it, are one run of bytes in a saved shard, and one in the tensor
that wants them. They need not be copied once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from localckpt.state_dict.regions import Region, common

__all__ = ["DirectRun", "RunTarget", "find_run"]


class RunTarget(Protocol):
    """Tensor of this rank that a run may be read into."""

    @property
    def region(self) -> Region:
        """Elements of the global tensor that it has."""

    @property
    def memory(self) -> memoryview | None:
        """Its bytes, in the order of its items; ``None`` if they are not one run of host memory."""

    def filled(self, nbytes: int) -> None:
        """Note that so many of its bytes were read and verified; called by several threads."""


class DirectRun(NamedTuple):
    """Run of an image's bytes.

    Attributes:
        start: Offset of the first byte in the image.
        memory: Where the bytes belong.
        filled: Called with the number of bytes after some of them were read and verified.
    """

    start: int
    memory: memoryview
    filled: Callable[[int], None]

    @property
    def stop(self) -> int:
        """Offset behind the last byte in the image."""
        return self.start + len(self.memory)

    def note_filled(self, start: int, stop: int) -> None:
        """Note that bytes ``[start, stop)`` of the image, some of the run's, were verified."""
        self.filled(min(stop, self.stop) - max(start, self.start))


def find_run(
    saved: Region,
    wanted: Sequence[Region],
    number: int,
    target: RunTarget,
    start: int,
    row_nbytes: int,
) -> tuple[int, memoryview] | None:
    """Find the run of bytes that holds what one tensor wants of a saved one.

    Args:
        saved: Elements of the global tensor that the saved tensor has; in the image they stand row
            by row.
        wanted: Parts of the saved tensor that tensors of this and other ranks want.
        number: Which of them the target wants.
        target: The tensor.
        start: Offset of the saved tensor in the image.
        row_nbytes: Size of what the saved tensor has of one index of its first dimension.

    Returns:
        The offset in the image, and where the bytes belong; ``None`` if they are not one run in
        both places, or another tensor wants some of them, too.
    """
    part = wanted[number]
    if not part or part[1:] != saved[1:] or part[1:] != target.region[1:]:
        return None
    if len(part[0]) != 1 or len(saved[0]) != 1 or len(target.region[0]) != 1:
        return None
    if any(n != number and common(part, other) is not None for n, other in enumerate(wanted)):
        return None
    if (memory := target.memory) is None:
        return None
    (first, rows), (saved_first, _), (own_first, _) = part[0][0], saved[0][0], target.region[0][0]
    begin = (first - own_first) * row_nbytes
    run = memory[begin : begin + rows * row_nbytes]
    return start + (first - saved_first) * row_nbytes, run
