"""Claims on ranks' folders: taken at the start, released at the end, held by one job at a time.

The folder's owner and its last epoch are noted in small files beside the shards.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from localckpt.errors import StorageError
from localckpt.ids import Checkpoint
from localckpt.lineage import Lineage
from localckpt.own_folders import lock_holder, make_own_folders, require_own_file
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import (
    DIRTY,
    EPOCH_NAME,
    LOCK_NAME,
    OWNER_NAME,
    RECYCLED_BEFORE,
    TOKEN_NAME,
    session_name,
)
from localckpt.storage.owner import Owner, Running, epoch_note, owner_of, read_note, write_note
from localckpt.storage.store import Claim
from localckpt.storage.trust_notes import TrustNotes
from localckpt.storage.write import sync_folder
from localckpt.trust import Mark, Measured, Resumes, Trust
from localckpt.waiting import wait_until

__all__ = ["RankFolder", "SeenFolder", "lock_store"]

logger = logging.getLogger(__name__)

# A killed process exists until the kernel has freed its memory.
_LEAVING_S = 10.0
_SHORTEST_PAUSE_S = 0.05


class SeenFolder(Claim):
    """Read-only view of a rank's folder, which makes, claims and notes nothing.

    Args:
        root: The store's directory, which may be missing.
        session_id: The training run.
        rank: Rank of the folder.

    Attributes:
        path: The folder.
        session: Directory of all ranks' folders.
        token: Name of this node, the same for all ranks that use the store.
    """

    def __init__(self, root: Path, session_id: str, rank: int) -> None:
        self._root = root
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
        """Return the ranks that have a folder in this session."""
        if not self.session.is_dir():
            return set()
        with storage_errors("read", self.session):
            return {
                int(entry.name)
                for entry in os.scandir(self.session)
                if entry.name.isdecimal() and entry.is_dir(follow_symlinks=False)
            }

    def newest_epoch(self) -> int:
        epochs = [0]
        with storage_errors("read", self.session):
            for rank in self.ranks():
                text, _ = epoch_note(self.session / str(rank))
                # Ignore a number that is longer than a header can have.
                if text.isdecimal() and text.isascii() and len(text) < 19:
                    epochs.append(int(text))
        return max(epochs)

    def noted_lineages(self) -> list[Lineage]:
        with storage_errors("read", self.session):
            noted = (epoch_note(self.session / str(rank))[1] for rank in sorted(self.ranks()))
            return list(dict.fromkeys(lineage for lineage in noted if lineage is not None))

    def noted_trust(self) -> Trust:
        noted = [TrustNotes(self.session / str(rank)).read() for rank in sorted(self.ranks())]
        return Trust.of([note for trust in noted for note in trust.notes])

    def _find_token(self) -> str:
        token = ""
        with storage_errors("read", self._root):
            if (self._root / TOKEN_NAME).exists():
                token = read_note(self._root / TOKEN_NAME).strip()
        # Without a store, a name that is the same for all ranks of the node.
        return token or f"{self._process.boot} without {self._root}"


class RankFolder(SeenFolder):
    """A rank's folder on this node, claimed by this process.

    The constructor also removes the unfinished files of dead processes.

    Args:
        root: The store's directory; made with access for this user alone if it is missing.
        session_id: The training run.
        rank: Rank of the folder.
        timeout_s: Deadline, in seconds, of a wait for another process that starts or ends here.

    Raises:
        StorageError: The directory cannot be used, or a live process of another job owns the
            folder.
    """

    def __init__(self, root: Path, session_id: str, rank: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._noted: tuple[int, Lineage | None] | None = None
        self._writing = threading.Lock()
        super().__init__(root, session_id, rank)

    @property
    def is_ours(self) -> bool:
        return read_note(self.path / OWNER_NAME) == self._claim

    def leave(self) -> None:
        (self.path / OWNER_NAME).unlink()

    def restore(self) -> None:
        """Make the folder again, which holds nothing then, if it was removed under this process.

        Raises:
            StorageError: It cannot be made, or another node's store is in the place of this one.
        """
        # What each claim, and each epoch, leaves in the folder as long as it is there.
        mark = self.path / (EPOCH_NAME if self._noted else OWNER_NAME)
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
        if self._noted is not None:
            self._write_epoch(*self._noted)

    def begin_epoch(self, epoch: int, owners: Collection[str], timeout_s: float) -> None:
        """Note durably that an epoch has begun; see :class:`Claim`.

        The lineage of the previous epoch stays in the note until the new epoch has one.
        """
        self.restore()
        with storage_errors("read", self.session):
            for rank in sorted(self.ranks()):
                folder = self.session / str(rank)
                _await_leaving(folder, lambda owner: str(owner) in owners, timeout_s)
            _, lineage = epoch_note(self.path)
        self._note(epoch, lineage)

    def note_lineage(self, lineage: Lineage) -> None:
        self._note(lineage.epoch.number, lineage)

    def note_resume(self, resumes: Resumes) -> None:
        self.restore()
        TrustNotes(self.path).note_resume(resumes)

    def take_back_resume(self, resumes: Resumes) -> None:
        TrustNotes(self.path).take_back_resume(resumes)

    def forget_resumes(self) -> None:
        # Also in other ranks' folders, some of which no rank on this node writes any more.
        for rank in self.ranks():
            TrustNotes(self.session / str(rank)).forget_resumes()

    def note_mark(self, mark: Mark) -> None:
        self.restore()
        TrustNotes(self.path).note_mark(mark)

    def note_measured(self, measured: Measured) -> None:
        self.restore()
        TrustNotes(self.path).note_measured(measured)

    def forget_measured(self, is_over: Callable[[Checkpoint], bool]) -> None:
        # Also in other ranks' folders, some of which no rank on this node writes any more.
        for rank in self.ranks():
            TrustNotes(self.session / str(rank)).forget_measured(is_over)

    def note_drained(self, drained: Collection[Checkpoint]) -> None:
        self.restore()
        TrustNotes(self.path).note_drained(drained)

    def _note(self, epoch: int, lineage: Lineage | None) -> None:
        self.restore()
        self._write_epoch(epoch, lineage)
        self._noted = epoch, lineage

    def _write_epoch(self, epoch: int, lineage: Lineage | None) -> None:
        note = self.path / EPOCH_NAME
        lineage_json = "" if lineage is None else f"\n{json.dumps(lineage.to_json())}\n"
        # A thread that is not waited for any more may be writing.
        with self._writing, storage_errors("write", note):
            write_note(note, f"{epoch}{lineage_json}")
            sync_folder(self.path)

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
    """Lock a store, so that no other process starts or cleans up there inside the ``with``.

    Raises:
        StorageError: Another process held the lock until the deadline, or locking failed.
    """
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
    has_left = lambda: owner not in Running()  # noqa: E731
    if not wait_until(has_left, min(_LEAVING_S, timeout_s), shortest_s=_SHORTEST_PAUSE_S):
        raise StorageError(
            f"{folder} is in use by process {owner.pid} of a job that is still running: "
            f"end it, or give this job another session_id or directory"
        )


def _remove_leftovers(folder: Path, running: Running) -> None:
    if owner_of(folder) in running:
        return
    for leftover in (*folder.glob(f"*{DIRTY}"), *folder.glob(f"*{RECYCLED_BEFORE}")):
        logger.info("removing %s, which a process that is gone left behind", leftover)
        leftover.unlink(missing_ok=True)
