"""A shard's source that remembers whether it could be read."""

from __future__ import annotations

from collections.abc import Sequence

from localckpt.errors import CorruptShardError, StorageError
from localckpt.state_dict.source import Filled, MemorySource, Places, ShardSource

__all__ = ["WatchedSource"]


class WatchedSource:
    """Reads from another source, which it closes."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self.views_last = isinstance(source, MemorySource)
        self.refused: StorageError | CorruptShardError | None = None

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        try:
            return self._source.read(start, stop)
        except (StorageError, CorruptShardError) as error:
            self.refused = error
            raise

    def stream(
        self, stop: int, places: Places, filled: Filled, starts: Sequence[int] | None = None
    ) -> None:
        self._source.stream(stop, places, filled, starts)

    def close(self) -> None:
        self._source.close()
