"""Shards in shared memory, which outlives the process: the buffer is the store.

An image is staged straight into the file that will hold it, so committing is a hash and a rename.
Retired files stay mapped and are staged into again.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from localckpt.errors import StorageError
from localckpt.ids import Series, ShardIdentity
from localckpt.state_dict.layout import PAGE_NBYTES, round_up
from localckpt.storage.buffers import Buffer, PrivateBuffer, map_shared
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import DIRTY, SPARE
from localckpt.storage.open_file import open_owned
from localckpt.storage.pool import allocate, check_memory, wait_until_free
from localckpt.storage.preflight import IN_MEMORY, file_system, try_out
from localckpt.storage.store import Store, one_at_a_time
from localckpt.storage.write import Digests, ShardWrite
from localckpt.threads import Task

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryStore", "default_root"]

logger = logging.getLogger(__name__)

_PREPARING_S = 60.0


def default_root() -> Path:
    """The store of this user on this node."""
    return Path(f"/dev/shm/localckpt-{os.getuid()}")


class MemoryStore(Store):
    """A directory in shared memory.

    Args:
        root, session_id, rank, timeout_s: As for :class:`Store`.
        num_buffers: How many saves can be under way.
        keep_last: How many checkpoints are kept; one more has its memory made ahead of time.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str,
        rank: int,
        timeout_s: float,
        *,
        num_buffers: int = 2,
        keep_last: int = 1,
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s)
        try_out(self.folder, DIRTY)
        with storage_errors("look at", self.folder):
            kind = file_system(self.folder)
        if kind not in IN_MEMORY:
            logger.warning("%s is on %s, which is not memory", self.root, kind or "a disk")
        self._num_buffers = num_buffers
        self._keep_last = keep_last
        self._series: set[Series] = set()
        self._preparing: Task[None] | None = None
        # Files by their name as dirty or committed (by identity) or as spare (by name).
        self._staged: dict[ShardIdentity, _MappedFile] = {}
        self._spares: dict[str, _MappedFile] = {}

    def stage(self, identity: ShardIdentity, nbytes: int, timeout_s: float) -> Buffer:
        wait_until_free(lambda: not self.is_busy(identity.series), timeout_s)
        self._finish_preparing()
        return self._mapped(identity, nbytes)

    @one_at_a_time
    def _mapped(self, identity: ShardIdentity, nbytes: int) -> Buffer:
        path = self._dirty(identity)
        with storage_errors("recycle a file in", self.folder):
            claimed = self._claim_spare(identity, nbytes)
        buffer = self._spares.pop(claimed, None) if claimed is not None else None
        try:
            if buffer is None:
                buffer = _MappedFile(path, nbytes, create=claimed is None)
            else:
                buffer.resize(path, nbytes)
        except StorageError:
            # The spare's space goes back to the node, which has too little.
            if buffer is not None:
                buffer.close()
            with storage_errors("remove", path):
                path.unlink(missing_ok=True)
            raise
        self._staged[identity] = buffer
        return buffer

    @one_at_a_time
    def prepare(self, series: Series, nbytes: int, pin: torch.device | None = None) -> None:
        self._series.add(series)
        wanted = (self._keep_last + 1) * len(self._series)
        if self._preparing is not None and not self._preparing.done():
            return
        if len(self.images()) < wanted:
            preparing = Task(lambda: self._make_spare(nbytes, pin))
            preparing.start("localckpt-prepare", daemon=True)
            # Once it runs: one that an interrupt kept from starting could not be waited for.
            self._preparing = preparing

    @one_at_a_time
    def is_busy(self, series: Series) -> bool:
        busy = [i for i, b in self._staged.items() if i.series == series and b.in_use]
        return len(busy) >= self._num_buffers

    def receive(self, nbytes: int, timeout_s: float) -> Buffer:
        return allocate(PrivateBuffer, nbytes)

    @one_at_a_time
    def release(self, owner: Hashable) -> None:
        for identity in [identity for identity in self._staged if identity == owner]:
            self._staged.pop(identity).close()

    @one_at_a_time
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
            final=self._free_path(identity),
            in_place=True,
        )

    @one_at_a_time
    def abandon(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        self._staged.pop(identity, None)
        buffer.close()
        with storage_errors("remove", self._dirty(identity)):
            self._dirty(identity).unlink(missing_ok=True)
            self._path(identity).unlink(missing_ok=True)

    @one_at_a_time
    def drop_unfinished(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        is_committed = False
        try:
            with storage_errors("clean up", self.folder):
                try:
                    self._dirty(identity).unlink()
                except FileNotFoundError:
                    is_committed = True
        finally:
            # Also when the store does not work: it may again, and nobody else gives this back.
            if not is_committed:
                self._staged.pop(identity, None)
                buffer.close()

    @property
    def staging_nbytes(self) -> int:
        """Bytes of all files that this process has mapped."""
        return sum(len(b.view) for b in (*self._staged.values(), *self._spares.values()))

    def close(self, unfinished: Iterable[ShardIdentity] = ()) -> None:
        if self._process != os.getpid():
            return
        self._closed = True
        self._finish_preparing()
        for buffer in (*self._staged.values(), *self._spares.values()):
            buffer.close()
        self._staged.clear()
        self._spares.clear()
        super().close(unfinished)

    def _make_spare(self, nbytes: int, pin: torch.device | None) -> None:
        name = f"ahead.{secrets.token_hex(4)}"
        path, spare = self.folder / f"{name}{DIRTY}", self.folder / f"{name}{SPARE}"
        try:
            buffer = _MappedFile.made(path, nbytes)
        except StorageError as error:
            # The save that wants it tries again, and raises.
            logger.warning("memory could not be had ahead of time: %s", error)
            return
        kept = False
        try:
            if pin is not None:
                buffer.pin(pin)
            # Who closed the store may not have waited for this.
            if not self._closed:
                # At once, or a save that claims it meanwhile would map it a second time.
                with self._lock, storage_errors("keep memory ready in", self.folder):
                    os.rename(path, spare)
                    self._spares[spare.name] = buffer
                kept = True
        except StorageError as error:
            logger.warning("memory could not be had ahead of time: %s", error)
        finally:
            if not kept:
                buffer.close()
                path.unlink(missing_ok=True)

    def _finish_preparing(self) -> None:
        preparing = self._preparing
        if preparing is not None:
            # A spare that comes later still is mapped by the save that claims it.
            preparing.wait(_PREPARING_S)

    def _became_spare(self, identity: ShardIdentity, spare: Path) -> None:
        buffer = self._staged.pop(identity, None)
        if buffer is not None:
            self._spares[spare.name] = buffer


class _MappedFile(Buffer):
    """A shard's file in shared memory, mapped. Closing it leaves the file."""

    _path: Path
    _nbytes: int
    _map: memoryview | None = None

    def __init__(self, path: Path, nbytes: int, *, create: bool, to_read: bool = False) -> None:
        super().__init__()
        self._open(path, nbytes, create=create, to_read=to_read)

    @classmethod
    def made(cls, path: Path, nbytes: int) -> _MappedFile:
        """A new one, if the node has the memory; raises StorageError if not."""
        check_memory(nbytes)
        return cls(path, nbytes, create=True)

    @property
    def in_use(self) -> bool:
        # Whoever commits it, in whatever process, takes this name from it.
        with storage_errors("look at", self._path):
            return self._path.exists()

    def give_back(self) -> None:
        """Losing its name tells that it is free."""

    def resize(self, path: Path, nbytes: int) -> None:
        """Make it the image of another shard, of another size, under another name."""
        if self._map is None or nbytes > len(self._map):
            self.close()
            self._open(path, nbytes, create=False)
            return
        before = self._nbytes
        if nbytes != before:
            # CUDA would go on to use the pages that the file had when it was pinned.
            self._unpin()
        self._path, self._nbytes = path, nbytes
        with (
            storage_errors("reserve shared memory in", path),
            open_owned(path, os.O_RDWR | os.O_NOFOLLOW) as file,
        ):
            if nbytes > before:
                # Only what is new: the kernel looks at every page that it is asked for.
                os.posix_fallocate(file.fileno(), before, nbytes - before)
            os.ftruncate(file.fileno(), nbytes)
        self._view = self._map[:nbytes]

    def close(self) -> None:
        self._unpin()
        self._view = memoryview(b"")
        # The pages go with the last view of them, however long this object is referred to.
        self._map = None

    def _open(self, path: Path, nbytes: int, *, create: bool, to_read: bool = False) -> None:
        self._path, self._nbytes = path, nbytes
        # Whole pages, so that an image that is a little larger fits the next time.
        mapped = map_shared(path, round_up(nbytes, PAGE_NBYTES), create=create, to_read=to_read)
        self._map, self._view = mapped, mapped[:nbytes]
        try:
            with storage_errors("reserve shared memory in", path):
                os.truncate(path, nbytes)
        except BaseException:
            if create:
                path.unlink(missing_ok=True)
            raise

    def _map_in_fork(self) -> None:
        self._open(self._path, self._nbytes, create=False, to_read=True)
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Callable[..., _MappedFile], tuple[Path, int]]:
        return _attach, (self._path, self._nbytes)


def _attach(path: Path, nbytes: int) -> _MappedFile:
    return _MappedFile(path, nbytes, create=False, to_read=True)
