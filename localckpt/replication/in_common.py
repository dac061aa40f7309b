"""Parts of images that two ranks have in common, and so need not send to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from localckpt.state_dict.common_bytes import CommonBytes, Remaining, complete
from localckpt.state_dict.source import MemorySource, ShardSource

__all__ = ["InCommon", "Offer"]


class Offer(NamedTuple):
    """Part of a rank's announcement that says how it could exchange images.

    Attributes:
        on_gpu: Whether the image can be sent from GPU memory.
        digests: The digests of what other ranks may have as well, by the names of the groups.
    """

    on_gpu: bool
    digests: dict[str, str]


class InCommon:
    """Bytes that this rank's image has in common with the image of one other rank.

    Args:
        image: This rank's image.
        groups: What others may have as well.
        digests: The digests of the other rank's groups.

    Attributes:
        nbytes: Number of bytes that both have.
    """

    def __init__(
        self, image: memoryview, groups: Mapping[str, CommonBytes], digests: Mapping[str, str]
    ) -> None:
        self._image = image
        self._groups = {
            name: group for name, group in groups.items() if digests.get(name) == group.digest
        }
        self.nbytes = sum(group.nbytes for group in self._groups.values())

    def outgoing(self, source: ShardSource) -> ShardSource:
        """Return the source of what the other rank lacks of this rank's image."""
        if not self._groups or not isinstance(source, MemorySource):
            return source
        return Remaining(source, (span for g in self._groups.values() for span in g.spans))

    def room(self, image: memoryview) -> memoryview:
        """Return the memory for what comes of the other rank's image, within that of all of it."""
        return image[self.nbytes :]

    def complete(self, image: memoryview) -> None:
        """Add what did not come to the other rank's image.

        Raises:
            CorruptShardError: What came does not say where that belongs.
        """
        if self._groups:
            complete(image, self._image, self._groups)
