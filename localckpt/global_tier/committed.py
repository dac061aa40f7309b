"""Checkpoints that are committed under a root on shared storage, as the first rank finds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localckpt.errors import CorruptShardError, NoReplicasAvailableError
from localckpt.global_tier.folders import CommitRecord, Folder, folders_in
from localckpt.global_tier.removal import pin, unpin
from localckpt.lineage import Lineage
from localckpt.resuming import Resuming
from localckpt.storage.trust_notes import TrustNotes
from localckpt.trust import choose

__all__ = ["Committed", "Found"]

logger = logging.getLogger(__name__)

_SHOWN = 10


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


class Committed:
    """The committed checkpoints of one session.

    Args:
        path: Directory of the session.
        session_id: Its name.
        max_attempts: As for :class:`GlobalCheckpointManager`.
        check: Raises StorageError if others can write to the directory, or it is gone; it does
            nothing for a manager that only reads.

    Attributes:
        resuming: Counts starts of the job in vain; on the first rank.
    """

    def __init__(
        self,
        path: Path,
        session_id: str,
        max_attempts: int | None,
        check: Callable[[], None],
    ) -> None:
        self.path = path
        self._check = check
        self._session_id = session_id
        self._notes = TrustNotes(path)
        self.resuming = Resuming(self._notes, max_attempts)

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
        self._check()
        listed: list[Folder] | None = None
        while True:
            before, (listed, _) = listed, folders_in(self.path)
            if listed == before:
                return None
            # Else a job has committed one and pruned those that were listed, so look again.
            for folder in self._usable(listed) if iteration is None else listed:
                if iteration not in (None, folder.iteration):
                    continue
                if older_than is not None and folder.version >= older_than:
                    continue
                record = self.record_of(folder, asked_for=iteration is not None)
                if record is not None:
                    return Found(folder, record.save_id, record.metadata_digest, record.lineage)

    def iterations(self) -> list[int]:
        """Iterations of the checkpoints that a restart tries, in their order.

        Raises:
            NoReplicasAvailableError: All that there is was given up.
            StorageError: The root cannot be read.
        """
        self._check()
        usable = self._usable([folder for folder, _ in self.complete()])
        return list(dict.fromkeys(folder.iteration for folder in usable))

    def _usable(self, folders: Sequence[Folder]) -> list[Folder]:
        """The directories that the job was not resumed from in vain too often."""
        trust = self.resuming.trust = self._notes.read()
        by_checkpoint = {folder.as_checkpoint: folder for folder in folders}
        choice = choose([*by_checkpoint], trust, self.resuming.max_attempts)
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

    def complete(self) -> list[tuple[Folder, CommitRecord]]:
        """Directories of all checkpoints whose files are there, with their records, newest first.

        Raises:
            StorageError: The root cannot be read.
        """
        folders, _ = folders_in(self.path)
        records = ((folder, self.record_of(folder)) for folder in folders)
        return [(folder, record) for folder, record in records if record is not None]

    def _why_not_there(self, iteration: int) -> str:
        there = ", ".join(str(folder.iteration) for folder, _ in self.complete()[:_SHOWN])
        return (
            f"there is no checkpoint of iteration {iteration} under {self.path}; the newest are: "
            f"{there or 'none'}. Nothing was changed"
        )

    def record_of(self, folder: Folder, *, asked_for: bool = False) -> CommitRecord | None:
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
            # A checkpoint that a job prunes meanwhile is not damaged.
            if folder.has_record:
                logger.error("%s is not counted: %s", folder.path, error)
            return None

    def note_resume(self, loaded: Found) -> None:
        """Note on the first rank what was loaded, before training goes on from it."""
        self.resuming.begin(loaded.folder.as_checkpoint)

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
