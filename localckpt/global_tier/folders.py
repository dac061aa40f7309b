"""Checkpoints of a root on shared storage, by their folders, records and pins.

``root/iteration_<number>.<epoch>/`` is a checkpoint if it holds its record, which is written last.
The epoch counts the starts of the job that saved. A pin is a file in the folder of its checkpoint.
One that is set while a job prunes has the checkpoint put back, or fails. Tools beside the job use
this module, too: it unpickles nothing, and needs no torch.

In an object store nothing is renamed: the name of a folder ends with the first digits of its save's
ID, and record and pin lie beside it, so that one listing of the root tells what is a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import xxhash

from localckpt.availability.retention import (
    Candidate,
    Reason,
    Retention,
    Version,
    metrics_from_json,
    metrics_to_json,
    reasons_to_keep,
)
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    FormatVersionError,
    StorageError,
)
from localckpt.global_tier.data_files import verify_data_file
from localckpt.global_tier.objects import ObjectPlace, Retries
from localckpt.global_tier.places import FilePlace, Place, notes_in, place_of
from localckpt.ids import Checkpoint, Generation
from localckpt.lineage import Lineage
from localckpt.own_folders import folder_mode
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import SESSION_PREFIX, session_name, session_of
from localckpt.trust import Trusts

logger = logging.getLogger(__name__)

RECORD_NAME = "localckpt.json"
LOCK_NAME = ".localckpt.lock"
"""Lock in the root of a session, held by the job that saves there."""
PIN_NAME = "localckpt.pin"
"""File in the directory of a checkpoint that no job may remove."""

_METADATA_NAME = ".metadata"
_FORMAT = 3
_DRAIN = "drain_"
_REMOVED = "old.removed"
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"\.?iteration_(\d{8,})\.(\d{4,})(?:\.(\w+\.(?:partial|removed)))?")
_OBJECT_NAME = re.compile(rf"iteration_(\d{{8,}})\.(\d{{4,}})\.((?:{_DRAIN})?[0-9a-f]{{8}})")


@dataclass(frozen=True, slots=True)
class Folder:
    """One checkpoint's folder, by its name; ordered from old to new by :attr:`version`.

    With a ``label`` it is hidden: of a save or a drain until it is complete, or half removed.
    """

    root: Place
    iteration: int
    epoch: int
    label: str = ""

    @property
    def version(self) -> tuple[int, int]:
        return self.epoch, self.iteration

    @property
    def as_checkpoint(self) -> Checkpoint:
        """Name of the checkpoint in notes on trust; any number of ranks can load it."""
        return Checkpoint(Generation(self.epoch, 0), self.iteration, 1)

    @property
    def path(self) -> Place:
        name = f"iteration_{self.iteration:08d}.{self.epoch:04d}"
        return self.root / (f".{name}.{self.label}" if self.label else name)

    @property
    def is_drain(self) -> bool:
        """True if it is the folder of a drain, which the next attempt may go on in."""
        return self.label.startswith(_DRAIN)

    def unfinished(self, save_id: str, *, is_drain: bool) -> Folder:
        """Folder of a save or drain until it is complete; a next drain goes on in it."""
        return replace(self, label=f"{_DRAIN * is_drain}{save_id[:8]}.partial")

    @property
    def finished(self) -> Folder:
        """Folder of the checkpoint when it is complete."""
        return replace(self, label="")

    def beside(self, name: str) -> Place:
        """Place of the record or the pin."""
        return self.path / name

    def is_complete_by(self, names: Collection[str]) -> bool:
        """Return whether it may be a checkpoint, by the names that are in its root."""
        return not self.label

    @property
    def has_record(self) -> bool:
        """True once the checkpoint is committed; raises StorageError if that cannot be seen."""
        return self._holds(RECORD_NAME)

    @property
    def is_pinned(self) -> bool:
        """True if no job may remove it; raises StorageError if that cannot be seen."""
        return self._holds(PIN_NAME)

    def make(self, before: Folder | None = None) -> None:
        """Make it, or give the folder of an attempt ``before`` its name; raises OSError."""
        path = _directory(self.path)
        if before is None:
            path.mkdir(folder_mode(path.parent))
        elif before != self:
            _directory(before.path).rename(path)
        try:
            self.root.sync()
        except BaseException:
            if not self.is_drain:
                path.rmdir()
            raise

    def commit(self, record: bytes, retries: Retries) -> None:
        """Write the record, and make it a checkpoint; raises OSError."""
        path, final = _directory(self.path), _directory(self.finished.path)
        self.beside(RECORD_NAME).put(record)
        path.rename(final)
        try:
            self.root.sync()
        except BaseException:
            # It may be gone after a power cut, so it is none.
            final.rename(path)
            raise

    def remove(self) -> bool:
        """Remove it unless it is pinned, which it may be since; return whether it is gone."""
        removed = replace(self, label=_REMOVED)
        _directory(self.path).rename(_directory(removed.path))
        if put_back_if_pinned(removed):
            return False
        removed.discard()
        return True

    def discard(self) -> None:
        """Remove it, its record first: without that it is no checkpoint."""
        path = _directory(self.path)
        if not path.is_symlink():
            self.beside(RECORD_NAME).remove()
        path.remove()

    def _holds(self, name: str) -> bool:
        with storage_errors("look at", self.path):
            return self.beside(name).size() is not None


@dataclass(frozen=True, slots=True)
class ObjectFolder(Folder):
    """Folder in an object store, which keeps its label, and is complete by its record beside it."""

    @property
    def path(self) -> Place:
        return self.root / f"iteration_{self.iteration:08d}.{self.epoch:04d}.{self.label}"

    def unfinished(self, save_id: str, *, is_drain: bool) -> Folder:
        return replace(self, label=f"{_DRAIN * is_drain}{save_id[:8]}")

    @property
    def finished(self) -> Folder:
        return self

    def beside(self, name: str) -> Place:
        return self.root / f"{self.path.name}.{name}"

    def is_complete_by(self, names: Collection[str]) -> bool:
        return self.beside(RECORD_NAME).name in names

    def make(self, before: Folder | None = None) -> None:
        pass

    def commit(self, record: bytes, retries: Retries) -> None:
        place = self.beside(RECORD_NAME)
        assert isinstance(place, ObjectPlace), "directories have folders of their own"
        place.create(record, retries)

    def remove(self) -> bool:
        record = self.beside(RECORD_NAME)
        data = record.read()
        record.remove()
        if self.is_pinned:
            record.put(data)
            return False
        self.discard()
        return True

    def discard(self) -> None:
        for place in (self.beside(RECORD_NAME), self.path, self.beside(PIN_NAME)):
            place.remove()


def folder_in(root: Place, iteration: int, epoch: int) -> Folder:
    kind = Folder if isinstance(root, FilePlace) else ObjectFolder
    return kind(root, iteration, epoch)


def folder_named(root: Place, name: str) -> Folder | None:
    """Return the folder of a name; ``None`` if it is that of something else."""
    pattern = _NAME if isinstance(root, FilePlace) else _OBJECT_NAME
    if (match := pattern.fullmatch(name)) is None:
        return None
    folder = replace(folder_in(root, int(match[1]), int(match[2])), label=match[3] or "")
    # Other names of the same numbers are nobody's.
    return folder if folder.path.name == name else None


def _directory(place: Place) -> FilePlace:
    assert isinstance(place, FilePlace), "object stores have folders of their own"
    return place


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """Record that makes a directory a checkpoint: written last, when everything else is durable.

    Attributes:
        resumed_from: Version of the checkpoint here that the job goes back to if newer ones fail.
        unequal: Names of values that differed between ranks; the files have the first rank's.
    """

    session_id: str
    iteration: int
    epoch: int
    save_id: str
    world_size: int
    files: Mapping[str, int]
    metadata_digest: int
    lineage: Lineage | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    retention: Retention = Retention()  # noqa: RUF009 - a frozen value
    unequal: list[str] = field(default_factory=list)
    resumed_from: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def is_left_by(self, lineage: Lineage | None) -> bool:
        """Return whether the job went back from it to begin an epoch of a lineage."""
        if lineage is None or self.lineage is None:
            return False
        return lineage.gives_up(self.lineage.epoch, self.iteration)

    def to_bytes(self) -> bytes:
        """A line of JSON and a line with its hash, so that what was cut short is no record."""
        fields = {"format": _FORMAT, **asdict(self)}
        fields["lineage"] = None if self.lineage is None else self.lineage.to_json()
        fields["metrics"] = metrics_to_json(self.metrics)
        text = json.dumps(fields, sort_keys=True).encode()
        return b"%s\n%016x\n" % (text, xxhash.xxh3_64_intdigest(text))

    @classmethod
    def read(cls, path: Place) -> CommitRecord | None:
        """The record in a file; ``None`` if there is none."""
        with storage_errors("read", path):
            try:
                data = path.read()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return cls.parse(path, data)

    @classmethod
    def parse(cls, path: Place, data: bytes) -> CommitRecord:
        """Read what :meth:`to_bytes` made; ``path`` is for messages."""
        text, _, digest = data.removesuffix(b"\n").rpartition(b"\n")
        if digest != b"%016x" % xxhash.xxh3_64_intdigest(text):
            raise CorruptShardError(f"{path} is damaged or cut short")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorruptShardError(f"{path} is damaged: it is no JSON") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise FormatVersionError(
                f"{path} is of another version of the format: load it with the version of "
                f"localckpt that saved it, or with torch.distributed.checkpoint"
            )
        try:
            if fields["lineage"] is not None:
                fields["lineage"] = Lineage.from_json(fields["lineage"])
            fields["retention"] = Retention.from_json(fields["retention"])
            fields["metrics"] = metrics_from_json(fields["metrics"])
            if fields["resumed_from"] is not None:
                epoch, iteration = map(int, fields["resumed_from"])
                fields["resumed_from"] = epoch, iteration
            record = cls(**fields)
            if record._is_plain():
                return record
        except (CheckpointingException, KeyError, TypeError, ValueError) as error:
            raise CorruptShardError(f"{path} is damaged: {error}") from error
        raise CorruptShardError(f"{path} is damaged: it tells of files that cannot be")

    def _is_plain(self) -> bool:
        """Return whether each field has its type, and no file name leads to another directory."""
        if type(self.files) is not dict:
            return False
        texts = [self.session_id, self.save_id, *self.unequal]
        numbers = [self.iteration, self.epoch, self.world_size, self.metadata_digest]
        numbers += self.files.values()
        return (
            all(type(text) is str for text in texts)
            and all(type(number) is int and number >= 0 for number in numbers)
            and not any(name in ("", ".", "..") or {*name} & {"/", "\0"} for name in self.files)
            and _SAVE_ID.fullmatch(self.save_id) is not None
        )

    def check_identity(self, folder: Folder, session_id: str) -> None:
        """Check that the record is of this directory; raises CorruptShardError if it is not."""
        of_folder = session_id, folder.iteration, folder.epoch
        if (self.session_id, self.iteration, self.epoch) != of_folder:
            raise CorruptShardError(
                f"{folder.path} was saved as iteration {self.iteration}, epoch {self.epoch} of "
                f"session {self.session_id!r}: give it its name again"
            )

    def check_files(self, folder: Folder) -> None:
        """Check that all files are there, by their sizes."""
        with storage_errors("look at", folder.path):
            found = folder.path.sizes(self.files)
        for name, nbytes in self.files.items():
            path = folder.path / name
            if name not in found:
                raise CorruptShardError(f"{path} is gone")
            if found[name] != nbytes:
                raise CorruptShardError(
                    f"{path} has {found[name]} bytes, and was saved with {nbytes}"
                )


def session_root(root: Place, session_id: str) -> Place:
    return root / session_name(session_id) if session_id else root


def folders_in(root: Place) -> tuple[list[Folder], list[Folder]]:
    """List the folders of a root: those that may be checkpoints, the newest first, and others.

    The others are unfinished, or were about to be removed.
    """
    with storage_errors("read", root):
        names = dict.fromkeys(root.names())
    found = [folder for name in names if (folder := folder_named(root, name)) is not None]
    folders = [folder for folder in found if folder.is_complete_by(names)]
    folders.sort(key=lambda folder: folder.version, reverse=True)
    return folders, [folder for folder in found if not folder.is_complete_by(names)]


def remove(folder: Folder) -> bool:
    """Remove a checkpoint unless it is pinned, which it may be since; return whether it is gone."""
    with storage_errors("remove", folder.path):
        return not folder.is_pinned and folder.remove()


def put_back_if_pinned(removed: Folder) -> bool:
    """Give a half-removed checkpoint its name again if it is pinned; return whether it was."""
    if removed.label != _REMOVED or not (removed.is_pinned and removed.has_record):
        return False
    _directory(removed.path).rename(_directory(removed.finished.path))
    return True


def try_to_remove(folder: Folder) -> None:
    """Remove what is no checkpoint; what cannot go now goes at a later save."""
    try:
        folder.discard()
    except OSError as error:
        logger.warning(
            "%s could not be removed, and will be at a later save: %s", folder.path, error
        )


def pin(folder: Folder) -> None:
    """Have every job keep a checkpoint until it is unpinned, whatever its retention is."""
    with storage_errors("pin", folder.path):
        folder.beside(PIN_NAME).put(b"pinned\n")
    if not (folder.is_pinned and folder.has_record):
        raise StorageError(
            f"{folder.path} was not pinned in time: a job is removing it. Look whether it is still "
            f"there, and pin it again"
        )


def unpin(folder: Folder) -> None:
    """Leave a checkpoint to the retention of the jobs that save; nothing if it is not pinned."""
    with storage_errors("unpin", folder.path):
        folder.beside(PIN_NAME).remove()
        folder.path.sync()


@dataclass(frozen=True, slots=True)
class SharedCheckpoint:
    """One directory that was committed; without a ``problem`` it can be loaded, as it seems.

    The record is that of no save if it cannot be read, or speaks of another directory.
    """

    folder: Folder
    record: CommitRecord
    problem: CheckpointingException | None = None
    saved_at: float = 0.0
    is_pinned: bool = False

    @property
    def files(self) -> dict[Place, int | None]:
        """Its files, and how many bytes each has, if that is recorded."""
        names: dict[str, int | None] = {**self.record.files}
        if self.record.save_id:
            names[_METADATA_NAME] = None
        return {self.folder.path / name: nbytes for name, nbytes in names.items()}


class SharedSession:
    """One training run's part of a root."""

    def __init__(self, path: Place, session_id: str) -> None:
        self.path, self.session_id = path, session_id
        self.notes = notes_in(path)

    def checkpoints(self) -> list[SharedCheckpoint]:
        """Directories that were committed, the newest first; data is not read."""
        found = [self._look(folder) for folder in folders_in(self.path)[0]]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def whole(self) -> list[SharedCheckpoint]:
        """Checkpoints whose files are all there, the newest first; others are logged."""
        found = [self.committed_in(folder) for folder in folders_in(self.path)[0]]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def committed_in(self, folder: Folder, *, asked_for: bool = False) -> SharedCheckpoint | None:
        """The checkpoint in a directory whose files are all there; damage is logged, or raised."""
        known = self._look(folder)
        if known is None or known.problem is None:
            return known
        if asked_for or isinstance(known.problem, StorageError):
            raise known.problem
        # A checkpoint that a job prunes meanwhile is not damaged.
        if folder.has_record:
            logger.error("%s is not counted: %s", folder.path, known.problem)
        return None

    def noted_trusts(self) -> Trusts:
        return self.notes.trusts()

    def leftovers(self) -> list[Folder]:
        """Directories of saves under way, of saves that were cut off, and of what is removed."""
        return folders_in(self.path)[1]

    def _look(self, folder: Folder) -> SharedCheckpoint | None:
        """The checkpoint in a directory, whole or not; ``None`` if none is committed there."""
        record = CommitRecord("", folder.iteration, folder.epoch, "", 0, {}, 0)
        problem, saved_at, is_pinned = None, 0.0, False
        try:
            found = CommitRecord.read(folder.beside(RECORD_NAME))
            if found is None:
                return None
            is_pinned = folder.is_pinned
            with storage_errors("look at", folder.path):
                saved_at = folder.beside(RECORD_NAME).modified_at()
            found.check_identity(folder, self.session_id)
            record = found
            record.check_files(folder)
        except (CorruptShardError, StorageError) as error:
            if isinstance(error.__cause__, FileNotFoundError):
                # A job has pruned it meanwhile.
                return None
            problem = error
        return SharedCheckpoint(folder, record, problem, saved_at, is_pinned)


def why_kept(
    checkpoints: Sequence[SharedCheckpoint], saved: SharedCheckpoint | None = None
) -> dict[Version, tuple[Reason, ...]]:
    """Why checkpoints stay, by the rules of the job that saved one; others are to go.

    That is by default the newest, as another process sees it.
    """
    whole = [known for known in checkpoints if known.problem is None]
    saved = saved or max(whole, key=lambda known: known.folder.version, default=None)
    if saved is None:
        return {}
    return reasons_to_keep(
        saved.record.retention,
        [Candidate(c.folder.version, c.record.metrics, c.is_pinned) for c in whole],
        *(saved.folder.version, saved.record.resumed_from),
    )


def find_shared_sessions(given: str | os.PathLike[str] | Place) -> list[SharedSession]:
    """The sessions of a root on shared storage; none if it is no such root, but a directory."""
    root = place_of(given)
    try:
        names = {*root.names()}
    except OSError as error:
        raise StorageError(f"{root} cannot be read: {error.strerror or error}") from error
    if RECORD_NAME in names:
        raise StorageError(
            f"{root} is one checkpoint of a root on shared storage: give the folder above it"
        )
    named = sorted(name for name in names if name.startswith(SESSION_PREFIX))
    sessions = [SharedSession(root, "")]
    sessions += [SharedSession(root / name, session_of(name)) for name in named]
    sessions = [session for session in sessions if _is_root(session.path)]
    if not (sessions or isinstance(root, FilePlace)):
        raise StorageError(f"{root} is no root on shared storage: no job has saved there")
    return sessions


def _is_root(folder: Place) -> bool:
    if any(folders_in(folder)):
        return True
    with storage_errors("read", folder):
        return (folder / LOCK_NAME).size() is not None


def verify_file(
    path: Place, nbytes: int | None, record: CommitRecord, on_read: Callable[[int], None]
) -> int:
    """Check all of a data file, or the metadata (``nbytes`` is ``None``); return its size."""
    with storage_errors("read", path):
        if path.size() is None:
            raise CorruptShardError(f"{path} is gone")
    if nbytes is not None:
        verify_data_file(path, record.save_id, nbytes, on_read)
        return nbytes
    with storage_errors("read", path):
        data = path.read()
    if xxhash.xxh3_64_intdigest(data) != record.metadata_digest:
        raise CorruptShardError("it is damaged, or belongs to another save")
    return len(data)
