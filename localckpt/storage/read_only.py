"""A node's store for a process that only reads: nothing is made, renamed or claimed in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from localckpt.errors import CheckpointingException
from localckpt.ids import Series, ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.storage.buffers import Buffer, PrivateBuffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import TOKEN_NAME, session_name
from localckpt.storage.notes import read_note
from localckpt.storage.owner import Owner
from localckpt.storage.pool import BufferPool
from localckpt.storage.rank_folder import RankFolder
from localckpt.storage.store import Store
from localckpt.storage.write import Digests, ShardWrite

if TYPE_CHECKING:
    import torch

__all__ = ["ReadOnlyStore"]

logger = logging.getLogger(__name__)


class ReadOnlyStore(Store):
    """Shards of a session on this node, on disk or in shared memory, beside whoever writes them.

    A file that the job of this session lets go while it is read is an error of that read.

    Args:
        root, session_id, rank, timeout_s: As for :class:`Store`; the directory may be missing.
    """

    def __init__(
        self, root: str | os.PathLike[str], session_id: str, rank: int, timeout_s: float
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s)
        self._pool = BufferPool(PrivateBuffer)

    def _take_folder(self, timeout_s: float) -> RankFolder:
        return _SeenFolder(self.root, self.session_id, self.rank)

    def scan(self) -> list[ShardRecord]:
        return super().scan() if self._session.is_dir() else []

    def stage(self, identity: ShardIdentity, nbytes: int, timeout_s: float) -> Buffer:
        # For a shard that is computed from parity for this load, and not kept.
        return self._pool.take(identity.series, nbytes, timeout_s, identity)

    def prepare(self, series: Series, nbytes: int, pin: torch.device | None = None) -> None:
        """Do nothing: no save comes."""

    def is_busy(self, series: Series) -> bool:
        return self._pool.is_busy(series)

    def receive(self, nbytes: int, timeout_s: float) -> Buffer:
        return self._pool.take(Series(self.rank), nbytes, timeout_s, self.LOADING)

    def release(self, owner: Hashable) -> None:
        self._pool.release(owner)

    def write_job(
        self,
        buffer: Buffer,
        identity: ShardIdentity,
        nbytes: int,
        covered_nbytes: int,
        digests: Digests,
    ) -> ShardWrite:
        raise CheckpointingException(f"{identity} cannot be saved: {self.root} is only read")

    def abandon(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        self.drop_unfinished(buffer, lease, identity)

    def drop_unfinished(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        if buffer.in_use and buffer.lease == lease:
            buffer.give_back()

    def close(self, unfinished: Iterable[ShardIdentity] = ()) -> None:
        self._closed = True
        self._pool.close()

    def _quarantine(self, path: Path, why: str) -> None:
        logger.warning("%s stays as it is, and is not used: %s", path, why)

    def _became_spare(self, identity: ShardIdentity, spare: Path) -> None:
        """Never called: a reader retires nothing."""


class _SeenFolder(RankFolder):
    """A rank's folder that somebody else may own."""

    def __init__(self, root: Path, session_id: str, rank: int) -> None:
        self.session = root / session_name(session_id)
        self.path = self.session / str(rank)
        self._owner = Owner.me()
        self.token = ""
        with storage_errors("read", root):
            if (root / TOKEN_NAME).exists():
                self.token = read_note(root / TOKEN_NAME).strip()
        # All ranks of a node without a store agree on its name.
        self.token = self.token or f"{self._owner.boot} without {root}"

    @property
    def is_ours(self) -> bool:
        return False

    def leave(self) -> None:
        """Do nothing: the folder was not taken."""

    def ranks(self) -> set[int]:
        return super().ranks() if self.session.is_dir() else set()

    def refuse_other_jobs(self, owners: Collection[str], timeout_s: float) -> None:
        """Do nothing: a reader disturbs no job."""

    def begin_epoch(self, epoch: int, lineage: Lineage | None = None) -> None:
        """Do nothing: a reader begins no epoch."""
