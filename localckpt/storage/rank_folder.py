"""Claims on ranks' folders: taken at the start, released at the end, held by one job at a time."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from localckpt.errors import StorageError
from localckpt.lineage import Lineage
from localckpt.own_folders import lock_holder, make_own_folders, require_own_file
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import (
    DIRTY,
    LOCK_NAME,
    NOTES_NAME,
    OWNER_NAME,
    TOKEN_NAME,
    session_name,
)
from localckpt.storage.notes import Notes, NotesFile, read_notes
from localckpt.storage.owner import Owner, Running, owner_of, read_note, write_note
from localckpt.storage.store import Claim
from localckpt.trust import Trusts
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

# A killed process exists until the kernel has freed its memory.
_LEAVING_S = 10.0


class SeenFolder(Claim):
    """Read-only view of a rank's folder, below the ``session``; ``token`` names this node."""

    def __init__(self, root: Path, session_id: str, rank: int) -> None:
        self._root = root
        self.rank = rank
        self.session = root / session_name(session_id)
        self.path = self.session / str(rank)
        self._process = Owner.me()
        self.owner = str(self._process)
        self.token = self._find_token()

    @property
    def is_ours(self) -> bool:
        """True if this process has claimed the folder, and no other claim has replaced that."""
        return False

    times_restored = 0
    """Number of times that the folder was made again by :meth:`restore`."""

    def restore(self) -> None:
        """Make the folder again if it was removed; a view leaves that to whoever writes there."""

    def leave(self) -> None:
        """Release the folder for others."""

    def ranks(self) -> set[int]:
        if not self.session.is_dir():
            return set()
        with storage_errors("read", self.session):
            return {
                int(entry.name)
                for entry in os.scandir(self.session)
                if entry.name.isdecimal() and entry.is_dir(follow_symlinks=False)
            }

    def newest_epoch(self) -> int:
        return max((notes.epoch for notes in self._all_notes()), default=0)

    def noted_lineages(self) -> list[Lineage]:
        return list(dict.fromkeys(n.lineage for n in self._all_notes() if n.lineage is not None))

    def noted_trusts(self) -> Trusts:
        running = Running()
        return Trusts.of(notes.trusts(running) for notes in self._all_notes())

    def _all_notes(self) -> list[Notes]:
        with storage_errors("read", self.session):
            return [read_notes(self.session / str(rank)) for rank in sorted(self.ranks())]

    def _find_token(self) -> str:
        token = ""
        with storage_errors("read", self._root):
            if (self._root / TOKEN_NAME).exists():
                token = read_note(self._root / TOKEN_NAME).strip()
        # Without a store, a name that is the same for all ranks of the node.
        return token or f"{self._process.boot} without {self._root}"


class RankFolder(SeenFolder):
    """A rank's folder on this node, claimed by this process; made if it is missing.

    Removes the unfinished files of dead processes. Raises StorageError if the directory cannot be
    used, or a live process of another job owns the folder until the deadline.
    """

    def __init__(self, root: Path, session_id: str, rank: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._noted: tuple[int, Lineage | None] | None = None
        self._job = frozenset[str]()
        super().__init__(root, session_id, rank)
        self._notes = NotesFile(self.path)

    @property
    def is_ours(self) -> bool:
        return read_note(self.path / OWNER_NAME) == self._claim

    def leave(self) -> None:
        (self.path / OWNER_NAME).unlink()

    def restore(self) -> None:
        """Make the folder again if it was removed; StorageError if another store is there now."""
        # What each claim, and each epoch, leaves in the folder as long as it is there.
        mark = self.path / (NOTES_NAME if self._noted else OWNER_NAME)
        with storage_errors("make again", self.path):
            if os.path.lexists(mark):
                return
            make_own_folders(self._root, self.session.name, self.path.name)
            with lock_store(self._root, self._timeout_s):
                found = self._read_token(self.token)
                if found != self.token:
                    raise StorageError(
                        f"{self._root} is the store of another node now: was another disk mounted "
                        f"there? Restart the job. Nothing was changed"
                    )
                write_note(self.path / OWNER_NAME, self._claim)
        logger.warning(
            "%s was removed or emptied while the job ran, and is made again: checkpoints lack what "
            "it held",
            self.path,
        )
        self.times_restored += 1
        self._write_epoch()

    def begin_epoch(self, epoch: int, owners: Collection[str], timeout_s: float) -> None:
        """See :class:`Claim`; the lineage of the last epoch stays until the new one has its own."""
        self.restore()
        with storage_errors("read", self.session):
            for rank in sorted(self.ranks()):
                folder = self.session / str(rank)
                _await_leaving(folder, lambda owner: str(owner) in owners, timeout_s)
            lineage = read_notes(self.path).lineage
        self._job = frozenset(owners)
        self._note_epoch(epoch, lineage)

    def note_lineage(self, lineage: Lineage) -> None:
        self._note_epoch(lineage.epoch.number, lineage)

    def change(self, change: Callable[[Notes], Notes], *, in_handler: bool = False) -> None:
        if not in_handler:
            self.restore()
        self._notes.change(change, in_handler=in_handler)

    def forget_starts(self) -> None:
        super().forget_starts()
        # Also in the folders that no rank of the job writes: the first rank here does that.
        folders = {rank: self.session / str(rank) for rank in self.ranks()}
        written = {rank for rank, f in folders.items() if str(owner_of(f)) in self._job}
        if self.rank == min(written, default=None):
            for rank in folders.keys() - written:
                NotesFile(folders[rank]).forget_starts()

    def _note_epoch(self, epoch: int, lineage: Lineage | None) -> None:
        self.restore()
        self._noted = epoch, lineage
        self._write_epoch()

    def _write_epoch(self) -> None:
        if self._noted is not None:
            epoch, lineage = self._noted
            self._notes.change(lambda notes: replace(notes, epoch=epoch, lineage=lineage))

    def _find_token(self) -> str:
        """Read or make the node's name, and claim the folder, under the lock of the store."""
        # Unique for each claim: of several claims of one process, the last one has the folder.
        self._claim = f"{self._process}\n{secrets.token_hex(8)}"
        with storage_errors("use", self.path):
            make_own_folders(self._root, self.session.name, self.path.name)
            require_own_file(self._root / TOKEN_NAME)
            with lock_store(self._root, self._timeout_s):
                token = self._read_token(secrets.token_hex(16))
                self._take(self._timeout_s)
                return token

    def _read_token(self, new: str) -> str:
        path = self._root / TOKEN_NAME
        if not path.exists():
            # The lock of the store is held, so no other process writes a name.
            write_note(path, new)
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StorageError(
                f"other users can write to {path}, which names the node: run chmod 600 on it if "
                f"you trust what it says, or remove it if no job uses {self._root}"
            )
        token = read_note(path).strip()
        if not re.fullmatch(r"[0-9a-f]{32}", token):
            raise StorageError(
                f"{path} does not hold a node's name: remove it if nobody else uses {self._root}"
            )
        return token

    def _take(self, timeout_s: float) -> None:
        _await_leaving(self.path, lambda owner: owner == self._process, timeout_s)
        # In all folders, because the rank of a dead process may now run on another node.
        running = Running()
        for entry in os.scandir(self.session):
            if entry.is_dir(follow_symlinks=False):
                _remove_leftovers(Path(entry.path), running)
        write_note(self.path / OWNER_NAME, self._claim)


def lock_store(root: Path, timeout_s: float) -> AbstractContextManager[object]:
    """Lock a store, so that no other process starts or cleans up there; raises StorageError."""
    path = root / LOCK_NAME
    with storage_errors("lock", path):
        require_own_file(path)
        try:
            return FileLock(path, timeout=timeout_s, mode=0o600).acquire()
        except Timeout as error:
            raise StorageError(
                f"another process held {path} for {timeout_s:g} s ({lock_holder(path)}): a job is "
                f"starting, or see who it is (fuser); try again once it is gone. Nothing was "
                f"changed"
            ) from error


def _await_leaving(folder: Path, is_ours: Callable[[Owner], bool], timeout_s: float) -> None:
    """Wait until no other live process owns a rank's folder; raise StorageError if one stays."""
    owner = owner_of(folder)
    if owner is None or is_ours(owner):
        return
    # Half of it, so that this error comes before that of storage that has not answered in time.
    until_s = min(_LEAVING_S, timeout_s / 2)

    def has_left() -> bool:
        # A process that joins a job again leaves its folder, and goes on.
        now = owner_of(folder)
        return now is None or is_ours(now) or now not in Running()

    if not wait_until(has_left, until_s, shortest_s=0.05):
        raise StorageError(
            f"{folder} is in use by process {owner.pid} of a job that is still running: "
            f"end it, or give this job another session_id or directory"
        )


def _remove_leftovers(folder: Path, running: Running) -> None:
    if owner_of(folder) in running:
        return
    for leftover in folder.glob(f"*{DIRTY}"):
        logger.info("removing %s, which a process that is gone left behind", leftover)
        leftover.unlink(missing_ok=True)
