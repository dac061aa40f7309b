"""This start of the job as an attempt to get on from a checkpoint: counted until it has.

A start that resumed from a checkpoint and ended before it made progress has done so in vain. Notes
beside the checkpoints count such starts; what follows from them is decided in ``trust.py``.
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
        """Note, durably, that the job goes on from a checkpoint."""

    def take_back_resume(self, resumes: Resumes) -> None:
        """Remove such a note. A signal handler may do so."""

    def forget_resumes(self) -> None:
        """Remove all such notes."""


class Resuming:
    """The attempt of one manager, on one rank.

    Each rank of the nodes has notes of its own, so that those of a rank that crashed stand when
    others, which are then told to stop, take theirs back. The largest number counts.

    Args:
        notes: Keeps the notes of this rank.
        max_attempts: Number of starts in vain at which a checkpoint is given up; ``None`` to count
            none.

    Attributes:
        max_attempts: The same.
        trust: What all notes told at the last look.
        current: Checkpoint that this start has resumed from, until it has made progress.
    """

    def __init__(self, notes: Notes, max_attempts: int | None) -> None:
        self.max_attempts = max_attempts
        self.trust = Trust()
        self.current: Checkpoint | None = None
        self._notes = notes
        self._noted: Resumes | None = None

    def begin(self, checkpoint: Checkpoint) -> None:
        """Note, durably, that training is about to go on from a checkpoint, which was loaded."""
        if self.max_attempts is None or checkpoint == self.current:
            return
        # Whoever goes on from elsewhere has not ended in vain.
        self.take_back()
        count = self.trust.count(checkpoint) + 1
        noted = Resumes(checkpoint, count, self.max_attempts)
        # First, so that a signal that comes meanwhile finds what it is to take back.
        self.current, self._noted = checkpoint, noted
        try:
            self._notes.note_resume(noted)
        except StorageError as error:
            # Other ranks count, and one that raised here would leave them alone.
            logger.error("this start is not counted on this rank: %s", error)
        if self._is_taken_back:
            self._remove(noted)
        elif count > 1:
            logger.warning(
                "iteration %d: %s; it is given up after %d",
                *(checkpoint.iteration, resumed_in_vain(count - 1), self.max_attempts),
            )

    def is_progress(self, iteration: int) -> bool:
        """Return whether a complete checkpoint is above all that was reached before."""
        reached = -1 if self.current is None else self.current.iteration
        return iteration > max(reached, self.trust.frontier)

    def note_progress(self, iteration: int) -> None:
        """Note that a checkpoint of that iteration is complete on all ranks."""
        is_counting = self.current is not None or self.trust.resumes
        if not is_counting or not self.is_progress(iteration):
            return
        try:
            self._notes.forget_resumes()
        except StorageError as error:
            logger.warning("starts before this one still count: %s", error)
        self.trust = Trust(marks=self.trust.marks)
        self.current = self._noted = None

    def take_back(self) -> None:
        """Count this start no more: it ends because somebody wants it to. For signal handlers."""
        noted, self._noted, self.current = self._noted, None, None
        if noted is not None:
            self._remove(noted)

    @property
    def _is_taken_back(self) -> bool:
        return self._noted is None

    def _remove(self, noted: Resumes) -> None:
        try:
            self._notes.take_back_resume(noted)
        except StorageError as error:
            logger.warning("this start counts as one in vain: %s", error)
