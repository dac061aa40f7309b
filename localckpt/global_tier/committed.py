"""Checkpoints of one session that are committed, as the first rank finds them for all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from localckpt.availability.retention import Version
from localckpt.errors import CorruptShardError, NoReplicasAvailableError, StorageError
from localckpt.global_tier.folders import (
    CommitFound,
    CommitRecord,
    Folder,
    SharedSession,
    folders_in,
    pin,
    unpin,
)
from localckpt.global_tier.save_plan import require_same
from localckpt.lineage import Lineage
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.resuming import Resuming
from localckpt.storage.notes import NotesFile
from localckpt.trust import choose

logger = logging.getLogger(__name__)

_SHOWN = 10


class Committed:
    """The committed checkpoints of one session. All ranks make the same calls.

    ``check`` raises StorageError if others can write to the directory, or it is gone.
    """

    def __init__(
        self,
        session: SharedSession,
        ranks: Ranks,
        max_attempts: int | None,
        check: Callable[[], None],
    ) -> None:
        self.path = session.root
        self._session = session
        self._ranks = ranks
        self._check = check
        self.resuming = Resuming(NotesFile(session.root), max_attempts)

    def find(self, left_by: Lineage | None) -> CommitFound | None:
        """The newest checkpoint; none that a lineage has left behind."""
        return self._find(None, lambda: self._newest(left_by=left_by))

    def load_newest(
        self, iteration: int | None, load: Callable[[CommitFound], None], *, tries_others: bool
    ) -> CommitFound:
        """Call ``load`` with the newest checkpoint, or that of an iteration, which it fills in.

        If that ``tries_others``, a damaged one makes way for the one before, and one that a job
        prunes meanwhile for the newest that is there then.
        """
        deadline = Deadline.after(self._ranks.timeout_s)
        tried: list[Version] = []
        while found := self._find(iteration, lambda: self._next(iteration, tried, deadline)):
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
        where, what = f"under {self.path}", "there is no checkpoint"
        if tried:
            raise NoReplicasAvailableError(
                f"no checkpoint {where} can be loaded; see the errors above"
            )
        if iteration is not None:
            raise NoReplicasAvailableError(f"{what} of iteration {iteration} {where}")
        raise NoReplicasAvailableError(f"{what} {where}: load() only if find_latest() is not -1")

    def iterations(self, left_by: Lineage | None = None) -> list[int]:
        """Iterations of the checkpoints that a restart tries, in their order."""

        def look() -> list[int]:
            self._check()
            found = (c.folder for c in self._session.whole() if not c.record.is_left_by(left_by))
            return list(dict.fromkeys(folder.iteration for folder in self._usable([*found])))

        iterations: list[int] = self._ask("find all checkpoints", "all", look, shaped([int]))
        return iterations

    def unfinished_drains(self) -> list[int]:
        """Iterations whose drains were begun, and are not committed, in their order."""

        def look() -> list[int]:
            _, leftovers = folders_in(self.path)
            return sorted({left.folder.iteration for left in leftovers if left.is_drain})

        found: list[int] = self._ask("find unfinished drains", "all", look, shaped([int]))
        return found

    def change_pin(self, what: str, iteration: int) -> None:
        """``"pin"`` the newest checkpoint of an iteration, or ``"unpin"`` all of it."""

        def change() -> None:
            folders = [f for f in folders_in(self.path)[0] if f.iteration == iteration]
            if what == "pin":
                found = self._newest(iteration)
                folders = [] if found is None else [found.folder]
            if not folders:
                there = ", ".join(str(c.folder.iteration) for c in self._session.whole()[:_SHOWN])
                raise NoReplicasAvailableError(
                    f"there is no checkpoint of iteration {iteration} under {self.path}; the "
                    f"newest are: {there or 'none'}. Nothing was changed"
                )
            for folder in folders:
                (pin if what == "pin" else unpin)(folder)

        self._ask(f"{what} a checkpoint", iteration, change, lambda _: None)

    def _ask(self, what: str, tag: Any, look: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        """Call ``look`` on the first rank, and give what it returns to all."""

        def judge(tags: list[Any]) -> Any:
            require_same(tags, self._ranks.global_ranks)
            return look()

        return self._ranks.commit(what, lambda: [self._session.session_id, tag], judge, read=read)

    def _find(
        self, iteration: int | None, find: Callable[[], CommitFound | None]
    ) -> CommitFound | None:
        def look() -> str | None:
            found = find()
            # Only the first rank needs to know the files.
            return None if found is None else replace(found.record, files={}).to_bytes().decode()

        def read(text: Any) -> CommitFound | None:
            if text is None:
                return None
            try:
                record = CommitRecord.parse(self.path, shaped(str)(text).encode())
            except CorruptShardError as error:
                raise ValueError(error.text) from error
            return CommitFound(Folder(self.path, record.iteration, record.epoch), record)

        found: CommitFound | None = self._ask("find a checkpoint", iteration, look, read)
        return found

    # On the first rank.

    def _next(
        self, iteration: int | None, tried: Sequence[Version], deadline: Deadline
    ) -> CommitFound | None:
        found = self._newest(iteration, tried)
        if found and tried and found.folder.version > max(tried) and deadline.left_s == 0:
            # A job goes on there, and pruned what was being read.
            raise NoReplicasAvailableError(
                f"for {deadline.timeout_s:g} s every checkpoint under {self.path} was pruned "
                f"before it was read, the last one iteration {tried[-1][1]}, and "
                f"{found.folder.iteration} is the newest now: have the job keep more of them, or "
                f"let the load take longer"
            )
        return found

    def _newest(
        self,
        iteration: int | None = None,
        tried: Sequence[Version] = (),
        left_by: Lineage | None = None,
    ) -> CommitFound | None:
        self._check()
        listed: list[Folder] | None = None
        while True:
            before, (listed, _) = listed, folders_in(self.path)
            if listed == before:
                return None
            # Else a job has committed one and pruned those that were listed, so look again.
            for folder in self._usable(listed) if iteration is None else listed:
                if iteration not in (None, folder.iteration) or folder.version in tried:
                    continue
                found = self._session.find(folder, asked_for=iteration is not None)
                if found is not None and not found.record.is_left_by(left_by):
                    return found

    def _usable(self, folders: Sequence[Folder]) -> list[Folder]:
        """The directories that the job has not resumed from in vain too often."""
        trusts = self.resuming.trusts = self._session.noted_trusts()
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
