"""The saves of one manager that are captured and not finalized, and whether anybody finalizes them.

A request that ``save`` returned and that no queue was given is found by its finalize function:
whoever carries out a request keeps that function to the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from localckpt.errors import CheckpointingException
from localckpt.managers.reports import SaveUnderWay

__all__ = ["InFlight", "forgotten"]


class InFlight:
    """Saves in flight, the oldest first; the same on all ranks."""

    def __init__(self) -> None:
        self._saves: dict[SaveUnderWay, weakref.ref[Callable[[], None]]] = {}

    def add(self, save: SaveUnderWay, finalize: Callable[[], None]) -> None:
        """Note a save and the function that its request is finalized with."""
        self._saves[save] = weakref.ref(finalize)

    def remove(self, save: SaveUnderWay) -> None:
        """Forget a save that is finalized or given up."""
        self._saves.pop(save, None)
        # Its queue keeps the error of its last call, whose frames keep the save.
        save.ticket = None

    def __iter__(self) -> Iterator[SaveUnderWay]:
        return iter(list(self._saves))

    @property
    def limited(self) -> list[SaveUnderWay]:
        """Saves that count against ``num_buffers``; a foreign queue finalizes its own by itself."""
        return [save for save in self._saves if save.outcome is None]

    def over(self) -> int:
        """Number of the oldest limited saves that are over on this rank."""
        count = 0
        for save in self.limited:
            if save.ticket is None or not save.ticket.is_over():
                break
            count += 1
        return count

    def dropped(self) -> list[SaveUnderWay]:
        """Saves that a queue was given and will not finalize any more."""
        return [s for s, ref in self._saves.items() if s.is_scheduled and ref() is None]

    def never_scheduled(self) -> list[SaveUnderWay]:
        """Saves whose request is gone, and was given to no queue."""
        return [s for s, ref in self._saves.items() if not s.is_scheduled and ref() is None]

    def not_scheduled(self) -> list[SaveUnderWay]:
        """Saves whose request was given to no queue, whether or not it is gone."""
        return [save for save in self._saves if not save.is_scheduled]


def forgotten(saves: list[SaveUnderWay], consequence: str) -> CheckpointingException:
    """The error for requests that no queue was given.

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
