"""Shards in files on the node's own disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localckpt.ids import Series, ShardIdentity
from localckpt.storage.buffers import Buffer, PrivateBuffer, SharedBuffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import DIRTY
from localckpt.storage.pool import BufferPool, buffer_nbytes
from localckpt.storage.preflight import IN_MEMORY, check_shared_memory, file_system, try_out
from localckpt.storage.staging import StagingFolder, remove_orphans
from localckpt.storage.store import Store, one_at_a_time
from localckpt.storage.write import Digests, ShardWrite

if TYPE_CHECKING:
    import torch

__all__ = ["DiskStore"]

logger = logging.getLogger(__name__)


class DiskStore(Store):
    """A directory on the node's disk.

    Args:
        root, session_id, rank, timeout_s: As for :class:`Store`.
        writer: Who writes: a ``"thread"`` of this process, from private memory, or another
            ``"process"``, from shared memory.
        num_buffers: How many saves can be under way.
        shared_memory: Directory of the shared buffers.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str,
        rank: int,
        timeout_s: float,
        *,
        writer: Literal["thread", "process"] = "thread",
        num_buffers: int = 2,
        shared_memory: Path = Path("/dev/shm"),
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s)
        self._shared_memory = shared_memory
        self._staging = StagingFolder(shared_memory)
        self._writer, self._num_buffers = writer, num_buffers
        remove_orphans(shared_memory)
        self._direct = try_out(self.folder, DIRTY)
        if not self._direct:
            logger.info("%s does not take O_DIRECT: writing through the page cache", self.root)
        with storage_errors("look at", self.folder):
            kind = file_system(self.folder)
        if kind in IN_MEMORY:
            logger.warning(
                "%s is on %s: checkpoints there outlive processes, but not a reboot of the node",
                self.root,
                kind,
            )
        self._pool = BufferPool(
            PrivateBuffer if writer == "thread" else self._make_shared, num_buffers
        )

    def stage(self, identity: ShardIdentity, nbytes: int, timeout_s: float) -> Buffer:
        return self._pool.take(identity.series, nbytes, timeout_s, identity)

    def prepare(self, series: Series, nbytes: int, pin: torch.device | None = None) -> None:
        self._pool.prepare(series, nbytes, pin)

    def is_busy(self, series: Series) -> bool:
        return self._pool.is_busy(series)

    def receive(self, nbytes: int, timeout_s: float) -> Buffer:
        # The buffer that this rank's next save will want anyway.
        return self._pool.take(Series(self.rank), nbytes, timeout_s, self.LOADING)

    def release(self, owner: Hashable) -> None:
        self._pool.release(owner)

    @one_at_a_time
    def write_job(
        self,
        buffer: Buffer,
        identity: ShardIdentity,
        nbytes: int,
        covered_nbytes: int,
        digests: Digests,
    ) -> ShardWrite:
        with storage_errors("recycle a file in", self.folder):
            recycled = self._claim_spare(identity, nbytes) is not None
        return ShardWrite(
            buffer,
            nbytes,
            covered_nbytes,
            identity,
            digests,
            dirty=self._dirty(identity),
            final=self._free_path(identity),
            recycled=recycled,
            direct=self._direct,
        )

    def abandon(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        if buffer.in_use and buffer.lease == lease:
            self._pool.drop(buffer)

    def drop_unfinished(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        if buffer.in_use and buffer.lease == lease:
            buffer.give_back()
        with storage_errors("clean up", self.folder):
            self._dirty(identity).unlink(missing_ok=True)

    def check_room(self, images: Collection[int], checkpoints: int, ranks: int) -> None:
        super().check_room(images, checkpoints, ranks)
        if self._writer == "process":
            with storage_errors("look at", self._shared_memory):
                status = os.statvfs(self._shared_memory)
                had = self._staging.nbytes()
            sizes = [buffer_nbytes(image) for image in images]
            check_shared_memory(self._shared_memory, status, had, sizes, self._num_buffers)

    @property
    def staging_nbytes(self) -> int:
        """Bytes of all staging buffers."""
        return self._pool.nbytes

    def close(self, unfinished: Iterable[ShardIdentity] = ()) -> None:
        self._pool.close()
        self._staging.close()
        super().close(unfinished)

    def _became_spare(self, identity: ShardIdentity, spare: Path) -> None:
        """Files on disk are found again by name."""

    def _make_shared(self, nbytes: int) -> Buffer:
        return SharedBuffer(self._staging.new_path(), nbytes)
