"""Limit of the saves in flight to the number of staging buffers.

Only polls finalize saves otherwise, and there may be fewer polls than saves: checkpoints that
nobody prunes, and the memory of their images, would pile up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from localckpt.managers.in_flight import InFlight, forgotten
from localckpt.options import SaveOptions
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from localckpt.managers.save import Save

__all__ = ["LimitedInFlight"]

logger = logging.getLogger(__name__)


class LimitedInFlight(InFlight):
    """Saves in flight, at most ``num_buffers`` of them.

    Args:
        store: Store with the buffers.
        ranks: The ranks of the job.
        options: Options that say what one more does.
    """

    def __init__(self, store: DirectoryStore, ranks: Ranks, options: SaveOptions) -> None:
        super().__init__()
        self._store = store
        self._ranks = ranks
        self._on_busy = options.on_busy

    def admits(self, iteration: int, is_async: bool) -> bool:
        """Finalize older saves as far as they must be, and answer as :meth:`InFlight.admits`.

        Raises:
            CheckpointingException: An older save failed, or all buffers will stay busy. The same
                on all ranks.
        """
        if self._on_busy == "wait" or not is_async:
            self._wait_for_older(iteration)
            return True
        over_on_all, busy, waiting = self._ranks.decide(
            "see whether buffers are free",
            lambda: [self._store.is_busy(), self._over_here()],
            _judge_busy,
            read=shaped((int, [int], [int])),
        )
        # What is over on all ranks is finalized here, before anything is skipped because of it.
        for _ in range(over_on_all):
            if self._is_full:
                self._finalize_oldest()
        ranks = sorted({*busy, *(waiting if self._is_full else ())})
        if not ranks:
            return True
        logger.warning(
            "iteration %d is not saved: the %d staging buffers of rank%s %s are busy with older "
            "saves",
            *(iteration, self._store.num_buffers),
            *("s"[: len(ranks) > 1], ", ".join(map(str, ranks))),
        )
        return False

    @property
    def _limited(self) -> list[Save]:
        """Saves that count; a foreign queue finalizes its own by itself."""
        return [save for save in self if not save.carrier.is_handed_over]

    @property
    def _is_full(self) -> bool:
        """True if as many saves are in flight as may be; the same on all ranks."""
        return len(self._limited) >= self._store.num_buffers

    def _over_here(self) -> int:
        """Count the oldest saves that are over on this rank."""
        count = 0
        for save in self._limited:
            if (ticket := save.carrier.ticket) is None or not ticket.is_over():
                break
            count += 1
        return count

    def _wait_for_older(self, iteration: int) -> None:
        while self._is_full and self._finalize_oldest():
            pass
        waiting = self.not_scheduled()
        if self._is_full and waiting and self._store.is_busy():
            raise forgotten(
                waiting, f"They have all buffers, so nothing was begun of iteration {iteration}."
            )

    def _finalize_oldest(self) -> bool:
        """Finalize the oldest save, unless a foreign queue has it; return whether that was done."""
        oldest = self._limited[0]
        if (ticket := oldest.carrier.ticket) is None:
            return False
        ticket.finalize()
        # A queue that was left with an error meanwhile has finalized nothing.
        return oldest not in list(self)


def _judge_busy(reports: list[list[int]]) -> list[Any]:
    """Count the saves that are over on all ranks; list busy ranks, and ranks with none over.

    Args:
        reports: For each rank, whether it is busy, and its number of oldest saves that are over.
    """
    busy = [rank for rank, (is_busy, _) in enumerate(reports) if is_busy]
    waiting = [rank for rank, (_, over) in enumerate(reports) if not over]
    return [min(over for _, over in reports), busy, waiting]
