"""Root of checkpoints on shared storage, where the first rank begins, commits and prunes them.

One rank sees the root for all, so that ranks whose clients cache directories differently agree.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from localckpt.availability.retention import Candidate, Retention, reasons_to_keep
from localckpt.errors import CheckpointingException, StorageError
from localckpt.global_tier.data_files import write_durably
from localckpt.global_tier.folders import (
    LOCK_NAME,
    RECORD_NAME,
    CommitFound,
    CommitRecord,
    Folder,
    Leftover,
    SharedSession,
    folders_in,
    put_back_if_pinned,
    remove,
    session_root,
    try_to_remove,
)
from localckpt.global_tier.metadata import METADATA_NAME
from localckpt.lineage import EpochId, Lineage, Origin, Point, Resumed, begin_lineage
from localckpt.own_folders import (
    file_mode,
    folder_mode,
    lock_holder,
    make_own_folders,
    require_own_file,
)
from localckpt.storage.failures import storage_errors
from localckpt.storage.owner import Owner
from localckpt.storage.write import replace_file, sync_folder

logger = logging.getLogger(__name__)

# What file systems answer that cannot lock files; anything else is an error.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_OWNER_NAME = ".localckpt.owner"
# Storage may take that long to see that the node of the job before is gone.
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class BegunSave:
    """Save or drain that the first rank has begun, whose lineage and metrics are recorded."""

    folder: Folder
    save_id: str
    is_drain: bool = False
    lineage: Lineage | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Directory in which it is written until it is committed."""
        return self.folder.unfinished(self.save_id, is_drain=self.is_drain)


class CheckpointRoot:
    """Directory of one session's checkpoints."""

    def __init__(
        self, root: Path, session_id: str, *, retention: Retention, timeout_s: float
    ) -> None:
        self.path = session_root(root, session_id)
        self.lock = RootLock(root, *self.path.relative_to(root).parts)
        self.session = SharedSession(self.path, session_id)
        self._retention = retention
        self._timeout_s = timeout_s
        # A save and a drain may begin at the same time, in two threads.
        self._beginning = threading.Lock()
        self._draining: set[Path] = set()
        # Of this start's saves, from the first of them on.
        self._epoch: int | None = None
        self.lineage: Lineage | None = None
        self._resumed = Resumed()
        self._loaded: tuple[int, int] | None = None

    def begin(self, iteration: int, lineage: Lineage | None) -> BegunSave:
        """Make the directory of a save on the first rank."""
        with self._beginning:
            self.lock.take(self._timeout_s)
            epoch = self._epoch or _next_epoch(*folders_in(self.path))
            begun = BegunSave(Folder(self.path, iteration, epoch), uuid.uuid4().hex)
            with storage_errors("make", begun.path):
                begun.path.mkdir(folder_mode(self.path))
                try:
                    sync_folder(self.path)
                except BaseException:
                    begun.path.rmdir()
                    raise
            self._epoch, self.lineage = epoch, lineage or self.lineage
            if self.lineage is None:
                started = EpochId(epoch, secrets.randbelow(2**32))
                self.lineage = begin_lineage(started, self._resumed, [], {})
            return begun

    def begin_drain(
        self,
        iteration: int,
        save_id: str,
        lineage: Lineage | None,
        metrics: Mapping[str, float],
    ) -> tuple[BegunSave, bool]:
        """Make the directory of a drain on the first rank, or go on in that of an attempt before.

        ``save_id`` is the same for all attempts. Returns also whether the checkpoint is there.
        """
        with self._beginning:
            self.lock.take(self._timeout_s)
            folders, leftovers = folders_in(self.path)
            for folder in (folder for folder in folders if folder.iteration == iteration):
                found = self.session.find(folder)
                if found is not None and found.record.save_id == save_id:
                    return BegunSave(folder, save_id), True
            epoch = self._epoch or _next_epoch(folders, [x for x in leftovers if not x.is_drain])
            folder = Folder(self.path, iteration, epoch)
            begun = BegunSave(folder, save_id, is_drain=True, lineage=lineage, metrics=metrics)
            self._require_newest(begun, folders)
            # Before it is there: the sweep of a save spares what is drained.
            self._draining.add(begun.path)
            try:
                self._make_drain(begun, [left for left in leftovers if left.is_drain])
            except BaseException:
                self._draining.discard(begun.path)
                raise
            self._epoch = epoch
            return begun, False

    def _make_drain(self, drain: BegunSave, before: Sequence[Leftover]) -> None:
        mine: Path | None = None
        for path, folder in before:
            if mine is None and path == replace(drain, folder=folder).path:
                mine = path
            elif path not in self._draining:
                try_to_remove(path)
        with storage_errors("make", drain.path):
            if mine is None:
                drain.path.mkdir(folder_mode(self.path))
            elif mine != drain.path:
                mine.rename(drain.path)
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
            found = self.session.find(folder)
            if found is None or found.record.is_left_by(drain.lineage):
                continue
            raise CheckpointingException(
                f"{folder.path} is newer than iteration {drain.folder.iteration}, which would "
                f"stand before it: nothing was drained. If the job went back from it, load() what "
                f"it goes on from by this manager, or remove it"
            )

    def commit(
        self,
        save: BegunSave,
        metadata: bytes,
        files: Mapping[str, int],
        world_size: int,
        unequal: Sequence[str],
    ) -> None:
        """Make a checkpoint of what all ranks have written. After an error it is no checkpoint."""
        folder = save.folder
        record = CommitRecord(
            *(self.session.session_id, folder.iteration, folder.epoch, save.save_id, world_size),
            files=files,
            metadata_digest=xxhash.xxh3_64_intdigest(metadata),
            lineage=save.lineage,
            metrics=save.metrics,
            retention=self._retention,
            unequal=[*unequal],
            resumed_from=self._loaded,
        )
        write_durably(save.path / METADATA_NAME, metadata)
        write_durably(save.path / RECORD_NAME, record.to_bytes())
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

    def end(self, save: BegunSave, *, is_failed: bool) -> None:
        """Leave a save or a drain, and remove what there is of it if it failed."""
        if is_failed:
            try_to_remove(save.path)
        self._draining.discard(save.path)

    def sweep(self, save: BegunSave | None) -> None:
        """Remove what other saves have left that were never committed, and put back what is pinned.

        What a drain has left stays until something newer is there: the next attempt goes on there.
        """
        try:
            folders, leftovers = folders_in(self.path)
            newest = -1
            if any(leftover.is_drain for leftover in leftovers):
                newest = max((f.iteration for f in folders if f.has_record), default=-1)
        except StorageError as error:
            logger.warning("what was never committed stays for now: %s", error)
            return
        for leftover in leftovers:
            path, folder = leftover
            if path in self._draining or (save is not None and path == save.path):
                continue
            if leftover.is_drain and folder.iteration > newest:
                continue
            try:
                if path == folder.removed and put_back_if_pinned(folder):
                    continue
            except OSError as error:
                logger.warning("%s is pinned, and cannot be put back yet: %s", path, error)
                continue
            logger.info("removing %s, which is no checkpoint", path)
            try_to_remove(path)

    def go_on_from(self, loaded: CommitFound) -> None:
        """Begin a new epoch at the next save. What is newer until then was left behind."""
        lineage = loaded.record.lineage
        origin: Origin = "elsewhere" if lineage is None else "shared"
        self._resumed = Resumed(origin, loaded.folder.iteration, lineage)
        self._epoch = self.lineage = None
        self._loaded = loaded.folder.version

    def go_back(self, iteration: int) -> list[Point]:
        """Begin a new epoch, from what another tier has, and return what the job gives up."""
        there = self.session.whole()
        self._epoch = self.lineage = None
        older = (c.folder.version for c in there if c.folder.iteration <= iteration)
        self._loaded = max(older, default=None)
        newer = (c.record for c in there if c.folder.iteration > iteration)
        return [Point(r.lineage.epoch, r.iteration) for r in newer if r.lineage is not None]

    def prune(self, save: BegunSave) -> list[int]:
        """Remove older checkpoints, now that this one is there; the iterations of those."""
        removed: list[int] = []
        if self._retention.keeps_all:
            return removed
        try:
            whole = self.session.whole()
            kept = reasons_to_keep(
                self._retention,
                [Candidate(c.folder.version, c.record.metrics, c.folder.is_pinned) for c in whole],
                *(save.folder.version, self._loaded),
            )
            going = (c.folder for c in reversed(whole) if c.folder.version not in kept)
            removed.extend(folder.iteration for folder in going if remove(folder))
        except StorageError as error:
            logger.warning("checkpoints that may go stay for now: %s", error)
        return removed

    def close(self, *, is_alone: bool = False) -> None:
        """Remove what was never committed, and let other jobs save here. May be called twice."""
        # Alone, other ranks may still write: what they leave goes with the next save.
        if self.lock.is_held and not is_alone:
            self.sweep(None)
        self.lock.release()


def _next_epoch(folders: Sequence[Folder], leftovers: Sequence[Leftover]) -> int:
    epochs = [f.epoch for f in (*folders, *(leftover.folder for leftover in leftovers))]
    return 1 + max(epochs, default=0)


class RootLock:
    """Lock of the last directory ``below`` a named one, which ends with its process."""

    def __init__(self, named: Path, *below: str) -> None:
        self._named, self._below = named, below
        self._root = named.joinpath(*below)
        self._lock: FileLock | None = None
        self._was_there = self._is_released = False
        # What this process has noted beside the lock that it has; empty without.
        self._noted = ""

    def take(self, timeout_s: float) -> None:
        """Take it, if this process has not; where the file system has no locks, that is logged."""
        self.look()
        if self._lock is not None:
            return
        self.require_own()
        lock = FileLock(self._root / LOCK_NAME, mode=file_mode(self._root), thread_local=False)
        try:
            if self._acquire(lock, min(timeout_s, _PATIENCE_S)):
                with storage_errors("write to", self._root):
                    text = f"process {Owner.me()} on {socket.gethostname()}"
                    replace_file(self._root / _OWNER_NAME, text.encode(), file_mode(self._root))
                    self._noted = text
        except BaseException:
            # Else it lives as long as the error does.
            lock.release()
            raise
        self._lock, self._was_there = lock, True
        if self._is_released:
            # Its manager was closed meanwhile, after an interrupt of the call that waits for it.
            self.release()
            raise StorageError(f"{self._root} is not used: its manager was closed")

    def _acquire(self, lock: FileLock, patience_s: float) -> bool:
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                logger.warning(
                    "%s is locked (%s): waiting %g s for it", self._root, self._owner(), patience_s
                )
                lock.acquire(timeout=patience_s)
        except Timeout:
            raise StorageError(
                f"another job saves into {self._root} ({self._owner()}): give each its own root "
                f"or session_id, or end the other. Nothing was changed"
            ) from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                with storage_errors("lock", self._root):
                    raise
            logger.warning(
                "%s has no locks, so nothing keeps two jobs from saving there: %s",
                *(self._root, error),
            )
            return False
        return True

    def look(self) -> None:
        """Check the directories, which must be there still once they were: a mount may be gone."""
        with storage_errors("read", self._root):
            is_there = self._root.exists()
            noted = self._root / _OWNER_NAME
            is_kept = not self._noted or (noted.exists() and noted.read_text() == self._noted)
        if self._was_there and not (is_there and is_kept):
            raise StorageError(
                f"{self._root} was removed, emptied or unmounted while the job ran: mount it "
                f"again, or restart the job if it is to begin anew there. Nothing was changed"
            )
        self._was_there = is_there
        if is_there:
            self.require_own()

    def require_own(self) -> None:
        """Make the directories, and check that only this user and its groups can write there."""
        with storage_errors("use", self._root):
            is_below = bool(self._below)
            make_own_folders(self._named, *self._below, shares=True, may_be_sticky=is_below)
            require_own_file(self._root / LOCK_NAME)

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    def release(self) -> None:
        """Give it back, for good."""
        self._is_released = True
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            self._noted = ""

    def _owner(self) -> str:
        try:
            noted = (self._root / _OWNER_NAME).read_text(errors="replace")
        except OSError as error:
            noted = f"which one is not known: {error}"
        return f"{noted}; {lock_holder(self._root / LOCK_NAME)}"
