"""Shards in shared memory, which outlives the process: the buffer is the store.

An image is staged straight into the file that will hold it, so committing is a hash and a rename.
Retired files stay mapped and are staged into again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from localckpt.errors import StorageError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.layout import PAGE_NBYTES, round_up
from localckpt.storage.buffers import Buffer, PrivateBuffer, allocate, map_shared
from localckpt.storage.failures import storage_errors
from localckpt.storage.store import Store
from localckpt.storage.write import Digests, ShardWrite

__all__ = ["MemoryStore", "default_root"]


def default_root() -> Path:
    """The store of this user on this node."""
    return Path(f"/dev/shm/localckpt-{os.getuid()}")


class MemoryStore(Store):
    """A directory in shared memory; arguments as for :class:`Store`."""

    def __init__(
        self, root: str | os.PathLike[str], session_id: str, rank: int, timeout_s: float
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s)
        # Files by their name as dirty or committed (by identity) or as spare (by name).
        self._staged: dict[ShardIdentity, _MappedFile] = {}
        self._spares: dict[str, _MappedFile] = {}

    def stage(self, identity: ShardIdentity, nbytes: int, timeout_s: float) -> Buffer:
        path = self._dirty(identity)
        with storage_errors("recycle a file in", self.folder):
            claimed = self._claim_spare(identity)
        buffer = self._spares.pop(claimed, None) if claimed is not None else None
        try:
            if buffer is None:
                buffer = _MappedFile(path, nbytes, create=claimed is None)
            else:
                buffer.resize(path, nbytes)
        except StorageError:
            # The spare's space goes back to the node, which has too little.
            path.unlink(missing_ok=True)
            raise
        self._staged[identity] = buffer
        return buffer

    def receive(self, nbytes: int, timeout_s: float) -> Buffer:
        return allocate(PrivateBuffer, nbytes)

    def write_job(
        self,
        buffer: Buffer,
        identity: ShardIdentity,
        nbytes: int,
        covered_nbytes: int,
        digests: Digests,
    ) -> ShardWrite:
        return ShardWrite(
            buffer,
            nbytes,
            covered_nbytes,
            identity,
            digests,
            dirty=self._dirty(identity),
            final=self._path(identity),
            in_place=True,
        )

    def abandon(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        self._staged.pop(identity, None)
        self._dirty(identity).unlink(missing_ok=True)
        self._path(identity).unlink(missing_ok=True)
        buffer.close()

    @property
    def staging_nbytes(self) -> int:
        """Bytes of all files that this process has mapped."""
        return sum(len(b.view) for b in (*self._staged.values(), *self._spares.values()))

    def close(self) -> None:
        for buffer in (*self._staged.values(), *self._spares.values()):
            buffer.close()
        self._staged.clear()
        self._spares.clear()
        super().close()

    def _became_spare(self, identity: ShardIdentity, spare: Path) -> None:
        buffer = self._staged.pop(identity, None)
        if buffer is not None:
            self._spares[spare.name] = buffer


class _MappedFile(Buffer):
    """A shard's file in shared memory, mapped. Closing it leaves the file."""

    _path: Path
    _nbytes: int

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        self._open(path, nbytes, create=create)

    @property
    def in_use(self) -> bool:
        # Each save has a file of its own, so there is nothing to wait for.
        return False

    def give_back(self) -> None:
        """Nothing waits for it."""

    def resize(self, path: Path, nbytes: int) -> None:
        """Make it the image of another shard, of another size, under another name."""
        if nbytes > len(self._map):
            self.close()
            self._open(path, nbytes, create=False)
            return
        before = self._nbytes
        if nbytes != before:
            # CUDA would go on to use the pages that the file had when it was pinned.
            self._unpin()
        self._path, self._nbytes = path, nbytes
        with storage_errors("reserve shared memory in", path):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if nbytes > before:
                    # Only what is new: the kernel looks at every page that it is asked for.
                    os.posix_fallocate(fd, before, nbytes - before)
                os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)
        self.view = memoryview(self._map)[:nbytes]

    def close(self) -> None:
        self._unpin()
        self.view = memoryview(b"")

    def _open(self, path: Path, nbytes: int, *, create: bool) -> None:
        self._path, self._nbytes = path, nbytes
        # Whole pages, so that an image that is a little larger fits the next time.
        self._map: mmap.mmap = map_shared(path, round_up(nbytes, PAGE_NBYTES), create=create)
        self.view = memoryview(self._map)[:nbytes]
        os.truncate(path, nbytes)

    def __reduce__(self) -> tuple[Callable[..., _MappedFile], tuple[Path, int]]:
        return _attach, (self._path, self._nbytes)


def _attach(path: Path, nbytes: int) -> _MappedFile:
    return _MappedFile(path, nbytes, create=False)
