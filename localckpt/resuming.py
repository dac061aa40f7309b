"""Count of this start of the job against the checkpoint that it resumed from.

A start resumed in vain if it makes a step, and ends before it makes progress. Notes beside the
checkpoints count such starts; ``trust.py`` decides which checkpoints a restart may take.
"""

from __future__ import annotations

import logging
from typing import Protocol

from localckpt.errors import StorageError
from localckpt.ids import Checkpoint
from localckpt.trust import Resumes, Trust, resumed_in_vain

__all__ = ["Notes", "Resuming"]

logger = logging.getLogger(__name__)


class Notes(Protocol):
    """Keeper of notes on starts of the job. All methods raise StorageError."""

    def note_resume(self, resumes: Resumes) -> None:
        """Note durably that the job resumes from a checkpoint."""

    def take_back_resume(self, resumes: Resumes) -> None:
        """Remove one note of :meth:`note_resume`. A signal handler may call this."""

    def forget_resumes(self) -> None:
        """Remove all notes of :meth:`note_resume`."""


class Resuming:
    """Counter of this start, of one manager on one rank.

    Every rank keeps its own notes, and the largest count of a checkpoint is used. So the note of a
    crashed rank remains when the other ranks, which are then ended by a signal, remove theirs.

    Args:
        notes: Keeper of this rank's notes.
        max_attempts: Number of starts in vain at which a checkpoint is given up; ``None`` to count
            none.

    Attributes:
        max_attempts: Number of starts in vain at which a checkpoint is given up, or ``None``.
        trust: Merged notes of all nodes, from the last inventory.
        current: Checkpoint that this start has resumed from, until it has made progress.
    """

    def __init__(self, notes: Notes, max_attempts: int | None) -> None:
        self.max_attempts = max_attempts
        self.trust = Trust()
        self.current: Checkpoint | None = None
        self._notes = notes
        self._noted: Resumes | None = None

    def begin(self, checkpoint: Checkpoint) -> None:
        """Remember which checkpoint was loaded; nothing is counted before :meth:`count`."""
        if self.max_attempts is None or checkpoint == self.current:
            return
        # A start that now resumes from another checkpoint has not failed with the first one.
        self.take_back()
        self.current = checkpoint
        if before := self.trust.count(checkpoint):
            logger.warning(
                "iteration %d: %s; it is given up after %d",
                *(checkpoint.iteration, resumed_in_vain(before), self.max_attempts),
            )

    def count(self) -> None:
        """Count this start durably, once: training goes on from the loaded checkpoint."""
        checkpoint = self.current
        if checkpoint is None or self.max_attempts is None or self._noted is not None:
            return
        count = self.trust.count(checkpoint) + 1
        noted = Resumes(checkpoint, count, self.max_attempts)
        # Assigned before the note is written, so that a signal handler can remove the note.
        self._noted = noted
        try:
            self._notes.note_resume(noted)
        except StorageError as error:
            # Logged only: the other ranks' notes count, and an error would end this rank alone.
            logger.error("this start is not counted on this rank: %s", error)
        if self._is_taken_back:
            self._noted = None
            self._remove(noted)
            return
        logger.info(
            "this start counts against iteration %d, as %d of at most %d, until a later checkpoint "
            "is complete or the job is ended in order",
            *(checkpoint.iteration, count, self.max_attempts),
        )

    def is_progress(self, iteration: int) -> bool:
        """Return whether a complete checkpoint of this iteration is progress."""
        reached = -1 if self.current is None else self.current.iteration
        return iteration > max(reached, self.trust.frontier)

    def note_progress(self, iteration: int) -> None:
        """Remove all counts if a checkpoint, now complete on all ranks, is progress."""
        is_counting = self.current is not None or self.trust.resumes
        if is_counting and self.is_progress(iteration):
            self.forget()

    def forget(self) -> None:
        """Count no start so far any more."""
        try:
            self._notes.forget_resumes()
        except StorageError as error:
            logger.warning("starts before this one still count: %s", error)
        self.trust = Trust(marks=self.trust.marks)
        self.current = self._noted = None

    def take_back(self) -> None:
        """Remove the note of this start, which is meant to end. A signal handler may call this."""
        noted, self._noted, self.current = self._noted, None, None
        if noted is not None:
            self._remove(noted)

    @property
    def _is_taken_back(self) -> bool:
        return self._noted is None or self.current is None

    def _remove(self, noted: Resumes) -> None:
        try:
            self._notes.take_back_resume(noted)
        except StorageError as error:
            logger.warning("this start counts as one in vain: %s", error)
