"""Root of checkpoints on shared storage, where the first rank begins, commits and prunes them.

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

import xxhash

from localckpt.availability.retention import Candidate, Retention, reasons_to_keep
from localckpt.errors import CheckpointingException, StorageError
from localckpt.global_tier.committed import Committed, Found
from localckpt.global_tier.folders import (
    RECORD_NAME,
    CommitRecord,
    Folder,
    Leftover,
    folders_in,
    session_root,
)
from localckpt.global_tier.leftovers import remove_leftovers, try_to_remove
from localckpt.global_tier.metadata import METADATA_NAME
from localckpt.global_tier.removal import remove
from localckpt.global_tier.root_lock import RootLock
from localckpt.global_tier.write_files import write_durably
from localckpt.lineage import EpochId, Lineage, Origin, Point, Resumed, begin_lineage
from localckpt.own_folders import folder_mode
from localckpt.storage.failures import storage_errors
from localckpt.storage.write import sync_folder

__all__ = ["BegunSave", "CheckpointRoot"]

logger = logging.getLogger(__name__)


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


class CheckpointRoot:
    """The checkpoints of one session.

    Args:
        root: Of all sessions.
        session_id: Which one.
        retention: Rules by which checkpoints are kept.
        atomic_rename: Whether directories are renamed at once or not at all.
        timeout_s: The longest wait for another job to leave the root, in seconds.
        max_attempts: As for :class:`GlobalCheckpointManager`.
        is_read_only: Whether the checkpoints are only read, which may be another user's.

    Attributes:
        committed: The checkpoints that are there.
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
        is_read_only: bool,
    ) -> None:
        self.path = session_root(root, session_id)
        below = self.path.relative_to(root).parts
        self._lock = RootLock(root, *below)
        self.committed = Committed(
            *(self.path, session_id, max_attempts),
            (lambda: None) if is_read_only else self._lock.look,
        )
        self._session_id = session_id
        self._retention = retention
        self._atomic_rename = atomic_rename
        self._timeout_s = timeout_s
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
                try_to_remove(begun.path)
            begun.path.mkdir(folder_mode(begun.path.parent))
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
                record = self.committed.record_of(folder)
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
                try_to_remove(left.path)
        with storage_errors("make", drain.path):
            if mine and mine[0].path != drain.path:
                mine[0].path.rename(drain.path)
            elif not mine:
                if drain.path.exists():
                    # Without renames: of a save that failed, or of a drain.
                    try_to_remove(drain.path)
                drain.path.mkdir(folder_mode(drain.path.parent))
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
            record = self.committed.record_of(folder)
            if record is None or record.is_left_by(drain.lineage):
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
        try_to_remove(save.path)

    def sweep(self, save: BegunSave | None) -> None:
        """Remove what other saves than this one have left that were never committed.

        Nobody is writing there: the root is locked, and saves follow one another.
        """
        writing = {*self._draining, *(() if save is None else [save.path])}
        remove_leftovers(self.path, writing, atomic_rename=self._atomic_rename)

    def go_on_from(self, loaded: Found) -> None:
        """Begin a new epoch at the next save. What is newer until then was left behind."""
        origin: Origin = "elsewhere" if loaded.lineage is None else "shared"
        self._resumed = Resumed(origin, loaded.folder.iteration, loaded.lineage)
        self._epoch = self._lineage = None
        self._loaded = loaded.folder.version

    def go_back(self, iteration: int) -> list[Point]:
        """Begin a new epoch at the next save, after going back to what another tier has.

        Args:
            iteration: Iteration that the job goes on from.

        Returns:
            What the job goes back from, as far as its lineage is known.

        Raises:
            StorageError: The root cannot be read.
        """
        there = self.committed.complete()
        self._epoch = self._lineage = None
        older = (folder.version for folder, _ in there if folder.iteration <= iteration)
        self._loaded = max(older, default=None)
        newer = (record for folder, record in there if folder.iteration > iteration)
        return [Point(r.lineage.epoch, r.iteration) for r in newer if r.lineage is not None]

    def prune(self, save: BegunSave) -> list[int]:
        """Remove older checkpoints, now that this one is there; the iterations of those."""
        removed: list[int] = []
        if self._retention.keeps_all:
            return removed
        try:
            complete = {
                folder.version: Candidate(folder.version, record.metrics, folder.is_pinned)
                for folder, record in self.committed.complete()
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

    def close(self) -> None:
        """Remove what was never committed, and let other jobs save here. May be called twice."""
        if self._lock.is_held:
            self.sweep(None)
        self._lock.release()


def _next_epoch(folders: Sequence[Folder], leftovers: Sequence[Leftover]) -> int:
    epochs = [f.epoch for f in (*folders, *(leftover.folder for leftover in leftovers))]
    return 1 + max(epochs, default=0)
