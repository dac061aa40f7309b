"""Log lines about a long read of shards. A short read has none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from localckpt.state_dict.source import Filled, Places, ShardSource, views_last

__all__ = ["CountedSource", "ReadProgress"]

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


class ReadProgress:
    """Progress of a read, logged every ten seconds while it goes on.

    Args:
        what: The work, for the message, as in "reading iteration 7".
        nbytes: Number of bytes that are to be read.
    """

    def __init__(self, what: str, nbytes: int) -> None:
        self._what = what
        self._nbytes = nbytes
        self._done_nbytes = 0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._logged = self._began

    def add(self, nbytes: int) -> None:
        """Count bytes that have been read; may be called from several threads."""
        now = time.monotonic()
        with self._lock:
            self._done_nbytes += nbytes
            done_nbytes = self._done_nbytes
            if now - self._logged < _EVERY_S or done_nbytes >= self._nbytes:
                return
            self._logged = now
        rate = done_nbytes / (now - self._began)
        logger.info(
            "%s: %.1f of %.1f GB after %.0f s, %.2f GB/s, about %.0f s left",
            self._what, done_nbytes / 1e9, self._nbytes / 1e9, now - self._began, rate / 1e9,
            (self._nbytes - done_nbytes) / rate,
        )  # fmt: skip


class CountedSource:
    """Source of another source's bytes that counts what is read.

    Args:
        source: The source that is read; closed with this one.
        progress: Counts the bytes.
    """

    def __init__(self, source: ShardSource, progress: ReadProgress) -> None:
        self._source = source
        self._progress = progress
        self.views_last = views_last(source)

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        view = self._source.read(start, stop)
        self._progress.add(stop - start)
        return view

    def stream(
        self, stop: int, places: Places, filled: Filled, starts: Sequence[int] | None = None
    ) -> None:
        def count(start: int, parts: list[memoryview]) -> None:
            filled(start, parts)
            self._progress.add(sum(map(len, parts)))

        self._source.stream(stop, places, count, starts)

    def close(self) -> None:
        self._source.close()
