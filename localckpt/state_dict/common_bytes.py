"""Bytes of an image that other ranks of the job may have in theirs, and images without these.

A rank that is to keep a copy of an image need not be sent what its own image holds. The slots of
an image are grouped by the set of ranks that should have them equal. Two ranks compare one digest
for each group, so what is only called equal is never taken for equal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import address_of
from localckpt.state_dict.captured import read_tables
from localckpt.state_dict.header import header_length
from localckpt.state_dict.source import PIECE_NBYTES, Filled, MemorySource, Places, scatter

__all__ = ["LEAST_NBYTES", "CommonBytes", "Remaining", "common_bytes", "complete"]

LEAST_NBYTES = 64 << 10
"""Groups below this size are not compared: sending them takes no longer."""

Span = tuple[int, int]
"""Offset in an image, and number of bytes."""


class CommonBytes(NamedTuple):
    """Group of slots that a set of ranks should have equal.

    Attributes:
        spans: The slots, in the order of their offsets.
        digest: Digest of their sizes and their bytes, as hexadecimal digits.
    """

    spans: tuple[Span, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Number of bytes of all slots."""
        return sum(nbytes for _, nbytes in self.spans)


def common_bytes(image: memoryview) -> dict[str, CommonBytes]:
    """Find and digest what other ranks may have as well.

    Args:
        image: A captured image, whose own digests are not needed.

    Returns:
        The groups by their names, which are the same on all ranks of a set.

    Raises:
        CorruptShardError: The image is damaged.
    """
    return {
        name: CommonBytes(spans, _digest(image, spans))
        for name, spans in _groups(image).items()
        if sum(nbytes for _, nbytes in spans) >= LEAST_NBYTES
    }


def _groups(image: memoryview) -> dict[str, tuple[Span, ...]]:
    header, entries, boxes = read_tables(image)
    kinds: dict[str, str] = {}
    for number, box in boxes.items():
        slot = entries[number].slot
        if slot is not None and box.is_shared:
            kinds.setdefault(slot, box.kind)
    groups: dict[str, list[Span]] = {}
    for name, kind in kinds.items():
        place = header.slots[name]
        groups.setdefault(kind, []).append((header.data_start + place.offset, place.nbytes))
    # Named by digests, since the sets of ranks of a large job may have long texts.
    names = {kind: xxhash.xxh3_64_hexdigest(kind.encode()) for kind in groups}
    return {names[kind]: tuple(sorted(spans)) for kind, spans in groups.items()}


def _digest(image: memoryview, spans: Sequence[Span]) -> str:
    hasher = xxhash.xxh3_128(repr([nbytes for _, nbytes in spans]).encode())
    for start, nbytes in spans:
        hasher.update(image[start : start + nbytes])
    return hasher.hexdigest()


class Remaining:
    """Source of an image without some of its bytes.

    Args:
        source: The image; the caller closes it.
        left_out: What is left out; no two overlap.

    Attributes:
        nbytes: Number of bytes that remain.
        views_last: True: views stay valid when the source is read on.
    """

    def __init__(self, source: MemorySource, left_out: Iterable[Span]) -> None:
        self._source = source
        self.views_last = True
        self.nbytes = 0
        # Runs of the image that remain: the place of each among all of them, and its span.
        self._runs: list[tuple[int, Span]] = []
        at = 0
        for start, nbytes in [*sorted(left_out), (source.nbytes, 0)]:
            if start > at:
                self._runs.append((self.nbytes, (at, start - at)))
                self.nbytes += start - at
            at = start + nbytes

    def read(self, start: int, stop: int) -> memoryview:
        found = []
        for place, (at, nbytes) in self._runs:
            first, end = max(start, place), min(stop, place + nbytes)
            if first < end:
                found.append(self._source.read(at + first - place, at + end - place))
        # What is joined can only be read, which says that it is no part of the image.
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def stream(
        self, stop: int, places: Places, filled: Filled, starts: Sequence[int] | None = None
    ) -> None:
        for start in range(0, stop, PIECE_NBYTES) if starts is None else starts:
            end = min(start + PIECE_NBYTES, stop)
            parts = places(start, end)
            scatter(memoryview(bytearray(self.read(start, end))), parts)
            filled(start, parts)

    def close(self) -> None:
        """Do nothing: the image is the caller's."""


def complete(image: memoryview, own: memoryview, left_out: Mapping[str, CommonBytes]) -> None:
    """Complete another rank's image that came without what this rank has itself.

    Args:
        image: Memory of the whole image; what came is at its end.
        own: This rank's image.
        left_out: The groups that did not come, of this rank's image, by their names.

    Raises:
        CorruptShardError: What came does not say where the groups belong.
    """
    lacking = sum(group.nbytes for group in left_out.values())
    data_start = header_length(image[lacking : lacking + 8], len(image))
    _move(image, lacking, 0, data_start)
    # The header is in its place now, and so is all that lies behind the tensors.
    groups = _groups(image)
    gaps: list[tuple[int, int, int]] = []
    for name, group in left_out.items():
        spans = groups.get(name, ())
        if [nbytes for _, nbytes in spans] != [nbytes for _, nbytes in group.spans]:
            raise CorruptShardError(
                f"a replica came without {group.nbytes} bytes that this rank has itself, and does "
                f"not say where they belong"
            )
        mine = (start for start, _ in group.spans)
        gaps += [(*span, start) for span, start in zip(spans, mine, strict=True)]
    at = data_start
    # What came lies behind its place by what is still lacking, so no byte of it is overwritten.
    for start, nbytes, own_start in sorted(gaps):
        _move(image, at + lacking, at, start - at)
        scatter(own[own_start : own_start + nbytes], [image[start : start + nbytes]])
        at, lacking = start + nbytes, lacking - nbytes


def _move(image: memoryview, source: int, target: int, nbytes: int) -> None:
    """Move bytes to the front of where they lie, also by less than their number."""
    ctypes.memmove(address_of(image) + target, address_of(image) + source, nbytes)
