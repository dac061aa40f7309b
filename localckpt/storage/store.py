"""What is on this node: the folders of all its ranks, read by all, each written by one.

``root/<session>/<rank>/`` holds a file for each (iteration, owner) that the rank keeps. A file's
name only tells files apart; what a shard is, is read from its header. Files leave by losing their
name and becoming spares, which later saves overwrite.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Concatenate, ParamSpec, TypeVar

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    FormatVersionError,
    StorageError,
)
from localckpt.ids import Series, ShardIdentity, ShardRecord
from localckpt.state_dict.identify import read_verified_record
from localckpt.storage.aside import set_aside, why_set_aside
from localckpt.storage.buffers import Buffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.files import FileSource
from localckpt.storage.names import CORRUPT, DIRTY, SHARD, SPARE, local_path, shard_name
from localckpt.storage.notes import owner_of
from localckpt.storage.owner import Running
from localckpt.storage.preflight import check_room
from localckpt.storage.rank_folder import RankFolder
from localckpt.storage.write import Digests, ShardWrite

if TYPE_CHECKING:
    import torch

__all__ = ["Store", "one_at_a_time"]

logger = logging.getLogger(__name__)

_IMAGES = (SHARD, SPARE, DIRTY)

StoreT = TypeVar("StoreT", bound="Store")
P = ParamSpec("P")
T = TypeVar("T")


def one_at_a_time(
    method: Callable[Concatenate[StoreT, P], T],
) -> Callable[Concatenate[StoreT, P], T]:
    """A method of a store that several threads may call."""

    @wraps(method)
    def guarded(self: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return guarded


class Store(ABC):
    """The shards of one session on this node, seen by one rank.

    One thread saves and loads, another takes in the shards of other ranks.

    Args:
        root: The store's directory; made, for this user alone, where it is not there.
        session_id: The training run.
        rank: Whose folder this process writes.
        timeout_s: How long to wait for another process that is starting here.

    Attributes:
        claim: The rank's folder, which this process has taken.

    Raises:
        StorageError: The directory cannot be used, or a live process of another job owns the
            rank's folder.
    """

    def __init__(self, root: str | os.PathLike[str], session_id: str, rank: int, timeout_s: float):
        self.root = local_path(root).absolute()
        self.session_id = session_id
        self.rank = rank
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self._shards: dict[ShardIdentity, Path] = {}
        self.claim = self._take_folder(timeout_s)
        self.folder, self._session = self.claim.path, self.claim.session

    def _take_folder(self, timeout_s: float) -> RankFolder:
        return RankFolder(self.root, self.session_id, self.rank, timeout_s)

    LOADING: ClassVar[Hashable] = "a shard that is loaded"
    """Owner of the memory that :meth:`receive` gives."""

    @abstractmethod
    def stage(self, identity: ShardIdentity, nbytes: int, timeout_s: float) -> Buffer:
        """Memory for the image of a shard that is about to be saved here.

        Raises:
            StorageError: There is no room.
            CheckpointingException: Older saves kept all buffers busy for too long.
        """

    @abstractmethod
    def prepare(self, series: Series, nbytes: int, pin: torch.device | None = None) -> None:
        """Have memory for the next saves made in the background, if it is not there.

        Args:
            series: What it is for.
            nbytes: Their size.
            pin: The GPU that they are copied from; ``None`` for none.
        """

    @abstractmethod
    def is_busy(self, series: Series) -> bool:
        """Whether :meth:`stage` would have to wait for an older save."""

    @abstractmethod
    def receive(self, nbytes: int, timeout_s: float) -> Buffer:
        """Memory for an image that is only read into a state; to be given back. Raises alike."""

    @abstractmethod
    def release(self, owner: Hashable) -> None:
        """Take back memory from an owner who may not know that it has some.

        Args:
            owner: The identity that :meth:`stage` was called with, or :attr:`LOADING`.
        """

    @abstractmethod
    def write_job(
        self,
        buffer: Buffer,
        identity: ShardIdentity,
        nbytes: int,
        covered_nbytes: int,
        digests: Digests,
    ) -> ShardWrite:
        """What is to be done with a staged image; plain data."""

    @abstractmethod
    def abandon(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        """Take memory back from a save that failed. Somebody may still be reading or writing it.

        Args:
            buffer: From :meth:`stage`.
            lease: Its lease at that time; a later save may have taken it since.
            identity: The shard it was staged for.
        """

    @abstractmethod
    def drop_unfinished(self, buffer: Buffer, lease: int, identity: ShardIdentity) -> None:
        """Take memory back from a shard that nobody is writing any more, and what is unfinished.

        A shard of this identity that is committed stays, whenever it was. Arguments as for
        :meth:`abandon`.
        """

    @one_at_a_time
    def scan(self) -> list[ShardRecord]:
        """All shards of the session on this node, whoever wrote them, with intact headers."""
        shards: dict[ShardIdentity, Path] = {}
        with storage_errors("read", self._session):
            folders = [e for e in os.scandir(self._session) if e.is_dir(follow_symlinks=False)]
            paths = [
                Path(entry.path)
                for folder in folders
                for entry in os.scandir(folder)
                if entry.name.endswith(SHARD) and entry.is_file(follow_symlinks=False)
            ]
        records = []
        for path in sorted(paths):
            record = self._identify(path)
            if record is not None and record.identity not in shards:
                shards[record.identity] = path
                records.append(record)
        # Only now: an interrupt must not leave shards out, which nobody would retire then.
        self._shards = shards
        return records

    @one_at_a_time
    def open(self, identity: ShardIdentity) -> FileSource:
        """The image of a shard that any rank of this node has committed.

        Raises:
            StorageError: It is not there, or cannot be opened.
        """
        if identity not in self._shards:
            # Another rank may have written it since this one looked.
            self.scan()
        path = self._shards.get(identity)
        if path is None:
            raise StorageError(f"this node does not hold {identity}")
        return FileSource(path)

    @one_at_a_time
    def holds(self, identity: ShardIdentity) -> bool:
        """Whether a shard that this process saved is committed, with its name in place."""
        path = self._path(identity)
        if not path.is_file():
            return False
        self._shards[identity] = path
        return True

    @one_at_a_time
    def retire(
        self, is_over: Callable[[ShardIdentity], bool], adopted_ranks: Iterable[int]
    ) -> None:
        """Turn shards of this rank that are no longer wanted into spares.

        Args:
            is_over: Says of a shard whether it goes.
            adopted_ranks: Ranks whose folders nobody on this node writes any more; their old shards
                go with this rank's.
        """
        old = [(identity, path) for identity, path in self._shards.items() if is_over(identity)]
        for identity, path in old:
            if path.parent == self.folder:
                self._to_spare(identity, path)
        running = Running()
        for rank in adopted_ranks:
            folder = self._session / str(rank)
            there = [(identity, path) for identity, path in old if path.parent == folder]
            with storage_errors("clean up", folder):
                # No save of this rank needs them as spares: it has those of its own.
                spares = list(folder.glob(f"*{SPARE}"))
                if (there or spares) and owner_of(folder) not in running:
                    for path in (*(path for _, path in there), *spares):
                        path.unlink(missing_ok=True)
                    self._shards = {i: p for i, p in self._shards.items() if (i, p) not in there}

    @one_at_a_time
    def discard(self, identity: ShardIdentity) -> None:
        """Remove what a failed save has committed or begun here of a shard."""
        path = self._path(identity)
        # First: who still writes it cannot give it its name any more.
        with storage_errors("remove", path):
            self._dirty(identity).unlink(missing_ok=True)
        self._to_spare(identity, path)

    @one_at_a_time
    def set_aside(self, identity: ShardIdentity, why: str) -> None:
        """Rename a bad shard, so that it is not found again but can be looked at."""
        path = self._shards.pop(identity, None)
        if path is not None:
            self._quarantine(path, why)

    @contextmanager
    def replacing(self, identity: ShardIdentity, why: str) -> Iterator[None]:
        """Inside, a bad shard that is here is written anew; it is found until the new one is.

        Args:
            identity: Of the shard.
            why: What is wrong with it.
        """
        with self._lock:
            bad = self._shards.get(identity)
            if bad == self._path(identity):
                # Under its second name it is there when the new one has taken the first.
                set_aside(bad, why, stays=True)
        yield
        with self._lock:
            if bad is not None and bad != self._path(identity):
                set_aside(bad, why)

    def bad_copies(self) -> list[str]:
        """Files of the session on this node that were set aside, each with what was wrong."""
        with storage_errors("read", self._session):
            paths = sorted(self._session.glob(f"*/*{CORRUPT}"))
        return [f"{path.name}: {why_set_aside(path)}" for path in paths]

    @one_at_a_time
    def newest_epoch(self) -> int:
        """The highest epoch that began here, whether or not a shard of it is left."""
        seen = [identity.generation.epoch for identity in self._shards]
        return max([*seen, self.claim.newest_epoch()])

    def images(self) -> list[Path]:
        """Files of this rank's folder that hold an image, will hold one, or did."""
        with storage_errors("read", self.folder):
            return [path for path in self.folder.iterdir() if path.name.endswith(_IMAGES)]

    def check_room(self, images: Collection[int], checkpoints: int, ranks: int) -> None:
        """Compare what is going to be kept with what there is; see :func:`preflight.check_room`.

        Raises:
            StorageError: There is no room for what this rank alone will keep.
        """
        with storage_errors("look at", self.folder):
            # First: what is being made ahead of time meanwhile counts as there, not as missing.
            status = os.statvfs(self.folder)
        # Twice, since a file that is renamed meanwhile may be missed.
        there = {**self._nbytes_by_inode(), **self._nbytes_by_inode()}
        check_room(self.folder, status, there, images, checkpoints, ranks)

    def _nbytes_by_inode(self) -> dict[int, int]:
        """The disk space of all files of the session with images, or room for them."""
        found = {}
        with storage_errors("read", self._session):
            for path in self._session.glob("*/*"):
                if path.name.endswith(_IMAGES):
                    with suppress(FileNotFoundError):
                        status = path.lstat()
                        found[status.st_ino] = status.st_blocks * 512
        return found

    def close(self, unfinished: Iterable[ShardIdentity] = ()) -> None:
        """Remove the spares, and what was begun of shards that are not written, and leave.

        In a fork it does nothing.
        """
        if self._process != os.getpid():
            return
        self._closed = True
        with storage_errors("clean up", self.folder):
            for path in map(self._dirty, unfinished):
                path.unlink(missing_ok=True)
            if self.claim.is_ours:
                for path in self.folder.glob(f"*{SPARE}"):
                    path.unlink(missing_ok=True)
                self.claim.leave()

    def _quarantine(self, path: Path, why: str) -> None:
        set_aside(path, why)

    def _path(self, identity: ShardIdentity) -> Path:
        return self.folder / shard_name(identity)

    def _free_path(self, identity: ShardIdentity) -> Path:
        """:meth:`_path`, for a shard that is about to be written.

        Another shard that somebody gave this name gets one of its own: it may be the only copy.
        """
        path = self._path(identity)
        misnamed = [i for i, held in self._shards.items() if held == path and i != identity]
        for other in misnamed:
            moved = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{SHARD}")
            with storage_errors("make way for", path):
                os.rename(path, moved)
            logger.warning("%s has the name of %s: it is now %s", other, identity, moved.name)
            self._shards[other] = moved
        return path

    def _dirty(self, identity: ShardIdentity) -> Path:
        return self._path(identity).with_suffix(f"{SHARD}{DIRTY}")

    def _claim_spare(self, identity: ShardIdentity, nbytes: int) -> str | None:
        """Give a spare the dirty name of a shard; its old name, or ``None`` if there is none.

        Of several it is the one that comes nearest in size: a shard and parity, which is far
        smaller, are not to change places at every save.
        """
        sizes = {}
        for path in sorted(self.folder.glob(f"*{SPARE}")):
            with suppress(FileNotFoundError):
                sizes[path] = path.lstat()
        for path, status in sorted(sizes.items(), key=lambda s: abs(s[1].st_size - nbytes)):
            try:
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                    # It has another name, a backup's perhaps, under which it must not change.
                    path.unlink()
                    continue
                if stat.S_ISFIFO(status.st_mode):
                    continue
                os.rename(path, self._dirty(identity))
            except FileNotFoundError:
                continue
            return path.name
        return None

    def _to_spare(self, identity: ShardIdentity, path: Path) -> None:
        spare = self.folder / f"{path.stem}.{secrets.token_hex(4)}{SPARE}"
        with storage_errors("retire", path):
            if self._closed:
                # No save of this rank will want it.
                path.unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):
                    os.rename(path, spare)
                    self._became_spare(identity, spare)
        self._shards.pop(identity, None)

    @abstractmethod
    def _became_spare(self, identity: ShardIdentity, spare: Path) -> None:
        """A shard's file has become a spare."""

    def _identify(self, path: Path) -> ShardRecord | None:
        try:
            source = FileSource(path)
            try:
                record = read_verified_record(source)
            finally:
                source.close()
        except CheckpointingException as error:
            if isinstance(error, CorruptShardError) and not isinstance(error, FormatVersionError):
                # Under its name it would be read at every start, and never be retired. A file of
                # another version keeps its name: whoever wrote it can read it.
                self._quarantine(path, str(error))
            else:
                logger.warning("%s is not counted: %s", path, error)
            return None
        if record.identity.session_id != self.session_id:
            logger.warning("%s is not counted: it belongs to another session", path)
            return None
        return record
