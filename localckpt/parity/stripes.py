"""Stripes of a group: whose bytes are in each, and who keeps its parity.

A group of g members has g stripes. Stripe i keeps its first parity, P, on member i, and its second,
Q, if there is one, on member i + 1 (all modulo g). Every other member contributes one chunk of its
image, in the order of the ring that begins behind the holders. So every member keeps as much parity
as any other, in the manner of RAID 5 and 6, and every image is cut into g - m chunks. All chunks
have one length; an image that is shorter counts as if zeros followed.

P is the sum of a stripe's chunks in GF(2^8), Q the sum of each chunk times x to its exponent. Pure
geometry: nothing is read or computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from localckpt.errors import MismatchError
from localckpt.memory.digests import BLOCK_NBYTES

PARITY_KIND = "parity"
"""Kind of the piece that each member of a group keeps."""

MOST_MEMBERS = 255
"""No parity group has more: so many different powers x has in the field of its arithmetic."""

MOST_PARITIES = 2
"""No parity group has more."""

# Far above any image, and sums of it stay exact in whatever reads the JSON.
MOST_NBYTES = 1 << 50


class Kind(IntEnum):
    IMAGE = 0
    PARITY = 1


@dataclass(frozen=True, slots=True)
class Strip:
    """Bytes ``start`` to ``start + nbytes`` that a member keeps of one stripe; zeros follow."""

    kind: Kind
    member: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParityLayout:
    """Layout of a group's images and of its 1 or 2 parities: how many members may be lost."""

    image_nbytes: tuple[int, ...]
    parity: int

    def __post_init__(self) -> None:
        if not isinstance(self.image_nbytes, tuple) or not all(
            _is_number(nbytes, MOST_NBYTES) for nbytes in self.image_nbytes
        ):
            raise MismatchError(
                f"the sizes of a parity group's images must be numbers of bytes from 0 to "
                f"{MOST_NBYTES}, not {self.image_nbytes!r:.200}"
            )
        if not _is_number(self.parity, MOST_PARITIES) or self.parity == 0:
            raise MismatchError(
                f"a parity group has 1 to {MOST_PARITIES} parities, not {self.parity!r:.200}"
            )
        if not self.parity + 2 <= self.members <= MOST_MEMBERS:
            raise MismatchError(
                f"a group with {self.parity} parities has {self.parity + 2} to {MOST_MEMBERS} "
                f"members, not {self.members}"
            )

    @property
    def members(self) -> int:
        return len(self.image_nbytes)

    @property
    def chunks(self) -> int:
        """Into how many chunks each image is cut; also how many contribute to a stripe."""
        return self.members - self.parity

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk: whole blocks of an image."""
        longest = -(-max(self.image_nbytes) // self.chunks)
        return -(-longest // BLOCK_NBYTES) * BLOCK_NBYTES

    @property
    def parity_nbytes(self) -> int:
        """Bytes of parity that each member keeps: its rows one after another, P first."""
        return self.parity * self.chunk_nbytes

    def contributors(self, stripe: int) -> tuple[int, ...]:
        """The members whose images are in a stripe, in the order of the ring."""
        return tuple((stripe + step) % self.members for step in range(self.parity, self.members))

    def exponent(self, stripe: int, member: int) -> int:
        """To which power of x a contributor's chunk is in Q; as a chain of doublings gives it."""
        return self.members - 1 - (member - stripe) % self.members

    def chunk(self, stripe: int, member: int) -> Strip:
        nbytes = self.image_nbytes[member]
        start = self.exponent(stripe, member) * self.chunk_nbytes
        return Strip(Kind.IMAGE, member, start, max(0, min(nbytes - start, self.chunk_nbytes)))

    def row(self, stripe: int, row: int) -> Strip:
        """Place of a stripe's parity: row 0 is P, row 1 is Q."""
        start = row * self.chunk_nbytes
        holder = (stripe + row) % self.members
        return Strip(Kind.PARITY, holder, start, self.used_nbytes(stripe))

    def rows(self, stripe: int) -> tuple[Strip, ...]:
        return tuple(self.row(stripe, row) for row in range(self.parity))

    def used_nbytes(self, stripe: int) -> int:
        """Length of a stripe's longest chunk; behind it all chunks and rows are zeros."""
        return max(self.chunk(stripe, member).nbytes for member in self.contributors(stripe))


def _is_number(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
