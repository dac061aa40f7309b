"""The image of a parity: a file of the same form as a shard's, for what is computed of others.

Behind its header come the envelopes of some members' images (header and digests, by which a rebuilt
block is told from a wrong one), zeros up to a whole block, and the parity. So blocks of the parity
are blocks of the file, and one that is damaged costs no other.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.ids import ShardIdentity
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher, covered_nbytes
from localckpt.memory.host_memory import round_up
from localckpt.replication.parity.members import ParityOf
from localckpt.state_dict.boxes import NO_BOXES
from localckpt.state_dict.header import (
    ImageHeader,
    frame_skeleton,
    header_length,
    parse_header,
    render_header,
    render_slots,
)
from localckpt.state_dict.identify import read_header
from localckpt.state_dict.layout import Layout, TensorSlot
from localckpt.state_dict.source import (
    PIECE_NBYTES,
    Filled,
    Places,
    ShardSource,
    scatter,
)

__all__ = [
    "ImageEnvelope",
    "ParityFrame",
    "ParityPart",
    "ParityParts",
    "envelope_nbytes",
    "read_envelope",
    "read_envelopes",
]

# Names of tensors in the file.
ENVELOPES, PARITY = "heads", "parity"

# Whoever restores it as a shard is given nothing.
_SKELETON = frame_skeleton(b"[]", NO_BOXES, pickle.dumps(None, 5))


class ParityParts(NamedTuple):
    """Writable memory in the image of a parity."""

    envelopes: memoryview
    parity: memoryview


@dataclass(frozen=True, slots=True)
class ParityFrame:
    """Image of a parity without its contents: header, envelopes and places.

    Attributes:
        header: Its first bytes.
        envelopes_nbytes: Bytes of the envelopes.
        parity_nbytes: Bytes of the parity.
        nbytes: Size of the image.
    """

    header: bytes
    envelopes_nbytes: int
    parity_nbytes: int
    nbytes: int

    @classmethod
    def of(
        cls, identity: ShardIdentity, parity_of: ParityOf, envelopes_nbytes: int, parity_nbytes: int
    ) -> ParityFrame:
        """The frame for a parity.

        Raises:
            MismatchError: An image cannot be so.
        """
        header = b""
        while True:
            fill = round_up(len(header) + envelopes_nbytes, BLOCK_NBYTES) - len(header)
            slots = (
                TensorSlot(ENVELOPES, "U8", (fill,), fill, 0),
                TensorSlot(PARITY, "U8", (parity_nbytes,), parity_nbytes, fill),
            )
            slots_json = render_slots(Layout(slots, fill + parity_nbytes))
            longer, nbytes = render_header(
                slots_json,
                fill + parity_nbytes,
                len(_SKELETON),
                identity,
                parity_of.to_json(),
                at_least_nbytes=len(header),
            )
            if len(longer) == len(header):
                return cls(longer, envelopes_nbytes, parity_nbytes, nbytes)
            header = longer

    def put(self, image: memoryview) -> ParityParts:
        """Write the frame, and zeros behind the envelopes.

        Args:
            image: Writable, exactly :attr:`nbytes` long.

        Returns:
            What is left to be filled; the digests are behind it.
        """
        start = len(self.header)
        envelopes_end = start + self.envelopes_nbytes
        parity_start = round_up(envelopes_end, BLOCK_NBYTES)
        parity_end = parity_start + self.parity_nbytes
        image[:start] = self.header
        image[envelopes_end:parity_start] = bytes(parity_start - envelopes_end)
        image[parity_end : parity_end + len(_SKELETON)] = _SKELETON
        return ParityParts(image[start:envelopes_end], image[parity_start:parity_end])


class ParityPart:
    """The parity within its image, as if it were a source of its own. Closes the image.

    Raises:
        CorruptShardError: It is no image of a parity.
        MismatchError: It does not say of which members.
    """

    def __init__(self, source: ShardSource) -> None:
        header = read_header(source)
        slot = header.slots.get(PARITY)
        if header.protects is None or slot is None or ENVELOPES not in header.slots:
            raise CorruptShardError(f"{header.identity} does not hold a parity")
        self.of = ParityOf.from_json(header.protects)
        self._source = source
        self._start = header.data_start + slot.offset
        self._nbytes = slot.nbytes
        if self._start % BLOCK_NBYTES:
            raise CorruptShardError(f"{header.identity}: its parity does not begin at a block")

    @property
    def first_block(self) -> int:
        """The block of the image with which the parity begins."""
        return self._start // BLOCK_NBYTES

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, start: int, stop: int) -> memoryview:
        return self._source.read(self._start + start, self._start + stop)

    def stream(
        self, stop: int, places: Places, filled: Filled, starts: Sequence[int] | None = None
    ) -> None:
        for start in range(0, stop, PIECE_NBYTES) if starts is None else starts:
            end = min(start + PIECE_NBYTES, stop)
            parts = places(start, end)
            scatter(self.read(start, end), parts)
            filled(start, parts)

    def close(self) -> None:
        self._source.close()


def envelope_nbytes(source: ShardSource) -> int:
    """Bytes of the header and the digests of an image together; its header must be written."""
    start = header_length(source.read(0, min(8, source.nbytes)), source.nbytes)
    return start + source.nbytes - covered_nbytes(source.nbytes)


def read_envelope(source: ShardSource) -> bytes:
    """The header and the digests of an image."""
    start = header_length(source.read(0, min(8, source.nbytes)), source.nbytes)
    header = bytes(source.read(0, start))
    return header + bytes(source.read(covered_nbytes(source.nbytes), source.nbytes))


def read_envelopes(source: ShardSource, image_nbytes: Sequence[int]) -> list[bytes]:
    """The envelopes in the image of a parity; its blocks must have been verified.

    Args:
        source: The image.
        image_nbytes: Sizes of the images whose envelopes they are, in their order.

    Raises:
        CorruptShardError: They are none.
    """
    header = read_header(source)
    at = header.data_start
    envelopes = []
    for nbytes in image_nbytes:
        start = header_length(source.read(at, at + 8), nbytes)
        stop = at + start + nbytes - covered_nbytes(nbytes)
        if stop > header.data_start + header.slots[ENVELOPES].nbytes:
            raise CorruptShardError(f"{header.identity}: a envelope in it is cut short")
        envelopes.append(bytes(source.read(at, stop)))
        at = stop
    return envelopes


class ImageEnvelope:
    """Header and digests of a lost image: tell whether blocks are its blocks.

    Args:
        envelope: From :func:`read_envelope`.
        identity: What the image is.
        nbytes: Its size.

    Raises:
        CorruptShardError: It is another's.
    """

    def __init__(self, envelope: bytes, identity: ShardIdentity, nbytes: int) -> None:
        start = header_length(envelope[:8], len(envelope))
        self._header: ImageHeader = parse_header(envelope[:start], nbytes)
        self._digests = memoryview(envelope)[start:]
        if self._header.identity != identity:
            raise CorruptShardError(f"expected the envelope of {identity}, found another's")
        if len(self._digests) != nbytes - self._header.digests_start:
            raise MismatchError(f"the envelope of {identity} is of an image of another size")
        self._hasher = BlockHasher(identity)

    def matches(self, block: int, content: memoryview) -> bool:
        """True if these are the bytes of a block, the image's digests among them."""
        start = block * BLOCK_NBYTES
        covered = max(0, min(len(content), self._header.digests_start - start))
        if covered:
            try:
                self._hasher.check(start, [content[:covered]], self._digests)
            except CorruptShardError:
                return False
        at = start + covered - self._header.digests_start
        rest = len(content) - covered
        return not rest or content[covered:] == self._digests[at : at + rest]
