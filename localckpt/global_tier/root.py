"""Root of checkpoints on shared storage, where the first rank begins, commits and finds them.

One rank sees the root for all, so that ranks whose clients cache directories differently agree. One
job saves there at a time, as long as its first rank lives.
"""

from __future__ import annotations

import logging
import secrets
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.global_tier.folders import (
    RECORD_NAME,
    CommitRecord,
    Folder,
    Leftover,
    folders_in,
    session_root,
)
from localckpt.global_tier.metadata import METADATA_NAME
from localckpt.global_tier.removal import pin, put_back_if_pinned, remove, remove_folder, unpin
from localckpt.global_tier.retention import Candidate, Retention, reasons_to_keep
from localckpt.global_tier.root_lock import RootLock
from localckpt.global_tier.write_files import write_durably
from localckpt.lineage import EpochId, Lineage, Origin, Resumed, begin_lineage
from localckpt.resuming import Resuming
from localckpt.storage.failures import storage_errors
from localckpt.storage.trust_notes import TrustNotes
from localckpt.storage.write import sync_folder
from localckpt.trust import choose

__all__ = ["BegunSave", "CheckpointRoot", "Found"]

logger = logging.getLogger(__name__)

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BegunSave:
    """A save as all ranks know it.

    Attributes:
        folder: The checkpoint that it is to become.
        path: Where it is written.
        save_id: Tells it from all other saves.
        lineage: Of the epoch of the job that saves; only the first rank knows it.
        metrics: Values that were given with it; those of the first rank are recorded.
    """

    folder: Folder
    path: Path
    save_id: str
    lineage: Lineage | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is there, and what its files must be told by."""

    folder: Folder
    save_id: str
    metadata_digest: int
    lineage: Lineage | None = None

    def to_json(self) -> list[Any]:
        lineage = None if self.lineage is None else self.lineage.to_json()
        return [*self.folder.version, self.save_id, self.metadata_digest, lineage]

    @classmethod
    def from_json(cls, root: Path, fields: list[Any]) -> Found:
        epoch, iteration, save_id, digest, lineage_json = fields
        lineage = None if lineage_json is None else Lineage.from_json(lineage_json)
        return cls(Folder(root, iteration, epoch), save_id, digest, lineage)


class CheckpointRoot:
    """The checkpoints of one session.

    Args:
        root: Of all sessions.
        session_id: Which one.
        retention: Rules by which checkpoints are kept.
        atomic_rename: Whether directories are renamed at once or not at all.
        timeout_s: The longest wait for another job to leave the root, in seconds.
        max_attempts: As for :class:`GlobalCheckpointManager`.

    Attributes:
        resuming: Counts starts of the job in vain; on the first rank.
    """

    def __init__(
        self,
        root: Path,
        session_id: str,
        *,
        retention: Retention,
        atomic_rename: bool,
        timeout_s: float,
        max_attempts: int | None,
    ) -> None:
        self.path = session_root(root, session_id)
        self._notes = TrustNotes(self.path)
        self.resuming = Resuming(self._notes, max_attempts)
        self._session_id = session_id
        self._retention = retention
        self._atomic_rename = atomic_rename
        self._timeout_s = timeout_s
        self._lock = RootLock(self.path)
        # A save and a drain may begin at the same time, in two threads.
        self._beginning = threading.Lock()
        self._draining: set[Path] = set()
        # Of this start's saves: the epoch from the first of them on, and what it resumed from.
        self._epoch: int | None = None
        self._lineage: Lineage | None = None
        self._resumed = Resumed()
        self._loaded: tuple[int, int] | None = None

    def begin(self, iteration: int, lineage: Lineage | None) -> BegunSave:
        """Make the directory of a save on the first rank, when no rank is busy with one before.

        Args:
            iteration: Its number.
            lineage: Of the job's epoch on the nodes; ``None`` if it saves here alone.

        Raises:
            StorageError: The root cannot be written to, or another live job saves there.
        """
        with self._beginning:
            return self._begin(iteration, lineage)

    def _begin(self, iteration: int, lineage: Lineage | None) -> BegunSave:
        self._lock.take(self._timeout_s)
        epoch = self._epoch
        if epoch is None:
            epoch = _next_epoch(*folders_in(self.path))
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
        self._epoch, self._lineage = epoch, lineage or self._lineage
        if self._lineage is None:
            started = EpochId(epoch, secrets.randbelow(2**32))
            self._lineage = begin_lineage(started, self._resumed, [], {})
        return begun

    def begun(
        self, iteration: int, epoch: int, save_id: str, metrics: Mapping[str, float] | None = None
    ) -> BegunSave:
        """The save that the first rank has begun, which alone knows its lineage."""
        folder = Folder(self.path, iteration, epoch)
        path = folder.partial(save_id) if self._atomic_rename else folder.path
        return BegunSave(folder, path, save_id, self._lineage, metrics or {})

    def begin_drain(
        self, iteration: int, save_id: str, lineage: Lineage | None
    ) -> tuple[BegunSave, bool]:
        """Make the directory of a drain on the first rank, or go on in that of an attempt before.

        Args:
            iteration: Number of the checkpoint.
            save_id: The same for all attempts to drain it.
            lineage: Of the epoch that saved it on the nodes.

        Returns:
            The drain, which :meth:`end_drain` ends, and whether the checkpoint is there already.

        Raises:
            CheckpointingException: A newer checkpoint is there, or another one of this iteration.
            StorageError: The root cannot be written to, or another live job saves there.
        """
        with self._beginning:
            self._lock.take(self._timeout_s)
            folders, leftovers = folders_in(self.path)
            for folder in (folder for folder in folders if folder.iteration == iteration):
                record = self._record_of(folder)
                if record is not None and record.save_id == save_id:
                    return BegunSave(folder, folder.path, save_id, record.lineage), True
            epoch = self._epoch
            if epoch is None:
                epoch = _next_epoch(folders, [left for left in leftovers if not left.is_drain])
            begun = self.drain(iteration, epoch, save_id, lineage)
            self._require_newest(begun, folders)
            self._draining.add(begun.path)
            try:
                self._make_drain(begun, [left for left in leftovers if left.is_drain])
            except BaseException:
                self._draining.discard(begun.path)
                raise
            self._epoch = epoch
            return begun, False

    def drain(
        self, iteration: int, epoch: int, save_id: str, lineage: Lineage | None = None
    ) -> BegunSave:
        """The drain that the first rank has begun, which alone knows its lineage."""
        folder = Folder(self.path, iteration, epoch)
        path = folder.drained(save_id) if self._atomic_rename else folder.path
        return BegunSave(folder, path, save_id, lineage)

    def end_drain(self, drain: BegunSave) -> None:
        """Leave a drain, committed or not; what it has written stays for the next attempt."""
        self._draining.discard(drain.path)

    def _make_drain(self, drain: BegunSave, before: Sequence[Leftover]) -> None:
        mine = [left for left in before if left.folder.drained(drain.save_id) == left.path]
        for left in before:
            if left not in mine[:1] and left.path not in self._draining:
                _remove(left.path)
        with storage_errors("make", drain.path):
            if mine and mine[0].path != drain.path:
                mine[0].path.rename(drain.path)
            elif not mine:
                if drain.path.exists():
                    # Without renames: of a save that failed, or of a drain.
                    _remove(drain.path)
                drain.path.mkdir()
            sync_folder(self.path)

    def _require_newest(self, drain: BegunSave, folders: Sequence[Folder]) -> None:
        """Check that what a restart would take from here is not newer than what is drained."""
        if drain.folder.has_record:
            raise CheckpointingException(
                f"iteration {drain.folder.iteration} is on shared storage already, saved in "
                f"another way: {drain.folder.path}. It was left as it is"
            )
        for folder in folders:
            if folder.epoch == drain.folder.epoch or folder.iteration < drain.folder.iteration:
                continue
            if self._loaded is not None and folder.version > self._loaded:
                # The job went back from it.
                continue
            record = self._record_of(folder)
            if record is None or _is_given_up(record, drain.lineage):
                continue
            raise CheckpointingException(
                f"{folder.path} is newer than iteration {drain.folder.iteration}, which would "
                f"stand before it: nothing was drained. If the job went back from it, load() what "
                f"it goes on from by this manager, or remove it"
            )

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
            metrics=save.metrics,
            retention=self._retention,
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

    def roll_back(self, save: BegunSave) -> None:
        """Remove what there is of a save that failed."""
        _remove(save.path)

    def sweep(self, save: BegunSave | None) -> None:
        """Remove what other saves than this one have left that were never committed.

        Nobody is writing there: the root is locked, and saves follow one another. What a drain has
        left stays until something newer is there: the next attempt goes on from it.
        """
        try:
            folders, leftovers = folders_in(self.path)
            newest = self._newest_for(leftovers, folders)
            paths = [
                leftover.path
                for leftover in leftovers
                if not _is_put_back(leftover)
                and not (leftover.is_drain and leftover.folder.iteration > newest)
            ]
            if not self._atomic_rename:
                paths += [folder.path for folder in folders if not folder.has_record]
        except StorageError as error:
            logger.warning("what was never committed stays for now: %s", error)
            return
        for path in paths:
            if path not in self._draining and (save is None or path != save.path):
                logger.info("removing %s, which is no checkpoint", path)
                _remove(path)

    def _newest_for(self, leftovers: Sequence[Leftover], folders: Sequence[Folder]) -> int:
        """Highest iteration that is committed, if there are drains to compare with; else -1."""
        if not any(leftover.is_drain for leftover in leftovers):
            return -1
        return max((folder.iteration for folder in folders if folder.has_record), default=-1)

    def go_on_from(self, loaded: Found) -> None:
        """Begin a new epoch at the next save. What is newer until then was left behind."""
        origin: Origin = "elsewhere" if loaded.lineage is None else "shared"
        self._resumed = Resumed(origin, loaded.folder.iteration, loaded.lineage)
        self._epoch = self._lineage = None
        self._loaded = loaded.folder.version

    def note_resume(self, loaded: Found) -> None:
        """Note on the first rank that training is about to go on from what was loaded."""
        self.resuming.begin(loaded.folder.as_checkpoint)

    def prune(self, save: BegunSave) -> list[int]:
        """Remove older checkpoints, now that this one is there; the iterations of those."""
        removed: list[int] = []
        if self._retention.keeps_all:
            return removed
        try:
            complete = {
                folder.version: Candidate(folder.version, record.metrics, folder.is_pinned)
                for folder, record in self._complete()
            }
            kept = reasons_to_keep(
                self._retention, complete.values(), save.folder.version, self._loaded
            )
            for epoch, iteration in sorted(complete.keys() - kept.keys()):
                if remove(Folder(self.path, iteration, epoch), by_rename=self._atomic_rename):
                    removed.append(iteration)
        except StorageError as error:
            logger.warning("checkpoints that may go stay for now: %s", error)
        return removed

    def pin(self, iteration: int) -> None:
        """Have every job keep the newest checkpoint of an iteration until it is unpinned.

        Raises:
            NoReplicasAvailableError: There is none.
            StorageError: The file system refused.
        """
        found = self.find(iteration)
        if found is None:
            raise NoReplicasAvailableError(self._why_not_there(iteration))
        pin(found.folder)

    def unpin(self, iteration: int) -> None:
        """Leave all checkpoints of an iteration to the retention of the jobs that save.

        Raises:
            NoReplicasAvailableError: There is none.
            StorageError: The file system refused.
        """
        folders = [f for f in folders_in(self.path)[0] if f.iteration == iteration]
        if not folders:
            raise NoReplicasAvailableError(self._why_not_there(iteration))
        for folder in folders:
            unpin(folder)

    def find(
        self, iteration: int | None = None, older_than: tuple[int, int] | None = None
    ) -> Found | None:
        """The newest checkpoint there is.

        Args:
            iteration: Of this number only.
            older_than: Before this version only.

        Raises:
            NoReplicasAvailableError: All that there is was given up, and none asked for.
            StorageError: The root cannot be read.
            CorruptShardError: The record of the one that is asked for is damaged.
        """
        folders, _ = folders_in(self.path)
        for folder in self._usable(folders) if iteration is None else folders:
            if iteration not in (None, folder.iteration):
                continue
            if older_than is not None and folder.version >= older_than:
                continue
            record = self._record_of(folder, asked_for=iteration is not None)
            if record is not None:
                return Found(folder, record.save_id, record.metadata_digest, record.lineage)
        return None

    def iterations(self) -> list[int]:
        """Iterations of the checkpoints that a restart tries, in their order.

        Raises:
            NoReplicasAvailableError: All that there is was given up.
            StorageError: The root cannot be read.
        """
        usable = self._usable([folder for folder, _ in self._complete()])
        return list(dict.fromkeys(folder.iteration for folder in usable))

    def _usable(self, folders: Sequence[Folder]) -> list[Folder]:
        """The directories that the job was not resumed from in vain too often."""
        trust = self.resuming.trust = self._notes.read()
        by_checkpoint = {folder.as_checkpoint: folder for folder in folders}
        choice = choose([*by_checkpoint], trust, self.resuming.max_attempts, self.resuming.current)
        given_up = {**choice.quarantined, **choice.exhausted}
        texts = [f"{by_checkpoint[checkpoint].path}: {why}" for checkpoint, why in given_up.items()]
        if given_up and not choice.usable:
            raise NoReplicasAvailableError(
                f"no checkpoint on shared storage is left to resume from, and nothing was started "
                f"over or removed. {'; '.join(texts)}. That several checkpoints fail alike speaks "
                f"for the program or its data: once the cause is gone, start with "
                f"max_attempts=None; with another session_id the job starts from the beginning"
            )
        for text in texts:
            logger.warning("passed over: %s", text)
        return [by_checkpoint[checkpoint] for checkpoint in choice.usable]

    def close(self) -> None:
        """Remove what was never committed, and let other jobs save here. May be called twice."""
        if self._lock.is_held:
            self.sweep(None)
        self._lock.release()

    def _complete(self) -> list[tuple[Folder, CommitRecord]]:
        """Directories of all checkpoints whose files are there, with their records, newest first.

        Raises:
            StorageError: The root cannot be read.
        """
        folders, _ = folders_in(self.path)
        records = ((folder, self._record_of(folder)) for folder in folders)
        return [(folder, record) for folder, record in records if record is not None]

    def _why_not_there(self, iteration: int) -> str:
        there = ", ".join(str(folder.iteration) for folder, _ in self._complete()[:_SHOWN])
        return (
            f"there is no checkpoint of iteration {iteration} under {self.path}; the newest are: "
            f"{there or 'none'}. Nothing was changed"
        )

    def _record_of(self, folder: Folder, *, asked_for: bool = False) -> CommitRecord | None:
        """The record of a checkpoint whose files are all there, or ``None``."""
        try:
            record = CommitRecord.read(folder.path)
            if record is not None:
                record.check_identity(folder, self._session_id)
                record.check_files(folder)
            return record
        except CorruptShardError as error:
            if asked_for:
                raise
            logger.error("%s is not counted: %s", folder.path, error)
            return None


def _next_epoch(folders: Sequence[Folder], leftovers: Sequence[Leftover]) -> int:
    epochs = [f.epoch for f in (*folders, *(leftover.folder for leftover in leftovers))]
    return 1 + max(epochs, default=0)


def _is_given_up(record: CommitRecord, lineage: Lineage | None) -> bool:
    """Return whether a lineage went back from a checkpoint."""
    if lineage is None or record.lineage is None:
        return False
    return lineage.gives_up(record.lineage.epoch, record.iteration)


def _remove(path: Path) -> None:
    """Remove what is no checkpoint; what cannot go now goes at a later save."""
    try:
        remove_folder(path)
    except OSError as error:
        logger.warning("%s could not be removed, and will be at a later save: %s", path, error)


def _is_put_back(leftover: Leftover) -> bool:
    """Give a checkpoint its name again that was pinned when a job that ended was removing it."""
    try:
        if leftover.path != leftover.folder.removed or not put_back_if_pinned(leftover.folder):
            return False
    except OSError as error:
        logger.warning("%s is pinned, and cannot be put back yet: %s", leftover.path, error)
    return True
