"""Runs of an image's bytes that have a place of their own in memory, found by their offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

__all__ = ["PlacedRuns"]


class _Run(Protocol):
    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def memory(self) -> memoryview | None: ...


RunT = TypeVar("RunT", bound=_Run)


class PlacedRuns(Generic[RunT]):
    """Runs of one image, none of which is empty, and none of which overlap.

    Args:
        runs: The runs: ``start`` and ``stop`` in the image, and the ``memory`` of their bytes, if
            it is in host memory.
    """

    def __init__(self, runs: Iterable[RunT]) -> None:
        self._runs = sorted(runs, key=lambda run: run.start)
        self._starts = [run.start for run in self._runs]

    def overlapping(self, start: int, stop: int) -> list[RunT]:
        """Return the runs that have some of the bytes ``[start, stop)`` of the image."""
        first = max(0, bisect_right(self._starts, start) - 1)
        near = self._runs[first : bisect_left(self._starts, stop)]
        return [run for run in near if run.stop > start]

    def places(self, start: int, stop: int, scratch: Callable[[], memoryview]) -> list[memoryview]:
        """Return the places of bytes ``[start, stop)`` of the image, in order.

        Args:
            start, stop: The bytes.
            scratch: Returns memory for bytes that no run has a place for, of at least as many bytes
                as there are in all.
        """
        parts = []
        done = start
        for run in self.overlapping(start, stop):
            if run.memory is None:
                continue
            begin, end = max(start, run.start), min(stop, run.stop)
            if done < begin:
                parts.append(scratch()[done - start : begin - start])
            parts.append(run.memory[begin - run.start : end - run.start])
            done = end
        if done < stop:
            parts.append(scratch()[done - start : stop - start])
        return parts
