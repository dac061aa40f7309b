"""Stores on the node's disk, with a pool of staging buffers.

``ReadOnlyStore`` is for a process that only reads: it makes, renames and claims nothing in the
directory.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from localckpt.errors import CheckpointingException
from localckpt.ids import Piece, ShardIdentity
from localckpt.memory.limits import memory_limits
from localckpt.storage.buffers import Buffer, PrivateBuffer
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import DIRTY
from localckpt.storage.pool import BufferPool, buffer_nbytes
from localckpt.storage.preflight import (
    IN_MEMORY,
    MemoryNeeds,
    file_system,
    try_out,
)
from localckpt.storage.problem import Problem
from localckpt.storage.rank_folder import SeenFolder
from localckpt.storage.slot import Slot
from localckpt.storage.staging import remove_orphans
from localckpt.storage.store import Stored

if TYPE_CHECKING:
    import torch

__all__ = ["DiskStore", "PooledStore", "ReadOnlyStore"]

logger = logging.getLogger(__name__)


class PooledStore(DirectoryStore):
    """Directory store whose slots use a pool of staging buffers.

    Args:
        root, session_id, rank, timeout_s: As for :class:`DirectoryStore`.
        num_buffers: Number of saves that can be under way at once.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str,
        rank: int,
        timeout_s: float,
        num_buffers: int,
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s, num_buffers)
        self._pool = BufferPool(PrivateBuffer, num_buffers)

    def prepare(self, piece: Piece, nbytes: int, gpu: torch.device | None = None) -> None:
        self._sizes[piece] = nbytes
        self._pool.prepare(piece, nbytes, gpu)

    def is_busy(self) -> bool:
        return any(map(self._pool.is_busy, self.image_nbytes))

    def planned_nbytes(self) -> tuple[int, int, bool]:
        total_nbytes = sum(map(buffer_nbytes, self.image_nbytes.values()))
        return self.num_buffers * total_nbytes, 0, False

    def memory_needs(self, nbytes: int) -> MemoryNeeds:
        return MemoryNeeds(
            buffer_nbytes(nbytes), self.num_buffers, 0, self._pool.nbytes, memory_limits()
        )

    def limit_buffers(self, count: int) -> None:
        super().limit_buffers(count)
        self._pool.limit(count)

    def close(self) -> None:
        self._pool.close()
        super().close()

    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        # A load also takes a staging buffer, since this rank's next save needs one anyway.
        return self._pool.take(slot.identity.piece, slot.nbytes, timeout_s, slot)

    def _give_back(self, slot: Slot, *, was_unfinished: bool) -> None:
        # No save of this rank needs memory of the size of another rank's shard again.
        is_own = slot.is_kept or slot.identity.rank == self.rank
        if is_own and (buffer := slot.buffer) is not None:
            buffer.give_back()
        else:
            self._drop_memory(slot)

    def _drop_memory(self, slot: Slot) -> None:
        # By owner, since an interrupt may have come before slot.take() recorded the buffer.
        self._pool.release(slot)

    def _was_recycled(self, identity: ShardIdentity, recycled: Path) -> None:
        """Do nothing: recycled files on disk are found by name."""


class ReadOnlyStore(PooledStore):
    """Store for reading a session's pieces on this node, on disk or in shared memory.

    A job may write the session at the same time; a read of a file that the job retires meanwhile
    raises.

    Args:
        root, session_id, rank, timeout_s: As for :class:`DirectoryStore`; the directory may be
            missing.
    """

    def __init__(
        self, root: str | os.PathLike[str], session_id: str, rank: int, timeout_s: float
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s, 2)

    def _take_folder(self, timeout_s: float) -> SeenFolder:
        return SeenFolder(self.root, self.session_id, self.rank)

    def reserve(
        self, identity: ShardIdentity, nbytes: int, timeout_s: float, *, is_kept: bool = True
    ) -> Slot:
        # Never kept: a shard recovered from redundancy serves this load alone.
        return super().reserve(identity, nbytes, timeout_s, is_kept=False)

    def list_stored(self) -> list[Stored]:
        return super().list_stored() if self._session.is_dir() else []

    def _write_options(self, slot: Slot) -> NoReturn:
        raise CheckpointingException(f"{slot.identity} cannot be saved: {self.root} is only read")

    def _quarantine(self, path: Path, problem: Problem, *, stays: bool = False) -> None:
        logger.warning("%s stays as it is, and is not used: %s", path, problem)


class DiskStore(PooledStore):
    """Store in a directory on the node's disk.

    Args:
        root, session_id, rank, timeout_s: As for :class:`DirectoryStore`.
        num_buffers: Number of saves that can be under way at once.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str,
        rank: int,
        timeout_s: float,
        *,
        num_buffers: int = 2,
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s, num_buffers)
        remove_orphans()
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

    def _write_options(self, slot: Slot) -> dict[str, bool]:
        with storage_errors("recycle a file in", self.folder):
            recycled = self._claim_recycled(slot.identity, slot.nbytes) is not None
        return {"recycled": recycled, "direct": self._direct}
