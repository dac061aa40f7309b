"""Saves of one manager that are captured and not finalized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from localckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from localckpt.managers.save import Save

__all__ = ["InFlight", "forgotten"]


class InFlight:
    """Saves in flight, the oldest first; the same on all ranks. Any number of them."""

    def __init__(self) -> None:
        self._saves: list[Save] = []

    def add(self, save: Save) -> None:
        """Add a save."""
        self._saves.append(save)

    def remove(self, save: Save) -> None:
        """Remove a save that is over or given up."""
        self._saves = [other for other in self._saves if other is not save]

    def clear(self) -> None:
        """Remove all saves."""
        self._saves = []

    def __iter__(self) -> Iterator[Save]:
        return iter(list(self._saves))

    def admits(self, iteration: int, is_async: bool) -> bool:
        """Return whether one more save may begin; the same on all ranks, which all call it."""
        return True

    def not_scheduled(self) -> list[Save]:
        """Return the saves whose request was given to no queue."""
        return [save for save in self._saves if not save.carrier.is_scheduled]

    def give_up_forgotten(self, iteration: int) -> None:
        """Give up the saves that no queue will finalize.

        Args:
            iteration: The one that is about to be saved.

        Raises:
            CheckpointingException: The request of some was never scheduled.
        """
        gone = [save for save in self._saves if save.carrier.is_gone]
        for save in gone:
            if save.carrier.is_scheduled:
                # Its queue was left with an error. It may be complete: find_latest() will tell.
                save.leave()
        if never := [save for save in gone if not save.carrier.is_scheduled]:
            for save in reversed(never):
                save.roll_back()
            raise forgotten(
                never, f"Nothing was begun of iteration {iteration}, which can be saved now."
            )

    def require_none(self, what: str) -> None:
        """Check that no save is in flight, so that the job can go back.

        Raises:
            CheckpointingException: Saves are in flight.
        """
        if self._saves:
            iterations = [save.identity.iteration for save in self._saves]
            raise CheckpointingException(
                f"cannot {what} while the saves of iterations {iterations} are in "
                f"flight: finalize them first "
                f"(AsyncCallsQueue.maybe_finalize_async_calls(blocking=True))"
            )


def forgotten(saves: list[Save], consequence: str) -> CheckpointingException:
    """Make the error for requests that no queue was given.

    Args:
        saves: At least one.
        consequence: What becomes of them, and what was not begun.
    """
    iterations = ", ".join(str(save.identity.iteration) for save in saves)
    many = len(saves) > 1
    return CheckpointingException(
        f"the request{'s' * many} that save() returned for iteration{'s' * many} {iterations} "
        f"{'were' if many else 'was'} never scheduled, so nobody writes "
        f"{'them' if many else 'it'}: hand what save(..., is_async=True) returns to "
        f"queue.schedule_async_request(), on every rank, before the next save. {consequence} "
        f"Checkpoints saved before are as they were"
    )
