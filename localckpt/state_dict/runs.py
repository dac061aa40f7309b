"""Runs of an image's bytes that are read straight to where they belong.

Rows of a tensor, as FSDP divides it, are one run of bytes in a saved shard, and one in the tensor
that wants them. They are read into that tensor, or into the message to its rank, and not copied
once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from localckpt.state_dict.regions import Region
from localckpt.state_dict.source import PIECE_NBYTES

__all__ = ["Channel", "PartReceiver", "Reservation", "RowRuns", "Run", "Runs", "run_in"]


class PartReceiver(Protocol):
    """Receiver of a part of a saved tensor; its methods are called by several threads."""

    @property
    def channel(self) -> Channel:
        """Way to the rank that wants the part."""

    def takes_direct(self, nbytes: int) -> bool:
        """Return whether a run of so many bytes may be read straight to where it goes."""

    def take_run(self, offset: int, data: memoryview) -> None:
        """Take bytes of the part, whose items stand row by row.

        Args:
            offset: Offset of the first byte in the part.
            data: The bytes; they may change once the call returns.
        """

    def take_cut(self, first: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        """Take a rectangle of the part.

        Args:
            first, sizes: The rectangle, in the indices of the global tensor.
            values: Its values, as integers of the item's size or as bytes; they may change once
                the call returns.
        """


class Reservation(NamedTuple):
    """Memory for runs that are about to be read.

    Attributes:
        memory: Memory for each run.
        done: To be called once all of them are read and verified.
    """

    memory: Sequence[memoryview]
    done: Callable[[], None]


class Channel(Protocol):
    """Way to the tensors of one rank."""

    @property
    def rank(self) -> int:
        """The rank. A thread reserves memory of several channels in the order of their ranks."""

    def reserve(self, runs: Sequence[tuple[PartReceiver, int, int]]) -> Reservation:
        """Reserve memory for runs of one piece of an image.

        Args:
            runs: For each its receiver, its offset in the receiver's part, and its size in bytes.
        """


class Run(NamedTuple):
    """Run of an image's bytes that a receiver wants.

    Attributes:
        start: Offset of its first byte in the image.
        stop: Offset behind its last byte.
        receiver: The receiver.
    """

    start: int
    stop: int
    receiver: PartReceiver


def run_in(saved: Region, part: Region) -> tuple[int, int] | None:
    """Find a part of a tensor whose items stand row by row, if it is one run of them.

    Args:
        saved: Elements of the global tensor that the tensor has.
        part: Elements of them.

    Returns:
        Number of the first row and number of rows, where a tensor without a dimension is a row;
        ``None`` if the items of the part are no run, or not in the order of the part's own rows.
    """
    if part == saved:
        return 0, sum(count for _, count in saved[0]) if saved else 1
    if part[1:] != saved[1:] or len(part[0]) != 1 or len(saved[0]) != 1:
        return None
    (first, rows), (saved_first, _) = part[0][0], saved[0][0]
    return first - saved_first, rows


class RowRuns:
    """Answers of :func:`run_in`, each computed once: few regions are those of many tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple[Region, Region], tuple[int, int] | None] = {}

    def find(self, saved: Region, part: Region) -> tuple[int, int] | None:
        """Find a part of a tensor, as :func:`run_in` does."""
        which = saved, part
        if which not in self._known:
            self._known[which] = run_in(saved, part)
        return self._known[which]


class Runs:
    """Runs of one image that receivers want.

    Args:
        runs: The runs.
        spans: Start and end of other bytes of the image that are wanted beside their places.

    A run that shares bytes with another one, or with a span, is copied.
    """

    def __init__(self, runs: Iterable[Run], spans: Iterable[tuple[int, int]] = ()) -> None:
        self._direct: list[Run] = []
        self._copied: dict[int, list[Run]] = {}
        self.pieces: set[int] = set()
        """Starts of the pieces of the image that hold them."""
        for cluster in _clusters([*runs, *((*span, None) for span in spans)]):
            for start, stop, receiver in cluster:
                if receiver is None:
                    continue
                run = Run(start, stop, receiver)
                pieces = range(start // PIECE_NBYTES * PIECE_NBYTES, stop, PIECE_NBYTES)
                self.pieces.update(pieces)
                if len(cluster) == 1 and receiver.takes_direct(stop - start):
                    self._direct.append(run)
                    continue
                for piece in pieces:
                    self._copied.setdefault(piece, []).append(run)
        self._starts = [run.start for run in self._direct]

    def places(
        self, start: int, stop: int, scratch: memoryview
    ) -> tuple[list[memoryview], list[Callable[[], None]]]:
        """Return where bytes ``[start, stop)`` of the image go: ``scratch`` has room for all.

        Returns:
            Memory for the bytes, in parts, and what is to be called once they are verified.
        """
        of_channels: dict[Channel, list[tuple[PartReceiver, int, int]]] = {}
        begins: dict[Channel, list[int]] = {}
        for run in self._overlapping(start, stop):
            begin, end = max(start, run.start), min(stop, run.stop)
            channel = run.receiver.channel
            wanted = run.receiver, begin - run.start, end - begin
            of_channels.setdefault(channel, []).append(wanted)
            begins.setdefault(channel, []).append(begin)
        found: list[tuple[int, memoryview]] = []
        dones = []
        for channel in sorted(of_channels, key=lambda channel: channel.rank):
            reservation = channel.reserve(of_channels[channel])
            found += zip(begins[channel], reservation.memory, strict=True)
            dones.append(reservation.done)
        parts, at = [], start
        for begin, memory in sorted(found, key=lambda place: place[0]):
            if at < begin:
                parts.append(scratch[at - start : begin - start])
            parts.append(memory)
            at = begin + len(memory)
        if at < stop:
            parts.append(scratch[at - start : stop - start])
        return parts, dones

    def copy(self, start: int, data: memoryview) -> None:
        """Have receivers take what they want of a verified piece that was not read to its place.

        Args:
            start: Offset of the piece in the image.
            data: The scratch of :meth:`places`, as long as the piece.
        """
        for run in self._copied.get(start, ()):
            begin, end = max(start, run.start), min(start + len(data), run.stop)
            run.receiver.take_run(begin - run.start, data[begin - start : end - start])

    def _overlapping(self, start: int, stop: int) -> list[Run]:
        first = max(0, bisect_right(self._starts, start) - 1)
        near = self._direct[first : bisect_right(self._starts, stop - 1)]
        return [run for run in near if run.stop > start]


_Span = tuple[int, int, PartReceiver | None]


def _clusters(spans: Iterable[_Span]) -> Iterable[list[_Span]]:
    """Divide spans that are not empty into groups of which no two share a byte."""
    cluster: list[_Span] = []
    end = 0
    for span in sorted((s for s in spans if s[0] < s[1]), key=lambda span: span[:2]):
        if cluster and span[0] >= end:
            yield cluster
            cluster = []
        end = max(end, span[1]) if cluster else span[1]
        cluster.append(span)
    if cluster:
        yield cluster
