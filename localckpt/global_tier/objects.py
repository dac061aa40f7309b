"""Places in object stores, by URL, through fsspec.

An object is there whole once its upload is over, and nothing is renamed. It is uploaded from
buffers, of which one part at a time is copied. What a store refuses is tried again, a whole object
at a time, beside what the store's own client tries again.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from localckpt.errors import CheckpointingException, CorruptShardError, StorageError
from localckpt.storage.failures import storage_errors
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

Pieces = Callable[[], Iterable[memoryview]]
"""Makes the content of a file, from its beginning at each call."""

# A store takes at most 10,000 parts an object, so this is for files of up to 312 GiB.
_PART_NBYTES = 32 << 20
# Requests of a store take long, and many at once.
_THREADS = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_OF_NO_USE_AGAIN = (FileExistsError, FileNotFoundError, PermissionError, IsADirectoryError)
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


@dataclass(frozen=True, slots=True)
class Retries:
    """Until when, by the monotonic clock, a write is tried again that an object store refused.

    ``check`` may end it before. A file of a directory is never written to again after an error.
    """

    until: float
    check: Callable[[], object] = lambda: None


def open_place(url: str) -> ObjectPlace:
    """Return the place of a URL; raises StorageError if that cannot be used here."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        # Other ranks, and other jobs, write there, too.
        fs, key = url_to_fs(url, use_listings_cache=False)
    except Exception as error:
        # Each file system has errors of its own.
        package = _PACKAGES.get(scheme, "and what it needs for such a URL")
        raise StorageError(
            f"{url} cannot be used ({error}): run pip install fsspec {package}, and see that the "
            f"options of {scheme} in fsspec's configuration are right; or give a directory. "
            f"Nothing was made"
        ) from error
    return ObjectPlace(url.rstrip("/"), key.rstrip("/"), fs)


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """Name of an object, or of those whose names begin with it and a slash.

    Its methods are those of :class:`~localckpt.global_tier.places.FilePlace`, and raise OSError.
    """

    url: str
    _key: str = field(repr=False, compare=False)
    _fs: Any = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPlace:
        return ObjectPlace(f"{self.url}/{name}", f"{self._key}/{name}", self._fs)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def names(self) -> list[str]:
        return sorted(self._listed())

    def size(self) -> int | None:
        with _translated(), suppress(FileNotFoundError):
            return int(self._fs.info(self._key)["size"] or 0)
        return None

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        # One request for a thousand objects, where asking for each takes as many.
        wanted = {*names}
        return {name: nbytes for name, nbytes in self._listed().items() if name in wanted}

    def modified_at(self) -> float:
        with _translated():
            return float(self._fs.modified(self._key).timestamp())

    def read(self) -> bytes:
        return self.range(None, None)

    def range(self, start: int | None, stop: int | None) -> bytes:
        with _translated():
            return bytes(self._fs.cat_file(self._key, start=start, end=stop))

    def source(self) -> ObjectSource:
        if (nbytes := self.size()) is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object")
        return ObjectSource(self, nbytes)

    def write(self, pieces: Pieces, *, sync: bool, retries: Retries | None) -> None:
        self._persist(lambda: self._upload(pieces()), retries)

    def put(self, data: bytes, retries: Retries | None = None) -> None:
        self._persist(lambda: self._fs.pipe_file(self._key, data), retries)

    def create(self, data: bytes, retries: Retries | None = None) -> None:
        """Write a small object, or raise FileExistsError if another one is there.

        Where the store has no conditional put, one that is made at the same moment is lost.
        """
        self._persist(lambda: self._create(data), retries)

    def make(self) -> None:
        """Do nothing: objects make folders."""

    def sync(self) -> None:
        """Do nothing: objects are durable when they are there."""

    def remove(self) -> None:
        with _translated(), suppress(FileNotFoundError):
            self._fs.rm(self._key, recursive=True)

    def _listed(self) -> dict[str, int]:
        with _translated(), suppress(FileNotFoundError):
            found = self._fs.ls(self._key, detail=True)
            sizes = {str(one["name"]).strip("/"): int(one.get("size") or 0) for one in found}
            # Some stores have an object for the folder itself.
            sizes.pop(self._key.strip("/"), None)
            return {name.rpartition("/")[2]: nbytes for name, nbytes in sizes.items()}
        return {}

    def _upload(self, pieces: Iterable[memoryview]) -> None:
        file = self._fs.open(self._key, "wb", block_size=_PART_NBYTES)
        try:
            for piece in pieces:
                file.write(piece)
            file.close()
        except BaseException:
            _discard(file)
            raise

    def _create(self, data: bytes) -> None:
        try:
            self._fs.pipe_file(self._key, data, mode="create")
        except (NotImplementedError, OSError) as error:
            has_none = isinstance(error, NotImplementedError) or error.errno == errno.ENOSYS
            found = None if self.size() is None else self.read()
            # It is there if the answer to the request before was lost.
            if found not in (None, data):
                raise FileExistsError(errno.EEXIST, "another job has made it") from error
            if found is None and not has_none:
                raise
            if found is None:
                logger.warning("%s: the store has no conditional put", self)
                self._fs.pipe_file(self._key, data)

    def _persist(self, act: Callable[[], object], retries: Retries | None) -> None:
        """Do what the store does not refuse for good, or raise why it does."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                with _translated():
                    act()
                return
            except OSError as error:
                # Many ranks are not to come again at once.
                wait_s = pause_s * random.uniform(0.5, 1.0)
                left_s = 0.0 if retries is None else retries.until - time.monotonic()
                if isinstance(error, _OF_NO_USE_AGAIN) or left_s <= wait_s or retries is None:
                    raise
                logger.warning(
                    "could not write %s, trying again in %.1f s, for %.0f s more: %s",
                    *(self, wait_s, left_s, error.strerror or error),
                )
            # What the check raises is not about that error.
            wait_until(partial(_goes_not_on, retries), wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class ObjectSource:
    """Source of an image's bytes, or a file's, in an object."""

    views_last = True
    threads = _THREADS

    def __init__(self, place: ObjectPlace, nbytes: int) -> None:
        self._place, self.nbytes = place, nbytes

    def read(self, start: int, stop: int) -> memoryview:
        with storage_errors("read", self._place):
            data = self._place.range(start, stop) if start < stop else b""
        if len(data) != stop - start:
            raise CorruptShardError(
                f"{self._place} is cut short: it ends at byte {start + len(data)} of {self.nbytes}"
            )
        # Callers take the address of what they get, as of memory that can be written.
        return memoryview(bytearray(data))

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        data = self.read(start, start + sum(map(len, parts)))
        for part in parts:
            part[:], data = data[: len(part)], data[len(part) :]

    def fill(self, offset: int, view: memoryview) -> None:
        view[:] = self.read(offset, offset + len(view))

    def close(self) -> None:
        """Do nothing: each read is a request of its own."""


def _discard(file: Any) -> None:
    """Give up an upload; closing or collecting the file would complete it."""
    try:
        file.discard()
    except Exception as error:  # noqa: BLE001 - why it was given up is what is raised
        logger.warning("parts of an upload stay in the store: %r", error)
    with suppress(AttributeError):
        file.closed = True


def _goes_not_on(retries: Retries) -> bool:
    retries.check()
    return False


class _translated:
    """Context in which the errors of a store's client are OSErrors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        known = (OSError, CheckpointingException, MemoryError, NotImplementedError)
        if not isinstance(error, Exception) or isinstance(error, known):
            return
        text = f"{type(error).__name__}: {error}"
        if "Credential" in text:
            raise PermissionError(text) from error
        raise OSError(errno.EREMOTEIO, text) from error
