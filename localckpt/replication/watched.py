"""Source of a shard that keeps the error of a failed read."""

from __future__ import annotations

from collections.abc import Sequence

from localckpt.errors import CorruptShardError, StorageError
from localckpt.state_dict.source import Filled, Places, ShardSource, views_last

__all__ = ["WatchedSource"]


class WatchedSource:
    """Source of another source's bytes, which closes that source."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self.views_last = views_last(source)
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
