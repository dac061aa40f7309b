"""Who writes which rank's folder: taken at the start, left at the end, never two jobs' at once."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path

from filelock import FileLock, Timeout

from localckpt.errors import StorageError
from localckpt.lineage import Lineage
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import (
    DIRTY,
    EPOCH_NAME,
    LOCK_NAME,
    OWNER_NAME,
    TOKEN_NAME,
    session_name,
)
from localckpt.storage.notes import epoch_note, owner_of, read_note, write_note
from localckpt.storage.owner import Owner, Running
from localckpt.storage.write import sync_folder

__all__ = ["RankFolder"]

logger = logging.getLogger(__name__)

# A process that was killed is there until the kernel has taken back its memory.
_LEAVING_S = 10.0
_POLL_S = 0.05


class RankFolder:
    """A rank's folder on this node, taken by this process; what the dead left is removed.

    Args:
        root: The store's directory; made, for this user alone, where it is not there.
        session_id: The training run.
        rank: Whose folder this is.
        timeout_s: How long to wait for another process that is starting here.

    Attributes:
        path: The folder.
        session: The directory that all ranks' folders are in.
        token: The name of this node, the same for all that use the store.

    Raises:
        StorageError: The directory cannot be used, or a live process of another job owns the
            folder.
    """

    def __init__(self, root: Path, session_id: str, rank: int, timeout_s: float) -> None:
        self._root = root
        self.session = root / session_name(session_id)
        self.path = self.session / str(rank)
        self._owner = Owner.me()
        # A process may have several: the last one that was opened has the folder.
        self._claim = f"{self._owner}\n{secrets.token_hex(8)}"
        with storage_errors("use", self.path):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.session, self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
                _require_our_own(folder)
            try:
                with FileLock(root / LOCK_NAME, timeout=timeout_s, mode=0o600):
                    self.token = self._read_token()
                    self._take(timeout_s)
            except Timeout as error:
                raise StorageError(
                    f"another process held {root / LOCK_NAME} for {timeout_s:g} s: "
                    f"see who it is (fuser), and start again once it is gone"
                ) from error

    @property
    def owner(self) -> str:
        """This process, in words that tell it from all others of its node."""
        return str(self._owner)

    @property
    def is_ours(self) -> bool:
        """Whether nobody has taken it since."""
        return read_note(self.path / OWNER_NAME) == self._claim

    def leave(self) -> None:
        """Let others have it."""
        (self.path / OWNER_NAME).unlink()

    def ranks(self) -> set[int]:
        """Ranks that have ever written here in this session."""
        with storage_errors("read", self.session):
            return {
                int(entry.name)
                for entry in os.scandir(self.session)
                if entry.name.isdecimal() and entry.is_dir(follow_symlinks=False)
            }

    def refuse_other_jobs(self, owners: Collection[str], timeout_s: float) -> None:
        """Make sure that nobody else uses the session on this node.

        Args:
            owners: The processes of this job.
            timeout_s: How long one that is ending may take.

        Raises:
            StorageError: A live process of another job has taken some rank's folder.
        """
        with storage_errors("read", self.session):
            for rank in sorted(self.ranks()):
                folder = self.session / str(rank)
                _await_leaving(folder, lambda owner: str(owner) in owners, timeout_s)

    def begin_epoch(self, epoch: int, lineage: Lineage | None = None) -> None:
        """Note, durably, that an attempt of the job has begun under this number.

        Args:
            epoch: The number.
            lineage: What it resumed from, as soon as that is known. Until then that of the attempt
                before stays noted.
        """
        if lineage is None:
            with storage_errors("read", self.path):
                _, lineage = epoch_note(self.path)
        note = self.path / EPOCH_NAME
        told = "" if lineage is None else f"\n{json.dumps(lineage.to_json())}\n"
        with storage_errors("write", note):
            write_note(note, f"{epoch}{told}")
            sync_folder(self.path)

    def newest_epoch(self) -> int:
        """The highest epoch that was noted in any rank's folder; 0 if none was."""
        epochs = [0]
        with storage_errors("read", self.session):
            for rank in self.ranks():
                text, _ = epoch_note(self.session / str(rank))
                # Longer than any header can have.
                if text.isdecimal() and text.isascii() and len(text) < 19:
                    epochs.append(int(text))
        return max(epochs)

    def noted_lineages(self) -> list[Lineage]:
        """Lineages of the attempts that were noted last, each once."""
        with storage_errors("read", self.session):
            noted = (epoch_note(self.session / str(rank))[1] for rank in sorted(self.ranks()))
            return list(dict.fromkeys(lineage for lineage in noted if lineage is not None))

    def _read_token(self) -> str:
        path = self._root / TOKEN_NAME
        if not path.exists():
            # Nobody else is here: the lock is held.
            write_note(path, secrets.token_hex(16))
        token = read_note(path).strip()
        if not re.fullmatch(r"[0-9a-f]{32}", token):
            raise StorageError(
                f"{path} does not hold a node's name: remove it if nobody else uses {self._root}"
            )
        return token

    def _take(self, timeout_s: float) -> None:
        _await_leaving(self.path, lambda owner: owner == self._owner, timeout_s)
        # All folders, because the rank of a dead process may start on another node now.
        running = Running()
        for entry in os.scandir(self.session):
            if entry.is_dir(follow_symlinks=False):
                _remove_leftovers(Path(entry.path), running)
        write_note(self.path / OWNER_NAME, self._claim)


def _require_our_own(folder: Path) -> None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise StorageError(f"{folder} is a symbolic link: remove it")
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            f"{folder} is not this user's alone (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}; this is user {os.geteuid()}): remove it, make it "
            f"so (chown, chmod 700), or choose another directory"
        )


def _await_leaving(folder: Path, is_ours: Callable[[Owner], bool], timeout_s: float) -> None:
    """Return when nobody but us owns a rank's folder; raises StorageError when somebody stays."""
    owner = owner_of(folder)
    deadline = time.monotonic() + min(_LEAVING_S, timeout_s)
    while owner is not None and not is_ours(owner) and owner in Running():
        if time.monotonic() > deadline:
            raise StorageError(
                f"{folder} is in use by process {owner.pid} of a job that is still running: "
                f"end it, or give this job another session_id or directory"
            )
        time.sleep(_POLL_S)


def _remove_leftovers(folder: Path, running: Running) -> None:
    if owner_of(folder) in running:
        return
    for leftover in folder.glob(f"*{DIRTY}"):
        logger.info("removing %s, which a process that is gone left behind", leftover)
        leftover.unlink(missing_ok=True)
