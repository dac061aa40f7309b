"""Count of this start of the job against the checkpoint that it resumed from.

A start resumed in vain if it makes a step, and ends before it makes progress.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from localckpt.errors import StorageError
from localckpt.ids import Checkpoint
from localckpt.storage.notes import TrustNotes
from localckpt.trust import Trusts, resumed_in_vain

logger = logging.getLogger(__name__)


class Resuming:
    """Counter of this start, of one manager on one rank.

    Every rank keeps its own notes, and the largest count of a checkpoint is used. So the note of a
    crashed rank remains when the other ranks, which are then ended by a signal, remove theirs.
    """

    def __init__(self, notes: TrustNotes, max_attempts: int | None) -> None:
        self.max_attempts = max_attempts
        # Merged notes of all nodes, from the last inventory.
        self.trusts = Trusts()
        # Checkpoint that this start has resumed from, until it has made progress.
        self.current: Checkpoint | None = None
        self.notes = notes
        self._noted: Checkpoint | None = None

    def begin(self, checkpoint: Checkpoint) -> None:
        """Remember which checkpoint was loaded; nothing is counted before :meth:`count`."""
        if self.max_attempts is None or checkpoint == self.current:
            return
        # A start that now resumes from another checkpoint has not failed with the first one.
        self.take_back()
        self.current = checkpoint
        if before := self.trusts[checkpoint].failed_starts:
            logger.warning(
                "iteration %d: %s; it is given up after %d",
                *(checkpoint.iteration, resumed_in_vain(before), self.max_attempts),
            )

    def count(self) -> None:
        """Count this start durably, once: training goes on from the loaded checkpoint."""
        checkpoint = self.current
        if checkpoint is None or self.max_attempts is None or self._noted is not None:
            return
        failed = self.trusts[checkpoint].failed_starts
        # Assigned before the note is written, so that a signal handler can remove the note.
        self._noted = checkpoint
        try:
            self.notes.count_start(checkpoint, failed, self.max_attempts)
        except StorageError as error:
            # Logged only: the other ranks' notes count, and an error would end this rank alone.
            logger.error("this start is not counted on this rank: %s", error)
        if self._noted is None or self.current is None:
            self._noted = None
            self._remove(checkpoint)
            return
        logger.info(
            "this start counts against iteration %d, as %d of at most %d, until a later checkpoint "
            "is complete or the job is ended in order",
            *(checkpoint.iteration, failed + 1, self.max_attempts),
        )

    def is_progress(self, iteration: int) -> bool:
        reached = -1 if self.current is None else self.current.iteration
        return iteration > max(reached, self.trusts.frontier)

    def note_progress(self, iteration: int) -> None:
        """Remove all counts if a checkpoint, now complete on all ranks, is progress."""
        is_counting = self.current is not None or self.trusts.most_starts
        if is_counting and self.is_progress(iteration):
            self.forget()

    def forget(self) -> None:
        try:
            self.notes.forget_starts()
        except StorageError as error:
            logger.warning("starts before this one still count: %s", error)
        self.trusts = Trusts(
            {c: replace(t, failed_starts=0, most_starts=0) for c, t in self.trusts.items()}
        )
        self.current = self._noted = None

    def take_back(self) -> None:
        """Remove the note of this start, which is meant to end. A signal handler may call this."""
        noted, self._noted, self.current = self._noted, None, None
        if noted is not None:
            self._remove(noted)

    def _remove(self, noted: Checkpoint) -> None:
        try:
            self.notes.take_back_start(noted)
        except StorageError as error:
            logger.warning("this start counts as one in vain: %s", error)
