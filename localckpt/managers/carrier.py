"""Carrier of one save: the queue, of this library or another, that runs the save's request.

A save that runs at once has no request, and is scheduled from the beginning. ``save.py`` has the
steps of a save.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from localckpt.async_save.request import AsyncCall, AsyncRequest, Ticket
from localckpt.availability.durability import judge_save
from localckpt.managers.handed_over import HandedOver
from localckpt.managers.parts import Parts

if TYPE_CHECKING:
    from localckpt.managers.save import Save

__all__ = ["Carrier"]


class Carrier:
    """Carrier of one save.

    Attributes:
        ticket: Place of the save in a queue of this library; ``None`` in any other queue, or none.
        is_scheduled: True once a queue, or the trainer itself, runs the save.
        is_handed_over: True once a queue of another library has taken the request.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.ticket: Ticket | None = None
        self.is_scheduled = self.is_handed_over = False
        self._handed_over: HandedOver | None = None
        self._finalizer: weakref.ref[Callable[[], None]] | None = None

    def request(self, save: Save, finalize: Callable[[], None]) -> AsyncRequest:
        """Make a request that carries the save out behind training.

        A queue of this library judges the outcomes of all ranks together with the ends of the call.

        Args:
            save: The save.
            finalize: Finalizes the save. A queue keeps this function as long as it has the request,
                so :attr:`is_gone` looks whether the function is still there.
        """
        self._finalizer = weakref.ref(finalize)
        # A user's hooks are asked what they hold in the trainer's thread only.
        is_judged = self._parts.store.keeps_images
        call = AsyncCall(
            save.keep_local,
            then_fn=save.protect,
            report_fn=(lambda: save.outcome().to_json()) if is_judged else None,
            judge_fn=judge_save if is_judged else None,
            verdict_fn=save.take_verdict if is_judged else None,
            iteration=save.identity.iteration,
            name="save",
            failure_fns=[save.fail],
            stop_fns=[save.stop_waiting],
            waits_for_fn=save.waits_for,
            scheduled_fn=self._take_ticket,
            # A request that is frozen twice is written once.
            hand_over=cache(lambda: self._hand_over(save)),
        )
        return AsyncRequest(call, (), [finalize])

    @property
    def is_gone(self) -> bool:
        """True once no queue, nor anybody else, has the request."""
        return self._finalizer is None or self._finalizer() is None

    def take_handed_over(self) -> HandedOver | None:
        """Return what another library's process does for the save, once; ``None`` for nothing."""
        handed_over, self._handed_over = self._handed_over, None
        return handed_over

    def end(self) -> None:
        """Forget the queue: it keeps its last error, whose frames keep the save."""
        self.ticket = None

    def _take_ticket(self, ticket: Ticket) -> None:
        self.ticket, self.is_scheduled = ticket, True

    def _hand_over(self, save: Save) -> Callable[[], None]:
        self.is_scheduled = self.is_handed_over = True
        self._handed_over = self._parts.foreign.hand_over(partial(_finish_here, save))
        return self._handed_over.function


def _finish_here(save: Save) -> str | None:
    """Carry the save out in a thread of this process; return its error."""
    try:
        save.keep_local()
        save.protect()
    except Exception as error:  # noqa: BLE001 - raised on every rank when all finalize
        save.note_error(error)
    return save.error
