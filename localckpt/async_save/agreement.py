"""How all ranks decide, in the same poll, that a call is over, and tell each other how it ended.

A rank that finalized a call alone would gather with others that train on, and each would hang in
the other's collectives. So the first rank decides and all follow. It decides one poll ahead: a rank
waits in a poll only if it is more than one poll ahead of the first rank. Messages go over the job's
store, never over a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from localckpt.async_save.request import CallReport
from localckpt.errors import PeerLostError
from localckpt.ranks.ranks import Ranks

__all__ = ["Agreement"]

# Waits end one after another within the timeout: a rank gives its own work up first (OWN_WORK), so
# that the others hear the cause from it, then the first rank stops waiting for reports, then the
# others stop waiting for the first rank.
_FIRST_RANK, _OTHER_RANKS = 0.8, 0.9
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0005, 0.02


class Agreement:
    """The decisions on a queue's calls, one call after another.

    Args:
        ranks: Used for nothing else; its deadline is set for each wait.
        timeout_s: The longest that all waits for one call take together, in seconds.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._settled = 0
        self._ahead = 0
        self._polls = 0
        self._unsaid = 0
        self._reported = False
        self._agreed = False
        self._has_begun = False

    @property
    def is_ahead(self) -> bool:
        """Whether all ranks know already that the oldest call is over on all."""
        return self._ahead > 0

    def reached(self, is_over: Callable[[], bool], blocking: bool, start: float) -> bool:
        """Whether all ranks finalize the oldest call now.

        Args:
            is_over: Whether it is over on this rank.
            blocking: Wait until the first rank says so; without, this is one poll.
            start: When the waits for this call began, by the monotonic clock.

        Raises:
            PeerLostError: The first rank did not come in time. After a poll without ``blocking``
                it can be asked again; else :meth:`gather` must follow with that error.
        """
        while not (self.is_ahead or self._poll(is_over, blocking, start)):
            if not blocking:
                return False
        return True

    def missing_reports(self, start: float) -> PeerLostError | None:
        """Report that the call is over on this rank; the first rank waits for all to do so.

        The gathering must not begin before: a rank that reads it late, when others have given up,
        must find there that they did.
        """
        if self.is_ahead:
            return None
        over, nap_s = _over(self._settled), _SHORTEST_NAP_S
        try:
            self._report_once()
            while self._ranks.rank == 0 and not self._ranks.reported_by_all(over):
                waited_s = time.monotonic() - start
                if waited_s > _FIRST_RANK * self._timeout_s:
                    return PeerLostError(
                        f"not every rank had reported within {waited_s:.1f} s that {over}"
                    )
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        except PeerLostError as error:
            return error
        return None

    def gather(self, report: CallReport, start: float, ready: int) -> list[CallReport]:
        """Settle the call: what every rank says of it, in rank order.

        Also called by a rank that gave up waiting, so that one which comes late finds that out
        instead of finalizing alone.

        Args:
            report: What this rank says of the call.
            start: When the waits for this call began, by the monotonic clock.
            ready: How many of the calls right after it are over on this rank. Those that are over
                on all ranks need no further decision, so calls never pile up, however often they
                are scheduled.

        Raises:
            PeerLostError: Some rank did not come in time.
        """
        number, was_asked = self._settled, not self.is_ahead
        self._go_on()
        self._set_deadline(start + self._timeout_s)
        records = self._ranks.gather(f"agree on async call {number}", [ready, report.to_json()])
        if self._ranks.rank == 0 and was_asked:
            # Who takes part in the gathering has read and reported all it will.
            self._ranks.forget(_question(number))
            self._ranks.forget(_over(number))
        self._ahead = min(others_ready for others_ready, _ in records)
        return [CallReport.from_json(fields) for _, fields in records]

    def leave_out(self) -> None:
        """The oldest call is settled without the other ranks: what they were told of it is void."""
        if self._polls or self.is_ahead:
            ahead = max(0, self._ahead - 1)
            self._go_on()
            self._ahead = ahead

    def _go_on(self) -> None:
        self._settled += 1
        self._ahead, self._polls, self._unsaid = 0, 0, 0
        self._agreed = self._reported = False

    def _poll(self, is_over: Callable[[], bool], blocking: bool, start: float) -> bool:
        if self._ranks.world_size == 1:
            return blocking or is_over()
        if not (blocking or self._may_begin()):
            self._polls += 1
            self._unsaid += 1
            return False
        if is_over():
            self._report_once()
        if self._ranks.rank == 0:
            agreed = self._agreed
            if not agreed:
                self._agreed = blocking or (
                    is_over() and self._ranks.reported_by_all(_over(self._settled))
                )
                question, unsaid = _question(self._settled), self._unsaid
                self._ranks.answer(question, self._agreed, noes_before=unsaid)
                self._unsaid = 0
        else:
            self._set_deadline(start + self._timeout_s * (_OTHER_RANKS if blocking else 1.0))
            # The answer for the first poll would have been given before the call was scheduled.
            agreed = self._polls > 0 and self._ranks.hear_answer(
                _question(self._settled), self._polls
            )
        self._polls += 1
        return agreed

    def _may_begin(self) -> bool:
        """Whether a poll need not wait for ranks that have not scheduled a call yet.

        The others begin once they have seen the first rank answer. It decides after all have
        reported, so none of them misses the decision by its polls before.
        """
        if not self._has_begun:
            self._has_begun = self._ranks.is_open and (
                self._ranks.rank == 0 or self._ranks.is_answered(_question(self._settled))
            )
        return self._has_begun

    def _report_once(self) -> None:
        if not self._reported:
            self._ranks.report(_over(self._settled))
            self._reported = True

    def _set_deadline(self, deadline: float) -> None:
        self._ranks.timeout_s = round(max(0.0, deadline - time.monotonic()), 2)


def _over(number: int) -> str:
    return f"async call {number} is over"


def _question(number: int) -> str:
    return f"decide on async call {number}"
