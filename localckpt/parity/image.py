"""Image of a parity: a file of the same form as a shard's, whose header names the members."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.ids import Group, ShardIdentity
from localckpt.parity.stripes import MOST_NBYTES, PARITY_KIND, ParityLayout
from localckpt.state_dict.boxes import NO_BOXES
from localckpt.state_dict.header import NO_PARTS, Skeleton, render_header, render_slots
from localckpt.state_dict.layout import Layout, TensorSlot
from localckpt.state_dict.source import ShardSource, read_header, scatter

# Name of the tensor in the file.
_PARITY = "parity"

# Whoever restores it as a shard is given nothing.
_SKELETON = Skeleton(b"[]", NO_BOXES, NO_PARTS, pickle.dumps(None, 5)).join()


@dataclass(frozen=True, slots=True)
class ParityOf:
    """A group of ranks at one iteration. ``image_nbytes`` is in the group's order."""

    group: Group
    image_nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.image_nbytes) != len(self.group.ranks) or not all(
            type(nbytes) is int and 0 <= nbytes <= MOST_NBYTES for nbytes in self.image_nbytes
        ):
            raise MismatchError(
                f"a parity of {len(self.group.ranks)} ranks tells the size of each one's image, "
                f"from 0 to {MOST_NBYTES} bytes: not {self.image_nbytes!r:.200}"
            )
        # Refuses numbers that no group can have.
        _ = self.layout

    @property
    def layout(self) -> ParityLayout:
        return ParityLayout(self.image_nbytes, self.group.tolerated)

    def to_json(self) -> str:
        """Its form in a header, where every value is a text."""
        ranks, parity = list(self.group.ranks), self.group.tolerated
        return json.dumps([ranks, parity, list(self.image_nbytes)], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: Any) -> ParityOf:
        try:
            ranks, parity, image_nbytes = json.loads(text)
            return cls(Group(tuple(ranks), parity, PARITY_KIND), tuple(image_nbytes))
        except (TypeError, ValueError, RecursionError) as error:
            raise MismatchError(f"it does not say what it is the parity of: {error}") from error


@dataclass(frozen=True, slots=True)
class ParityFrame:
    """Image of a parity without its contents: its first bytes, and sizes."""

    header: bytes
    parity_nbytes: int
    nbytes: int

    @classmethod
    def of(cls, identity: ShardIdentity, parity_of: ParityOf) -> ParityFrame:
        nbytes = parity_of.layout.parity_nbytes
        slots = (TensorSlot(_PARITY, "U8", (nbytes,), nbytes, 0),)
        header, image_nbytes = render_header(
            render_slots(Layout(slots, nbytes)),
            nbytes,
            len(_SKELETON),
            identity.of_kind(PARITY_KIND),
            parity_of.to_json(),
        )
        return cls(header, nbytes, image_nbytes)

    def put(self, image: memoryview) -> memoryview:
        """Write the frame; return the memory for the parity. The digests are behind it."""
        end = (start := len(self.header)) + self.parity_nbytes
        image[:start] = self.header
        image[end : end + len(_SKELETON)] = _SKELETON
        return image[start:end]


class ParityPart:
    """The parity within its image, as if it were a source of its own. Closes the image."""

    threads = 1

    def __init__(self, source: ShardSource) -> None:
        header = read_header(source)
        slot = header.slots.get(_PARITY)
        if header.protects is None or slot is None:
            raise CorruptShardError(f"{header.identity} does not hold a parity")
        self.of = ParityOf.from_json(header.protects)
        self._source = source
        self._start = header.data_start + slot.offset
        self.nbytes = slot.nbytes
        self.close = source.close

    def read(self, start: int, stop: int) -> memoryview:
        return self._source.read(self._start + start, self._start + stop)

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        scatter(self.read(start, start + sum(map(len, parts))), parts)
