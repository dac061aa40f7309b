"""Root of checkpoints on shared storage: what all ranks see there, and the first rank does there.

One rank sees the root for all, so that ranks whose clients cache directories differently agree.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from filelock import FileLock, Timeout

from localckpt.availability.retention import Version
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.global_tier.folders import (
    LOCK_NAME,
    CommitRecord,
    Folder,
    SharedCheckpoint,
    SharedSession,
    folder_in,
    folder_named,
    folders_in,
    pin,
    put_back_if_pinned,
    remove,
    session_root,
    try_to_remove,
    unpin,
    why_kept,
)
from localckpt.global_tier.metadata import METADATA_NAME
from localckpt.global_tier.objects import ObjectPlace, Retries
from localckpt.global_tier.places import Place
from localckpt.global_tier.save_plan import require_same
from localckpt.lineage import EpochId, Lineage, Origin, Point, Resumed, begin_lineage
from localckpt.options import Options
from localckpt.own_folders import (
    file_mode,
    lock_holder,
    make_own_folders,
    require_own_file,
)
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.resuming import Resuming
from localckpt.storage.failures import storage_errors
from localckpt.storage.owner import Owner
from localckpt.storage.write import replace_file
from localckpt.trust import choose

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What file systems answer that cannot lock files; anything else is an error.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_OWNER_NAME = ".localckpt.owner"
_CLAIM = ".localckpt.epoch."
# Storage may take that long to see that the node of the job before is gone.
_PATIENCE_S = 120.0
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BegunSave:
    """Save or drain that the first rank has begun, in a folder with a label until it is committed.

    Its lineage and metrics are recorded.
    """

    folder: Folder
    save_id: str
    lineage: Lineage | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_there: bool = False


class CheckpointRoot(SharedSession):
    """Directory of one session's checkpoints; all ranks make the same calls of some methods."""

    def __init__(self, root: Place, session_id: str, ranks: Ranks, options: Options) -> None:
        super().__init__(session_root(root, session_id), session_id)
        self.lock: RootLock | RootClaim
        if isinstance(self.path, ObjectPlace):
            self.lock = RootClaim(self.path, ranks.world_size)
        else:
            self.lock = RootLock(Path(str(root)), *([self.path.name] if session_id else []))
        self._ranks = ranks
        self._retention, self._timeout_s = options.retention, options.timeout
        self._read_only = options.read_only
        self.resuming = Resuming(self.notes, options.max_attempts)
        # A save and a drain may begin at the same time, in two threads.
        self._beginning = threading.Lock()
        # Folders of drains that are written.
        self._draining: set[Place] = set()
        # Of this start's saves, from the first of them on.
        self._epoch: int | None = None
        self.lineage: Lineage | None = None
        self._resumed = Resumed()
        self._loaded: Version | None = None

    # On all ranks.

    def find_latest(self, left_by: Lineage | None) -> SharedCheckpoint | None:
        """The newest checkpoint; none that a lineage has left behind."""
        return self._find(None, lambda: self._newest(left_by=left_by))

    def load_newest(
        self, iteration: int | None, load: Callable[[SharedCheckpoint], None], *, tries_others: bool
    ) -> SharedCheckpoint:
        """Call ``load`` with the newest checkpoint, or that of an iteration, which it fills in.

        If that ``tries_others``, a damaged one makes way for the one before, and one that a job
        prunes meanwhile for the newest that is there then.
        """
        deadline = Deadline.after(self._ranks.timeout_s)
        tried: list[Version] = []

        def find_next() -> SharedCheckpoint | None:
            found = self._newest(iteration, tried)
            if found and tried and found.folder.version > max(tried) and deadline.left_s == 0:
                # A job goes on there, and pruned what was being read.
                raise NoReplicasAvailableError(
                    f"for {deadline.timeout_s:g} s every checkpoint under {self.path} was pruned "
                    f"before it was read, the last one iteration {tried[-1][1]}, and "
                    f"{found.folder.iteration} is the newest now: have the job keep more of them, "
                    f"or let the load take longer"
                )
            return found

        while found := self._find(iteration, find_next):
            try:
                load(found)
            except (CorruptShardError, StorageError) as error:
                if not tries_others:
                    raise
                logger.error(
                    "iteration %d cannot be loaded, trying another one: %s",
                    *(found.folder.iteration, error),
                )
            else:
                return found
            tried.append(found.folder.version)
        if tried:
            why = f"no checkpoint under {self.path} can be loaded; see the errors above"
        elif iteration is not None:
            why = f"there is no checkpoint of iteration {iteration} under {self.path}"
        else:
            why = (
                f"there is no checkpoint under {self.path}: load() only if find_latest() is not -1"
            )
        raise NoReplicasAvailableError(why)

    def iterations(self, left_by: Lineage | None) -> list[int]:
        """Iterations of the checkpoints that a restart tries, in their order."""

        def look() -> list[int]:
            self._check_root()
            found = (c.folder for c in self.whole() if not c.record.is_left_by(left_by))
            return list(dict.fromkeys(folder.iteration for folder in self._usable([*found])))

        return self._ask("find all checkpoints", "all", look, shaped([int]))

    def unfinished_drains(self) -> list[int]:
        """Iterations whose drains were begun, and are not committed, in their order."""

        def look() -> list[int]:
            return sorted({left.iteration for left in self.leftovers() if left.is_drain})

        return self._ask("find unfinished drains", "all", look, shaped([int]))

    def change_pin(self, what: str, iteration: int) -> None:
        """``"pin"`` the newest checkpoint of an iteration, or ``"unpin"`` all of it."""

        def change() -> None:
            folders = [f for f in folders_in(self.path)[0] if f.iteration == iteration]
            if what == "pin":
                found = self._newest(iteration)
                folders = [] if found is None else [found.folder]
            if not folders:
                there = ", ".join(str(c.folder.iteration) for c in self.whole()[:_SHOWN])
                raise NoReplicasAvailableError(
                    f"there is no checkpoint of iteration {iteration} under {self.path}; the "
                    f"newest are: {there or 'none'}. Nothing was changed"
                )
            for folder in folders:
                (pin if what == "pin" else unpin)(folder)

        self._ask(f"{what} a checkpoint", iteration, change, lambda _: None)

    def _ask(self, what: str, tag: Any, look: Callable[[], Any], read: Callable[[Any], T]) -> T:
        """Call ``look`` on the first rank, and give what ``read`` makes of the result to all."""

        def judge(tags: list[Any]) -> Any:
            require_same(tags, self._ranks.global_ranks)
            return look()

        given: T = self._ranks.commit(what, lambda: [self.session_id, tag], judge, read=read)
        return given

    def _find(
        self, iteration: int | None, find: Callable[[], SharedCheckpoint | None]
    ) -> SharedCheckpoint | None:
        def look() -> list[str] | None:
            if (found := find()) is None:
                return None
            # Only the first rank needs to know the files.
            return [found.folder.path.name, replace(found.record, files={}).to_bytes().decode()]

        def read(told: Any) -> SharedCheckpoint | None:
            if told is None:
                return None
            name, text = shaped((str, str))(told)
            folder = folder_named(self.path, name)
            try:
                record = CommitRecord.parse(self.path, text.encode())
            except CorruptShardError as error:
                raise ValueError(error.text) from error
            if folder is None:
                raise ValueError(f"{name} is no checkpoint's folder")
            return SharedCheckpoint(folder, record)

        return self._ask("find a checkpoint", iteration, look, read)

    # On the first rank, for all.

    def _check_root(self) -> None:
        """Raise StorageError if others can write to the directory, or it is gone."""
        if not self._read_only:
            self.lock.look()

    def _newest(
        self,
        iteration: int | None = None,
        tried: Sequence[Version] = (),
        left_by: Lineage | None = None,
    ) -> SharedCheckpoint | None:
        self._check_root()
        listed: list[Folder] | None = None
        while True:
            before, (listed, _) = listed, folders_in(self.path)
            if listed == before:
                return None
            # Else a job has committed one and pruned those that were listed, so look again.
            for folder in self._usable(listed) if iteration is None else listed:
                if iteration not in (None, folder.iteration) or folder.version in tried:
                    continue
                found = self.committed_in(folder, asked_for=iteration is not None)
                if found is not None and not found.record.is_left_by(left_by):
                    return found

    def _usable(self, folders: Sequence[Folder]) -> list[Folder]:
        """The directories that the job has not resumed from in vain too often."""
        trusts = self.resuming.trusts = self.noted_trusts()
        by_checkpoint = {folder.as_checkpoint: folder for folder in folders}
        choice = choose([*by_checkpoint], trusts, self.resuming.max_attempts)
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

    def begin(self, iteration: int, lineage: Lineage | None) -> BegunSave:
        """Make the directory of a save."""
        with self._beginning:
            self.lock.take(self._timeout_s)
            epoch = self._epoch or self.lock.claim(_next_epoch(*folders_in(self.path)))
            save_id = uuid.uuid4().hex
            folder = folder_in(self.path, iteration, epoch).unfinished(save_id, is_drain=False)
            self._make(folder, None)
            self.lineage = lineage or self.lineage
            if self.lineage is None:
                started = EpochId(epoch, secrets.randbelow(2**32))
                self.lineage = begin_lineage(started, self._resumed, [], {})
            return BegunSave(folder, save_id)

    def begin_drain(
        self,
        iteration: int,
        save_id: str,
        lineage: Lineage | None,
        metrics: Mapping[str, float],
    ) -> BegunSave:
        """Make the directory of a drain, or go on in that of an attempt before.

        ``save_id`` is the same for all attempts. If one was committed, its folder is returned.
        """
        with self._beginning:
            self.lock.take(self._timeout_s)
            folders, leftovers = folders_in(self.path)
            for folder in (folder for folder in folders if folder.iteration == iteration):
                found = self.committed_in(folder)
                if found is not None and found.record.save_id == save_id:
                    return BegunSave(folder, save_id, is_there=True)
            epoch = self._epoch or self.lock.claim(_next_epoch(folders, leftovers))
            folder = folder_in(self.path, iteration, epoch)
            self._require_newest(folder, lineage, folders)
            folder = folder.unfinished(save_id, is_drain=True)
            same = (left for left in leftovers if replace(left, epoch=epoch) == folder)
            self._make(folder, next(same, None))
            return BegunSave(folder, save_id, lineage, metrics)

    def _make(self, folder: Folder, before: Folder | None) -> None:
        """Make a directory, or give that of an attempt ``before`` its name."""
        if folder.is_drain:
            # Before it is there: the sweep of a save spares what is drained.
            self._draining.add(folder.path)
        try:
            with storage_errors("make", folder.path):
                folder.make(before)
        except BaseException:
            self._draining.discard(folder.path)
            raise
        self._epoch = folder.epoch

    def _require_newest(
        self, drained: Folder, lineage: Lineage | None, folders: Sequence[Folder]
    ) -> None:
        """Check that what a restart would take from here is not newer than what is drained."""
        if any(f.version == drained.version and f.has_record for f in folders):
            raise CheckpointingException(
                f"iteration {drained.iteration} is on shared storage already, saved in "
                f"another way, under {self.path}. It was left as it is"
            )
        for folder in folders:
            if folder.epoch == drained.epoch or folder.iteration < drained.iteration:
                continue
            if self._loaded is not None and folder.version > self._loaded:
                # The job went back from it.
                continue
            found = self.committed_in(folder)
            if found is None or found.record.is_left_by(lineage):
                continue
            raise CheckpointingException(
                f"{folder.path} is newer than iteration {drained.iteration}, which would "
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
        retries, folder = Retries(Deadline.after(self._timeout_s / 2).at), save.folder.finished
        record = CommitRecord(
            *(self.session_id, folder.iteration, folder.epoch, save.save_id, world_size),
            files=files,
            metadata_digest=xxhash.xxh3_64_intdigest(metadata),
            lineage=save.lineage,
            metrics=save.metrics,
            retention=self._retention,
            unequal=[*unequal],
            resumed_from=self._loaded,
        )
        with storage_errors("commit", folder.path):
            (save.folder.path / METADATA_NAME).put(metadata, retries)
            # Once the storage answers: it may be another job's by now.
            self.lock.look()
            save.folder.commit(record.to_bytes(), retries)
        logger.info(
            "committed %s: %.3f GB of %d ranks", folder.path, record.nbytes / 1e9, world_size
        )

    def end(self, save: BegunSave, *, is_failed: bool) -> None:
        """Leave a save or a drain, and remove what there is of it if it failed."""
        if is_failed:
            try_to_remove(save.folder)
        self._draining.discard(save.folder.path)

    def sweep(self, save: BegunSave | None) -> None:
        """Remove what other saves have left that were never committed, and put back what is pinned.

        What a drain has left stays until something as new is there, or another one is written,
        which removes nothing else: the next attempt goes on there.
        """
        try:
            self.lock.look()
            folders, leftovers = folders_in(self.path)
            newest = -1
            if any(left.is_drain for left in leftovers):
                newest = max((f.iteration for f in folders if f.has_record), default=-1)
        except StorageError as error:
            logger.warning("what was never committed stays for now: %s", error)
            return
        is_drain = save is not None and save.folder.is_drain
        for left in leftovers:
            if left.path in self._draining or (save is not None and left == save.folder):
                continue
            stays = not left.is_drain if is_drain else left.is_drain and left.iteration > newest
            if stays:
                continue
            try:
                if put_back_if_pinned(left):
                    continue
            except (OSError, StorageError) as error:
                logger.warning("%s is pinned, and cannot be put back yet: %s", left.path, error)
                continue
            logger.info("removing %s, which is no checkpoint", left.path)
            try_to_remove(left)

    def go_on_from(self, loaded: SharedCheckpoint) -> None:
        """Begin a new epoch at the next save. What is newer until then was left behind."""
        lineage = loaded.record.lineage
        origin: Origin = "elsewhere" if lineage is None else "shared"
        self._resumed = Resumed(origin, loaded.folder.iteration, lineage)
        self._epoch = self.lineage = None
        self._loaded = loaded.folder.version

    def go_back(self, iteration: int) -> list[Point]:
        """Begin a new epoch, from what another tier has, and return what the job gives up."""
        there = self.whole()
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
            self.lock.look()
            whole = self.whole()
            saved = next((c for c in whole if c.folder == save.folder.finished), None)
            if saved is not None:
                # The job may have gone back since.
                record = replace(saved.record, resumed_from=self._loaded)
                kept = why_kept(whole, replace(saved, record=record))
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


def _next_epoch(folders: Sequence[Folder], leftovers: Sequence[Folder]) -> int:
    """Return an epoch above all that there are; a drain that goes on is in one of its own."""
    unfinished = (left for left in leftovers if not left.is_drain)
    return 1 + max((folder.epoch for folder in (*folders, *unfinished)), default=0)


class RootClaim:
    """Claim of an epoch, of which only one job can make the object: the last may save.

    Object stores have no locks that end with a process. A job that finds a later claim than its own
    is refused from then on, whether the other one has ended or not. The methods are those of
    :class:`RootLock`.
    """

    def __init__(self, root: ObjectPlace, world_size: int) -> None:
        if root.url.startswith("memory:") and world_size > 1:
            raise StorageError(
                f"{root} is in the memory of one process, and the job has {world_size} ranks: give "
                f"storage that all of them reach. Nothing was made"
            )
        self._root, self._held = root, 0
        self._text = f"process {Owner.me()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"

    @property
    def is_held(self) -> bool:
        return self._held > 0

    def take(self, timeout_s: float) -> None:
        self.look()

    def look(self) -> None:
        if not self._held:
            return
        claims = self._claims()
        if last := max((claim for claim in claims if claim > self._held), default=0):
            with storage_errors("read", self._place(last)):
                owner = self._place(last).read().decode(errors="replace")
            raise StorageError(
                f"another job has begun to save into {self._root} ({owner}), so this one may not "
                f"any more: give each its own root or session_id. Nothing was changed"
            )
        if self._held not in claims:
            raise StorageError(
                f"{self._root} was emptied while the job ran: restart the job if it is to begin "
                f"anew there. Nothing was changed"
            )

    def claim(self, epoch: int) -> int:
        with storage_errors("claim", self._root):
            claims = self._claims()
            while True:
                epoch = max(epoch, 1 + max(claims, default=0))
                try:
                    self._place(epoch).create(self._text.encode())
                    break
                except FileExistsError:
                    claims.append(epoch)
            self._held = epoch
            for claim in claims:
                self._place(claim).remove()
        return epoch

    def release(self) -> None:
        # The claim stays: whoever wakes up late finds that it has lost the root.
        self._held = 0

    def _claims(self) -> list[int]:
        with storage_errors("read", self._root):
            names = self._root.names()
        ends = (name.removeprefix(_CLAIM) for name in names if name.startswith(_CLAIM))
        return [int(end) for end in ends if end.isdecimal()]

    def _place(self, epoch: int) -> ObjectPlace:
        return self._root / f"{_CLAIM}{epoch:04d}"


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
        """Take it in half of the time that callers wait; a file system without locks is logged."""
        self.look()
        if self._lock is not None:
            return
        self.require_own()
        lock = FileLock(self._root / LOCK_NAME, mode=file_mode(self._root), thread_local=False)
        try:
            if self._acquire(lock, min(timeout_s / 2, _PATIENCE_S)):
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

    def claim(self, epoch: int) -> int:
        """Return the epoch of this start, or a later one, that no other start has."""
        return epoch

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
