"""Runs of an image's bytes that are read straight to where they belong.

Restoring a state and loads with another sharding read here: a tensor in a saved shard is a run, and
so are rows of it, as FSDP divides it. They are read into the tensor that wants them, or into the
message to its rank, and not copied once more.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.memory.tensor_bytes import copy_values
from localckpt.state_dict.boxes import Region
from localckpt.state_dict.source import ImageBytes, Scratch

Reserved = tuple[memoryview, Callable[[], None]]
"""Memory for bytes that are about to be read, and what is to be called once they are verified."""


class Sink(Protocol):
    """Receiver of a run; its methods are called by several threads."""

    def reserve(self, offset: int, nbytes: int) -> Reserved | None:
        """Reserve memory for bytes of the run; ``None`` to have them copied by :meth:`take`."""

    def take(self, offset: int, values: torch.Tensor) -> None:
        """Take values in order from an offset in bytes on; they may change once the call returns.

        They are flat bytes, or integers of the item's size.
        """


def copy_reserved(reserved: Reserved, values: torch.Tensor) -> None:
    memory, done = reserved
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    copy_values(flat.view(values.dtype).view(values.shape), values)
    done()


class InMemory(NamedTuple):
    """Memory that runs are read into; a :class:`Sink`."""

    memory: memoryview

    def reserve(self, offset: int, nbytes: int) -> Reserved:
        return self.memory[offset : offset + nbytes], lambda: None

    def take(self, offset: int, values: torch.Tensor) -> None:
        copy_reserved(self.reserve(offset, values.nbytes), values)


class Run(NamedTuple):
    """Bytes ``[start, stop)`` of an image, and the memory or the receiver that they go to."""

    start: int
    stop: int
    to: memoryview | Sink


def run_in(saved: Region, part: Region) -> tuple[int, int] | None:
    """Find a part of a saved tensor whose items stand row by row, if it is one run of them.

    Returns number of the first row and number of rows, where a tensor without a dimension is a row;
    ``None`` if the items of the part are no run, or not in the order of the part's own rows.
    """
    if part == saved:
        return 0, sum(count for _, count in saved[0]) if saved else 1
    if part[1:] != saved[1:] or len(part[0]) != 1 or len(saved[0]) != 1:
        return None
    (first, rows), (saved_first, _) = part[0][0], saved[0][0]
    return first - saved_first, rows


def stream_runs(
    image: ImageBytes,
    runs: Iterable[Run],
    also: Iterable[tuple[int, int]] | None = (),
    scratch: Callable[[int], memoryview] | None = None,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Read runs, and only the digest blocks of the image that hold them.

    Bytes that several runs share are copied to each.

    Args:
        also: Starts and ends of other bytes that are read to be verified; ``None`` for all bytes.
        scratch: Returns memory of the thread for so many bytes that are not read to their place.
        finish: Called after each piece, once all bytes of it are taken.
    """
    direct: list[Run] = []
    shared: dict[int, list[Run]] = {}
    starts = {start for span in also or () for start in _blocks_of(*span)}
    for cluster in _clusters(runs):
        for run in cluster:
            blocks = _blocks_of(run.start, run.stop)
            starts.update(blocks)
            if len(cluster) > 1:
                for start in blocks:
                    shared.setdefault(start, []).append(run)
        if len(cluster) == 1:
            direct += cluster
    begins = [run.start for run in direct]
    scratch = scratch or Scratch().of
    of_thread = threading.local()

    def places(start: int, stop: int) -> list[memoryview]:
        of_thread.scratch = rest = scratch(stop - start)
        # A run that is in both blocks of a piece is copied once.
        both = (run for block in range(start, stop, BLOCK_NBYTES) for run in shared.get(block, ()))
        of_thread.dones, of_thread.copied = [], list({id(run): run for run in both}.values())
        parts, at = [], start
        first = max(0, bisect_right(begins, start) - 1)
        for run in direct[first : bisect_left(begins, stop)]:
            begin, end = max(start, run.start), min(stop, run.stop)
            if begin >= end:
                continue
            if isinstance(run.to, memoryview):
                memory = run.to[begin - run.start : end - run.start]
            elif (reserved := run.to.reserve(begin - run.start, end - begin)) is not None:
                memory, done = reserved
                of_thread.dones.append(done)
            else:
                of_thread.copied.append(run)
                continue
            if at < begin:
                parts.append(rest[at - start : begin - start])
            parts.append(memory)
            at = end
        if at < stop:
            parts.append(rest[at - start : stop - start])
        return parts

    def filled(start: int, _: list[memoryview]) -> None:
        for done in of_thread.dones:
            done()
        stop = start + len(of_thread.scratch)
        for begin, end, to in of_thread.copied:
            first, last = max(start, begin), min(stop, end)
            data = of_thread.scratch[first - start : last - start]
            to.take(first - begin, torch.frombuffer(data, dtype=torch.uint8))
        finish()

    image.stream(places, filled, None if also is None else sorted(starts))


def _blocks_of(start: int, stop: int) -> range:
    return range(start // BLOCK_NBYTES * BLOCK_NBYTES, stop, BLOCK_NBYTES)


def _clusters(runs: Iterable[Run]) -> Iterable[list[Run]]:
    """Divide runs that are not empty into groups of which no two share a byte."""
    cluster: list[Run] = []
    end = 0
    for run in sorted((r for r in runs if r.start < r.stop), key=lambda run: run[:2]):
        if cluster and run.start >= end:
            yield cluster
            cluster = []
        end = max(end, run.stop) if cluster else run.stop
        cluster.append(run)
    if cluster:
        yield cluster
