"""Read-only view of a store, problems of files in it, and the quarantine of bad copies.

The view takes no locks; a job may use the store at the same time.
Files may appear, vanish or be recycled during a read. The result of a read counts only if the path
still names the same file afterwards: a job renames a file before overwriting it.

A bad copy is renamed, never deleted, and its problem is stored in its extended attributes.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    FormatVersionError,
    StorageError,
)
from localckpt.ids import Checkpoint, ShardRecord
from localckpt.lineage import Lineage
from localckpt.own_folders import open_below
from localckpt.state_dict.source import ImageBytes, read_verified_record
from localckpt.storage.failures import storage_errors
from localckpt.storage.files import FileSource
from localckpt.storage.names import (
    CORRUPT,
    DIRTY,
    NOTES_NAME,
    OWNER_NAME,
    RECYCLED,
    SESSION_PREFIX,
    SHARD,
    TOKEN_NAME,
    session_of,
)
from localckpt.storage.notes import Notes, NotesFile, read_notes
from localckpt.storage.owner import Running, owner_of, read_note
from localckpt.trust import Trusts

logger = logging.getLogger(__name__)

LeftoverKind = Literal["dirty", "recycled", "corrupt"]

_ENDINGS: dict[str, LeftoverKind] = {DIRTY: "dirty", RECYCLED: "recycled", CORRUPT: "corrupt"}
_LOOKS = 4

_WHY, _SHARD, _WHY_NBYTES = "user.localckpt.why", "user.localckpt.shard", 1000
_KIND = "user.localckpt.kind"
_QUARANTINED_AGAIN = re.compile(rf"(?<={re.escape(SHARD)})\.[0-9a-f]{{8}}$")

ProblemKind = Literal["damaged", "other version", "other session", "unreadable", "given up"]
"""Kinds of problems; ``"given up"``: a good file that the job resumed from in vain too often."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why a file cannot be used, with the identity that its unverified header claims."""

    kind: ProblemKind
    text: str
    claim: str = ""

    @classmethod
    def of(cls, error: CheckpointingException) -> Problem:
        if isinstance(error, FormatVersionError):
            return cls("other version", str(error))
        if isinstance(error, CorruptShardError):
            return cls("damaged", error.damage or str(error), error.shard)
        cause = error.__cause__
        text = (isinstance(cause, OSError) and cause.strerror) or str(error)
        return cls("unreadable", text)

    def __str__(self) -> str:
        return f"{self.claim} is damaged: {self.text}" if self.claim else self.text


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
class Removable:
    """File that can be removed: unfinished, recycled, or in quarantine."""

    path: Path
    nbytes: int
    kind: LeftoverKind
    is_live: bool
    """True if the process that owns the file still runs."""


class KnownFiles:
    """Records of image files that were read, or written, by this process, as long as they are so.

    A start lists the files of its node several times, and reads the first MiB of each only once.
    """

    def __init__(self) -> None:
        self._records: dict[Path, tuple[tuple[int, ...], ShardRecord]] = {}

    def add(self, path: Path, record: ShardRecord, status: os.stat_result | None) -> None:
        if status is not None:
            self._records[path] = _state_of(status), record

    def record(self, path: Path, status: os.stat_result) -> ShardRecord | None:
        state, record = self._records.get(path, ((), None))
        return record if state == _state_of(status) else None

    def keep(self, paths: Iterable[Path]) -> None:
        """Forget all other files."""
        self._records = {p: self._records[p] for p in paths if p in self._records}


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class SessionFolder:
    """Directory of one session (training run) in a store; its methods raise StorageError."""

    def __init__(self, folder: Path, known: KnownFiles | None = None) -> None:
        self.folder = folder
        self._known = known or KnownFiles()
        self.session_id = session_of(folder.name)

    def shards(self) -> tuple[list[ShardFile], list[UncountedFile]]:
        """Read the headers of all files that are named like shards."""
        found: list[ShardFile] = []
        uncounted: list[UncountedFile] = []
        for folder in _folders(self.folder):
            for _ in range(_LOOKS):
                paths = _files(folder, SHARD)
                files = [self._look_at(path) for path in paths]
                # A file vanished: a new one, not listed yet, may have taken its place.
                if None not in files:
                    break
            found += [file for file in files if isinstance(file, ShardFile)]
            uncounted += [file for file in files if isinstance(file, UncountedFile)]
        return found, uncounted

    def _look_at(self, path: Path) -> ShardFile | UncountedFile | None:
        if (status := _status(path)) is not None:
            if (record := self._known.record(path, status)) is not None:
                return ShardFile(path, record, status.st_mtime)
            found = self._examine(path, read_verified_record)
            if isinstance(found, ShardFile):
                self._known.add(path, found.record, status)
            return found
        return None

    def verify_again(self, path: Path) -> ShardFile | UncountedFile | None:
        """Verify header and blocks of a file in quarantine; returns as :meth:`verify` does."""
        file = self._examine(path, read_verified_record)
        return self.verify(file, lambda _: None) if isinstance(file, ShardFile) else file

    def verify(
        self, shard: ShardFile, on_read: Callable[[int], None]
    ) -> ShardFile | UncountedFile | None:
        """Verify every block of a shard; ``None`` if the file was renamed or removed meanwhile."""

        def examine(source: FileSource) -> ShardRecord:
            ImageBytes(source, shard.record.identity, on_read).verify()
            return shard.record

        found = self._examine(shard.path, examine)
        if isinstance(found, UncountedFile):
            # The header is verified, so the identity is part of the text rather than a claim.
            problem = replace(found.problem, text=str(found.problem), claim="")
            return replace(found, problem=problem)
        return found

    def noted_lineages(self) -> list[Lineage]:
        return [notes.lineage for notes in self._notes() if notes.lineage is not None]

    def noted_trusts(self) -> Trusts:
        running = Running()
        return Trusts.of(notes.trusts(running) for notes in self._notes())

    def _notes(self) -> Iterator[Notes]:
        for folder in _folders(self.folder):
            with _readable(folder / NOTES_NAME):
                yield read_notes(folder)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Remove all ranks' notes on trust in one checkpoint."""
        for folder in _folders(self.folder):
            NotesFile(folder).change(lambda notes: notes.without(checkpoint))

    def leftovers(self) -> list[Removable]:
        """List unfinished, recycled and quarantined files in the folders of all ranks."""
        running = Running()
        found = []
        for folder in _folders(self.folder):
            with _readable(folder / OWNER_NAME):
                is_live = owner_of(folder) in running
            for ending, kind in _ENDINGS.items():
                for path in _files(folder, ending):
                    status = _status(path)
                    if status is not None:
                        found.append(Removable(path, status.st_size, kind, is_live))
        return found

    def quarantined(self) -> dict[Path, Problem]:
        folders = _folders(self.folder)
        return {f: why_quarantined(f) for folder in folders for f in _files(folder, CORRUPT)}

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
            result = UncountedFile(path, before.st_size, Problem.of(error))
        after = _status(path)
        if after is None or after.st_ino != before.st_ino:
            return None
        if isinstance(result, ShardFile):
            return replace(result, modified_at=after.st_mtime)
        return result

    def _judge(self, path: Path, record: ShardRecord) -> ShardFile | UncountedFile:
        if record.identity.session_id != self.session_id:
            why = f"it belongs to session {record.identity.session_id!r}"
            return UncountedFile(path, record.nbytes, Problem("other session", why))
        return ShardFile(path, record)


def find_sessions(root: Path) -> list[SessionFolder]:
    """List the sessions of a store; raises StorageError if it is none, or cannot be read."""
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


def quarantine(path: Path, problem: Problem) -> bool:
    """Rename a bad file, so that it is never read again; False, and a log entry, if that fails."""
    # The new copy of a quarantined shard may be bad, too.
    again = f".{secrets.token_hex(4)}" if os.path.exists(f"{path}{CORRUPT}") else ""
    renamed = Path(f"{path}{again}{CORRUPT}")
    try:
        os.rename(path, renamed)
    except FileNotFoundError:
        logger.info("%s is gone: another rank quarantined it, or it was removed", path)
    except OSError as error:
        # Logged only: the copy is not used in any case, and an error would end this rank alone.
        logger.error("%s is bad (%s), and could not be quarantined: %s", path, problem, error)
    else:
        logger.warning("%s is in quarantine as *%s: %s", path, CORRUPT, problem)
        # Not every file system has extended attributes; the log has the problem in any case.
        with suppress(OSError):
            told = {_WHY: problem.text, _SHARD: problem.claim, _KIND: problem.kind}
            for name, text in told.items():
                value = text.encode(errors="replace")[:_WHY_NBYTES]
                os.setxattr(renamed, name, value, follow_symlinks=False)
        return True
    return False


def why_quarantined(path: Path) -> Problem:
    text = _attribute(path, _WHY) or "it was quarantined as damaged"
    kind: ProblemKind = "given up" if _attribute(path, _KIND) == "given up" else "damaged"
    return Problem(kind, text, _attribute(path, _SHARD))


def _attribute(path: Path, name: str) -> str:
    try:
        return os.getxattr(path, name, follow_symlinks=False).decode(errors="replace")
    except OSError:
        return ""


def put_back(path: Path) -> Path:
    """Give a file in quarantine its old name, or one like it; raises StorageError, and it stays."""
    name = _QUARANTINED_AGAIN.sub("", path.name.removesuffix(CORRUPT))
    back = path.with_name(name)
    with storage_errors("put back", path):
        rank = path.parent
        folder = open_below(rank.parent.parent, rank.parent.name, rank.name)
        try:
            try:
                # Unlike a rename, a link never replaces an existing file.
                _link(path, back, folder)
            except FileExistsError:
                back = path.with_name(f"{name.removesuffix(SHARD)}.{secrets.token_hex(4)}{SHARD}")
                _link(path, back, folder)
            for attribute in (_WHY, _SHARD, _KIND):
                with suppress(OSError):
                    there = f"/proc/self/fd/{folder}/{back.name}"
                    os.removexattr(there, attribute, follow_symlinks=False)
            os.unlink(path.name, dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)
    return back


def _link(path: Path, back: Path, folder: int) -> None:
    os.link(path.name, back.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


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
