"""Members of a parity, as its header tells them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from localckpt.errors import MismatchError
from localckpt.ids import Group
from localckpt.replication.parity.code import PARITY_KIND
from localckpt.replication.parity.stripes import ParityLayout

__all__ = ["ParityOf"]

# Far above any image, and sums of it stay exact in whatever reads the JSON.
_MOST_NBYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class ParityOf:
    """A group of ranks at one iteration.

    Args:
        group: The ranks.
        image_nbytes: Bytes of each one's image, in the group's order.

    Raises:
        MismatchError: No images can be so.
    """

    group: Group
    image_nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.image_nbytes) != len(self.group.ranks) or not all(
            type(nbytes) is int and 0 <= nbytes <= _MOST_NBYTES for nbytes in self.image_nbytes
        ):
            raise MismatchError(
                f"a parity of {len(self.group.ranks)} ranks tells the size of each one's image, "
                f"from 0 to {_MOST_NBYTES} bytes: not {self.image_nbytes!r:.200}"
            )
        # Refuses numbers that no group can have.
        _ = self.layout

    @property
    def layout(self) -> ParityLayout:
        """Layout of the bytes in stripes."""
        return ParityLayout(self.image_nbytes, self.group.tolerated)

    def to_json(self) -> str:
        """Its form in a header, where every value is a text."""
        ranks, parity = list(self.group.ranks), self.group.tolerated
        return json.dumps([ranks, parity, list(self.image_nbytes)], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: Any) -> ParityOf:
        """The inverse of :meth:`to_json`.

        Raises:
            MismatchError: That is none, or one that no group can have.
        """
        try:
            ranks, parity, image_nbytes = json.loads(text)
            return cls(Group(tuple(ranks), parity, PARITY_KIND), tuple(image_nbytes))
        except (TypeError, ValueError, RecursionError) as error:
            raise MismatchError(f"it does not say what it is the parity of: {error}") from error
