"""Read-only view of a store, which takes no locks; a job may use the store at the same time.

Files may appear, vanish or be recycled during a read. The result of a read counts only if the path
still names the same file afterwards: a job renames a file before overwriting it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from localckpt.errors import CheckpointingException, StorageError
from localckpt.ids import Checkpoint, ShardRecord
from localckpt.lineage import EpochId, Lineage
from localckpt.state_dict.identify import read_verified_record, verify
from localckpt.storage.files import FileSource
from localckpt.storage.names import (
    CORRUPT,
    DIRTY,
    EPOCH_NAME,
    OWNER_NAME,
    RECYCLED,
    SESSION_PREFIX,
    SHARD,
    TOKEN_NAME,
    session_of,
)
from localckpt.storage.owner import Running, epoch_note, owner_of, read_note
from localckpt.storage.problem import Problem
from localckpt.storage.staging import find_buffers, is_buffer, is_live
from localckpt.storage.trust_notes import TrustNotes
from localckpt.trust import Trust

__all__ = [
    "Leftover",
    "LeftoverKind",
    "SessionFolder",
    "ShardFile",
    "UncountedFile",
    "find_sessions",
    "find_staging",
    "node_token",
    "uncounted_file",
]

LeftoverKind = Literal["dirty", "recycled", "corrupt", "staging", "shard"]

_ENDINGS: dict[str, LeftoverKind] = {DIRTY: "dirty", RECYCLED: "recycled", CORRUPT: "corrupt"}
_LOOKS = 4


@dataclass(frozen=True, slots=True)
class ShardFile:
    """File that holds a piece, identified by its header."""

    path: Path
    record: ShardRecord
    modified_at: float = 0.0
    """Time of the last write, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class UncountedFile:
    """File that is named like a shard but cannot be used as one of this session."""

    path: Path
    nbytes: int
    problem: Problem

    @property
    def description(self) -> str:
        """Text of the problem, with the identity that the file claims."""
        claim, text = self.problem.claim, self.problem.text
        return f"it claims to be {claim}, and {text}" if claim else text


@dataclass(frozen=True, slots=True)
class Leftover:
    """File that can be removed: unfinished, recycled, in quarantine, or a staging buffer.

    Shards are leftovers only in the result of :meth:`SessionFolder.of_epoch`.
    """

    path: Path
    nbytes: int
    kind: LeftoverKind
    is_live: bool
    """True if the process that owns the file still runs."""


class SessionFolder:
    """Directory of one session (training run) in a store.

    Args:
        folder: Path of the directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session_id = session_of(folder.name)

    def shards(self) -> tuple[list[ShardFile], list[UncountedFile]]:
        """Read the headers of all files that are named like shards.

        Raises:
            StorageError: A directory cannot be read.
        """
        found: list[ShardFile] = []
        uncounted: list[UncountedFile] = []
        for folder in _folders(self.folder):
            for _ in range(_LOOKS):
                paths = _files(folder, SHARD)
                files = [self._examine(path, read_verified_record) for path in paths]
                # A file vanished: a new one, not listed yet, may have taken its place.
                if None not in files:
                    break
            found += [file for file in files if isinstance(file, ShardFile)]
            uncounted += [file for file in files if isinstance(file, UncountedFile)]
        return found, uncounted

    def verify_again(self, path: Path) -> ShardFile | UncountedFile | None:
        """Verify header and blocks of a file in quarantine; returns as :meth:`verify` does."""
        file = self._examine(path, read_verified_record)
        return self.verify(file, lambda _: None) if isinstance(file, ShardFile) else file

    def verify(
        self, shard: ShardFile, on_read: Callable[[int], None]
    ) -> ShardFile | UncountedFile | None:
        """Read a whole shard, and verify every block.

        Args:
            shard: A file from :meth:`shards`.
            on_read: Called with the number of bytes after each read.

        Returns:
            The shard if it is good; ``None`` if the file was renamed or removed during the read.
        """

        def examine(source: FileSource) -> ShardRecord:
            verify(source, shard.record.identity, on_read)
            return shard.record

        found = self._examine(shard.path, examine)
        if isinstance(found, UncountedFile):
            # The header is verified, so the identity is part of the text rather than a claim.
            problem = replace(found.problem, text=str(found.problem), claim="")
            return replace(found, problem=problem)
        return found

    def noted_lineages(self) -> list[Lineage]:
        """Return the lineages in the epoch notes of all ranks' folders, where readable.

        Raises:
            StorageError: A directory cannot be read.
        """
        found = []
        for folder in _folders(self.folder):
            with _readable(folder / EPOCH_NAME):
                _, lineage = epoch_note(folder)
            found += [lineage] if lineage is not None else []
        return found

    def noted_trust(self) -> Trust:
        """Read all ranks' notes on trust in checkpoints.

        Raises:
            StorageError: A directory cannot be read.
        """
        noted = [TrustNotes(folder).read() for folder in _folders(self.folder)]
        return Trust.of([note for trust in noted for note in trust.notes])

    def forget(self, checkpoint: Checkpoint) -> None:
        """Remove all ranks' notes on trust in one checkpoint.

        Raises:
            StorageError: A directory cannot be written to.
        """
        for folder in _folders(self.folder):
            TrustNotes(folder).forget(checkpoint)

    def of_epoch(self, epoch: EpochId) -> list[Leftover]:
        """List the shards of one epoch; live are those that a running process may have saved.

        Raises:
            StorageError: A directory cannot be read.
        """
        running = Running()
        is_live: dict[Path, bool] = {}
        for folder in _folders(self.folder):
            with _readable(folder / OWNER_NAME):
                number, lineage = epoch_note(folder)
                # An attempt that has not saved yet may still load any shard.
                has_begun = lineage is not None and number == str(lineage.epoch.number)
                is_own = not has_begun or (lineage is not None and lineage.epoch == epoch)
                is_live[folder] = is_own and owner_of(folder) in running
        return [
            Leftover(shard.path, shard.record.nbytes, "shard", is_live.get(shard.path.parent, True))
            for shard in self.shards()[0]
            if shard.record.identity.generation.epoch_id == epoch
        ]

    def leftovers(self) -> list[Leftover]:
        """List unfinished, recycled and quarantined files in the folders of all ranks.

        Raises:
            StorageError: A directory cannot be read.
        """
        running = Running()
        found = []
        for folder in _folders(self.folder):
            with _readable(folder / OWNER_NAME):
                is_live = owner_of(folder) in running
            for ending, kind in _ENDINGS.items():
                for path in _files(folder, ending):
                    status = _status(path)
                    if status is not None:
                        found.append(Leftover(path, status.st_size, kind, is_live))
        return found

    def corrupt_files(self) -> list[Path]:
        """List the files in quarantine in the folders of all ranks.

        Raises:
            StorageError: A directory cannot be read.
        """
        return [path for folder in _folders(self.folder) for path in _files(folder, CORRUPT)]

    def _examine(
        self, path: Path, examine: Callable[[FileSource], ShardRecord]
    ) -> ShardFile | UncountedFile | None:
        before = _status(path)
        if before is None:
            return None
        result: ShardFile | UncountedFile
        try:
            source = FileSource(path)
            try:
                result = self._judge(path, examine(source))
            finally:
                source.close()
        except CheckpointingException as error:
            result = UncountedFile(path, before.st_size, Problem.of(error, path))
        after = _status(path)
        if after is None or after.st_ino != before.st_ino:
            return None
        if isinstance(result, ShardFile):
            return replace(result, modified_at=after.st_mtime)
        return result

    def _judge(self, path: Path, record: ShardRecord) -> ShardFile | UncountedFile:
        if record.identity.session_id != self.session_id:
            why = f"it belongs to session {record.identity.session_id!r}"
            return UncountedFile(path, record.nbytes, Problem("other session", why, path=path))
        return ShardFile(path, record)


def find_sessions(root: Path) -> list[SessionFolder]:
    """List the sessions of a store.

    Raises:
        StorageError: The directory is no store, or cannot be read.
    """
    sessions = [path for path in _folders(root) if path.name.startswith(SESSION_PREFIX)]
    if not sessions and node_token(root) is None:
        for parent in list(root.absolute().parents)[:2]:
            if node_token(parent) is not None:
                raise StorageError(f"{root} is a part of a store: give {parent}")
        raise StorageError(
            f"{root} is no store of localckpt: give the directory that the manager was given"
        )
    return [SessionFolder(path) for path in sessions]


def node_token(root: Path) -> str | None:
    """Read the token that names a store's node; ``None`` if there is none or it is unreadable."""
    try:
        return read_note(root / TOKEN_NAME).strip() or None
    except OSError:
        return None


def uncounted_file(path: Path, error: CheckpointingException) -> UncountedFile:
    """Describe a file that cannot be used because of an error."""
    status = _status(path)
    return UncountedFile(path, 0 if status is None else status.st_size, Problem.of(error, path))


def find_staging() -> list[Leftover]:
    """List the staging buffers in this node's shared memory, of all stores.

    Only root sees the buffers of other users.
    """
    running = Running()
    found = []
    for path in find_buffers():
        live, status = is_live(path, running), _status(path)
        # The lock file of a live process is no leftover; that of a dead process is one.
        if live and not is_buffer(path):
            continue
        if live is None or status is None or os.geteuid() not in (0, status.st_uid):
            continue
        found.append(Leftover(path, status.st_size, "staging", live))
    return found


def _status(path: Path) -> os.stat_result | None:
    with _readable(path):
        try:
            return path.lstat()
        except FileNotFoundError:
            return None


def _folders(folder: Path) -> list[Path]:
    with _readable(folder):
        entries = [e for e in os.scandir(folder) if e.is_dir(follow_symlinks=False)]
    return sorted(Path(entry.path) for entry in entries)


def _files(folder: Path, ending: str) -> list[Path]:
    with _readable(folder):
        found = [
            Path(entry.path)
            for entry in os.scandir(folder)
            if entry.name.endswith(ending) and entry.is_file(follow_symlinks=False)
        ]
    return sorted(found)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
