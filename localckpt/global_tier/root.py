"""What the first rank does in a root on shared storage: begins saves, commits them, finds them.

One rank sees the root for all, so that ranks whose clients cache directories differently agree.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from localckpt.errors import CorruptShardError, StorageError
from localckpt.global_tier.folders import (
    RECORD_NAME,
    CommitRecord,
    Folder,
    folders_in,
    remove,
    session_root,
)
from localckpt.global_tier.root_lock import RootLock
from localckpt.global_tier.torch_dcp import METADATA_NAME
from localckpt.global_tier.write import write_durably
from localckpt.lineage import Lineage
from localckpt.storage.failures import storage_errors
from localckpt.storage.write import sync_folder

__all__ = ["BegunSave", "CheckpointRoot", "Found"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BegunSave:
    """A save as all ranks know it.

    Attributes:
        folder: The checkpoint that it is to become.
        path: Where it is written.
        save_id: Tells it from all other saves.
        lineage: Of the epoch of the job that saves; the first rank knows it.
    """

    folder: Folder
    path: Path
    save_id: str
    lineage: Lineage | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is there, and what its files must be told by."""

    folder: Folder
    save_id: str
    metadata_digest: int
    lineage: Lineage | None = None


class CheckpointRoot:
    """The checkpoints of one session.

    Args:
        root: Of all sessions.
        session_id: Which one.
        keep_last: How many checkpoints to keep; ``None`` for all.
        atomic_rename: Whether directories are renamed at once or not at all.
        timeout_s: The longest wait for another job to leave the root, in seconds.
    """

    def __init__(
        self,
        root: Path,
        session_id: str,
        *,
        keep_last: int | None,
        atomic_rename: bool,
        timeout_s: float,
    ) -> None:
        self.path = session_root(root, session_id)
        self._session_id = session_id
        self._keep_last = keep_last
        self._atomic_rename = atomic_rename
        self._timeout_s = timeout_s
        self._lock = RootLock(self.path)
        self._loaded: tuple[int, int] | None = None

    def begin(self, iteration: int, epoch: int | None) -> BegunSave:
        """Make the directory of a save, when no rank is busy with one before.

        Args:
            iteration: Its number.
            epoch: That of this attempt's saves; ``None`` for the first of them.

        Raises:
            StorageError: The root cannot be written to, or another live job saves there.
        """
        self._lock.take(self._timeout_s)
        if epoch is None:
            folders, leftovers = folders_in(self.path)
            known = [f.epoch for f in (*folders, *(leftover.folder for leftover in leftovers))]
            epoch = 1 + max(known, default=0)
        begun = self.begun(iteration, epoch, uuid.uuid4().hex)
        with storage_errors("make", begun.path):
            if begun.path.exists() and not begun.folder.has_record:
                # What a save of this number has left that failed.
                _remove(begun.path)
            begun.path.mkdir()
            try:
                sync_folder(self.path)
            except BaseException:
                begun.path.rmdir()
                raise
        return begun

    def begun(self, iteration: int, epoch: int, save_id: str) -> BegunSave:
        """The save that another rank has begun."""
        folder = Folder(self.path, iteration, epoch)
        path = folder.partial(save_id) if self._atomic_rename else folder.path
        return BegunSave(folder, path, save_id)

    def commit(
        self, save: BegunSave, metadata: bytes, files: Mapping[str, int], world_size: int
    ) -> None:
        """Make a checkpoint of what all ranks have written.

        Args:
            save: As it was begun.
            metadata: torch's, pickled.
            files: The bytes of each data file.
            world_size: How many ranks saved it.

        Raises:
            StorageError: The file system refused; it is no checkpoint.
        """
        folder = save.folder
        record = CommitRecord(
            *(self._session_id, folder.iteration, folder.epoch, save.save_id, world_size),
            files=files,
            metadata_digest=xxhash.xxh3_64_intdigest(metadata),
            lineage=save.lineage,
        )
        write_durably(save.path / METADATA_NAME, metadata)
        write_durably(save.path / RECORD_NAME, record.to_bytes())
        if self._atomic_rename:
            with storage_errors("commit", folder.path):
                save.path.rename(folder.path)
                try:
                    sync_folder(self.path)
                except BaseException:
                    # It may be gone after a power cut, so it is none.
                    folder.path.rename(save.path)
                    raise
        logger.info(
            "committed %s: %.3f GB of %d ranks", folder.path, record.nbytes / 1e9, world_size
        )

    def give_up(self, save: BegunSave) -> None:
        """Remove what there is of a save that failed."""
        _remove(save.path)

    def sweep(self, save: BegunSave | None) -> None:
        """Remove what other saves than this one have left that were never committed.

        Nobody is writing there: the root is locked, and saves follow one another.
        """
        try:
            folders, leftovers = folders_in(self.path)
            paths = [leftover.path for leftover in leftovers]
            if not self._atomic_rename:
                paths += [folder.path for folder in folders if not folder.has_record]
        except StorageError as error:
            logger.warning("what was never committed stays for now: %s", error)
            return
        for path in paths:
            if save is None or path != save.path:
                logger.info("removing %s, which is no checkpoint", path)
                _remove(path)

    def went_on_from(self, loaded: Found) -> None:
        """What is newer, until the next save, was left behind."""
        self._loaded = loaded.folder.version

    def retire(self, save: BegunSave) -> None:
        """Let older checkpoints go, now that this one is there."""
        if self._keep_last is None:
            return
        try:
            folders, _ = folders_in(self.path)
            complete = [folder for folder in folders if self._record_of(folder) is not None]
            for folder in self._let_go(complete, save.folder, self._keep_last):
                remove(folder, by_rename=self._atomic_rename)
        except StorageError as error:
            logger.warning("older checkpoints than %d stay for now: %s", self._keep_last, error)

    def find(
        self, iteration: int | None = None, older_than: tuple[int, int] | None = None
    ) -> Found | None:
        """The newest checkpoint there is.

        Args:
            iteration: Of this number only.
            older_than: Before this version only.

        Raises:
            StorageError: The root cannot be read.
            CorruptShardError: The record of the one that is asked for is damaged.
        """
        folders, _ = folders_in(self.path)
        for folder in folders:
            if iteration not in (None, folder.iteration):
                continue
            if older_than is not None and folder.version >= older_than:
                continue
            record = self._record_of(folder, asked_for=iteration is not None)
            if record is not None:
                return Found(folder, record.save_id, record.metadata_digest, record.lineage)
        return None

    def iterations(self) -> list[int]:
        """Iterations of all checkpoints, the newest first; raises StorageError."""
        folders, _ = folders_in(self.path)
        complete = [folder for folder in folders if self._record_of(folder) is not None]
        return list(dict.fromkeys(folder.iteration for folder in complete))

    def close(self) -> None:
        """Remove what was never committed, and let other jobs save here. May be called twice."""
        if self._lock.is_held:
            self.sweep(None)
        self._lock.release()

    def _let_go(self, complete: list[Folder], saved: Folder, keep_last: int) -> list[Folder]:
        """Which checkpoints go, of all that there are, the newest first."""
        loaded = self._loaded
        earlier = [folder for folder in complete if folder.epoch < saved.epoch]
        left_behind = [f for f in earlier if loaded is not None and f.version > loaded]
        # What is ahead of this job, which did not go back from it, stays until it is passed.
        ahead = [f for f in earlier if f.iteration > saved.iteration and f not in left_behind]
        counted = [folder for folder in complete if folder not in (*left_behind, *ahead)]
        # As long as few others are there, they may be wanted.
        return counted[keep_last:] + (left_behind if len(counted) >= keep_last else [])

    def _record_of(self, folder: Folder, *, asked_for: bool = False) -> CommitRecord | None:
        """The record of a checkpoint whose files are all there, or ``None``."""
        try:
            record = CommitRecord.read(folder.path)
            if record is not None:
                record.check(folder, self._session_id)
            return record
        except CorruptShardError as error:
            if asked_for:
                raise
            logger.error("%s is not counted: %s", folder.path, error)
            return None


def _remove(path: Path) -> None:
    """Remove what is no checkpoint; what cannot go now goes at a later save."""
    try:
        # First of all, so that what is half removed is not found.
        (path / RECORD_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be removed, and will be at a later save: %s", path, error)
