"""Checkpoints of a root on shared storage by their records, for a job, and for tools beside it.

Nothing is changed, locked or unpickled, and no torch is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from localckpt.availability.retention import Candidate, Reason, Version, reasons_to_keep
from localckpt.errors import CheckpointingException, CorruptShardError, StorageError
from localckpt.global_tier.data_files import verify_data_file
from localckpt.global_tier.folders import (
    LOCK_NAME,
    RECORD_NAME,
    CommitRecord,
    Folder,
    folders_in,
)
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import SESSION_PREFIX, session_of
from localckpt.storage.notes import NotesFile
from localckpt.trust import Trusts

logger = logging.getLogger(__name__)

_METADATA_NAME = ".metadata"


@dataclass(frozen=True, slots=True)
class SharedCheckpoint:
    """One directory that was committed.

    Attributes:
        record: Its commit record; ``None`` if that cannot be read, or speaks of another directory.
        problem: Why it cannot be loaded; ``None`` if it can, as far as its record says.
        saved_at: When it was committed, in seconds since 1970 by the file system's clock.
    """

    folder: Folder
    record: CommitRecord | None
    problem: CheckpointingException | None
    saved_at: float
    is_pinned: bool

    @property
    def is_whole(self) -> bool:
        return self.problem is None

    @property
    def nbytes(self) -> int:
        """Bytes of its data files; 0 if its record cannot be read."""
        return 0 if self.record is None else self.record.nbytes

    def files(self) -> dict[Path, int | None]:
        """Its files, and how many bytes each has, if that is recorded."""
        if self.record is None:
            return {}
        names: dict[str, int | None] = {_METADATA_NAME: None, **self.record.files}
        return {self.folder.path / name: nbytes for name, nbytes in names.items()}


class CommitFound(NamedTuple):
    """A checkpoint whose files are all there."""

    folder: Folder
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class SharedSession:
    """One training run's part of a root."""

    root: Path
    session_id: str

    def checkpoints(self) -> list[SharedCheckpoint]:
        """Directories that were committed, the newest first; data is not read."""
        found = [self.look(folder) for folder in folders_in(self.root)[0]]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def whole(self) -> list[CommitFound]:
        """Checkpoints whose files are all there, the newest first; others are logged."""
        found = [self.find(folder) for folder in folders_in(self.root)[0]]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def find(self, folder: Folder, *, asked_for: bool = False) -> CommitFound | None:
        """The checkpoint in a directory whose files are all there; damage is logged, or raised."""
        known = self.look(folder)
        if known is None:
            return None
        if known.problem is None and known.record is not None:
            return CommitFound(folder, known.record)
        if known.problem is not None and (asked_for or isinstance(known.problem, StorageError)):
            raise known.problem
        # A checkpoint that a job prunes meanwhile is not damaged.
        if folder.has_record:
            logger.error("%s is not counted: %s", folder.path, known.problem)
        return None

    def noted_trusts(self) -> Trusts:
        return NotesFile(self.root).trusts()

    def leftovers(self) -> list[Path]:
        """Directories of saves under way, of saves that were cut off, and of what is removed."""
        return [leftover.path for leftover in folders_in(self.root)[1]]

    def look(self, folder: Folder) -> SharedCheckpoint | None:
        """The checkpoint in a directory, whole or not; ``None`` if none is committed there."""
        record, problem, saved_at, is_pinned = None, None, 0.0, False
        try:
            found = CommitRecord.read(folder.path)
            if found is None:
                return None
            is_pinned = folder.is_pinned
            with storage_errors("look at", folder.path):
                saved_at = (folder.path / RECORD_NAME).stat().st_mtime
            found.check_identity(folder, self.session_id)
            record = found
            record.check_files(folder)
        except (CorruptShardError, StorageError) as error:
            if isinstance(error.__cause__, FileNotFoundError):
                # A job has pruned it meanwhile.
                return None
            problem = error
        return SharedCheckpoint(folder, record, problem, saved_at, is_pinned)


def why_kept(checkpoints: Sequence[SharedCheckpoint]) -> dict[Version, tuple[Reason, ...]]:
    """Why each checkpoint of a session stays, by the rules of the job that saved the newest one.

    Those that are not in it go at that job's next save.
    """
    records: dict[Version, CommitRecord] = {}
    candidates = []
    for known in checkpoints:
        if known.is_whole and known.record is not None:
            version = known.folder.version
            records[version] = known.record
            candidates.append(Candidate(version, known.record.metrics, known.is_pinned))
    if not records:
        return {}
    saved = max(records)
    return reasons_to_keep(records[saved].retention, candidates, saved, records[saved].resumed_from)


def find_shared_sessions(root: Path) -> list[SharedSession]:
    """The sessions of a root on shared storage; none if it is no such root."""
    try:
        names = {entry.name for entry in os.scandir(root)}
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"{root} cannot be read: {error.strerror or error}") from error
    if RECORD_NAME in names:
        raise StorageError(
            f"{root} is one checkpoint of a root on shared storage: give {root.parent}"
        )
    named = sorted(name for name in names if name.startswith(SESSION_PREFIX))
    sessions = [SharedSession(root, "")]
    sessions += [SharedSession(root / name, session_of(name)) for name in named]
    return [session for session in sessions if _is_root(session.root)]


def _is_root(folder: Path) -> bool:
    if any(folders_in(folder)):
        return True
    with storage_errors("read", folder):
        return (folder / LOCK_NAME).exists()


def verify_file(
    path: Path, nbytes: int | None, record: CommitRecord, on_read: Callable[[int], None]
) -> int:
    """Check all of a data file, or the metadata (``nbytes`` is ``None``); return its size."""
    if not path.exists() and path.parent.exists():
        raise CorruptShardError(f"{path} is gone")
    if nbytes is not None:
        verify_data_file(path, record.save_id, nbytes, on_read)
        return nbytes
    with storage_errors("read", path):
        data = path.read_bytes()
    if xxhash.xxh3_64_intdigest(data) != record.metadata_digest:
        raise CorruptShardError("it is damaged, or belongs to another save")
    return len(data)
