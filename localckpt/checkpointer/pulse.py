"""Pulse: every few seconds all ranks decide, behind training, when to save and whether to stop.

A pulse is an asynchronous call that does nothing but wait and report. One is always under way, and
on a rank that is asked to stop it ends at once. The root judges the reports, and all ranks have the
verdict in the same step, so they save, or stop, in the same step, and no step sends a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from localckpt.async_save.queue import AsyncCallsQueue
from localckpt.async_save.request import AsyncCall, AsyncRequest, runs_in_trainer
from localckpt.checkpointer.cadence import Costs, Every
from localckpt.errors import MismatchError
from localckpt.threads import Latch, wait_for_any

__all__ = ["Plan", "Pulse", "Report", "judge_reports"]

logger = logging.getLogger(__name__)

_PULSE_S = 1.5
"""Duration of a pulse: so long a request to stop may go unheard on other ranks."""


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one rank.

    Attributes:
        step: The step in which the pulse began.
        stop: Why this rank is to stop; ``None`` if it is not.
        costs: Its measurements.
        saved: Steps of its last saves, to the nodes and to shared storage, when the pulse began.
    """

    step: int
    stop: str | None
    costs: Costs
    saved: tuple[int, int] = (-1, -1)

    def to_json(self) -> list[Any]:
        return [self.step, self.stop, self.costs.step_s, self.costs.save_s, *self.saved]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Report:
        step, stop, step_s, save_s, *saved = fields
        return cls(step, stop, Costs(step_s, save_s), (saved[0], saved[1]))


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of all ranks until the next one.

    Attributes:
        interval: Steps from one save to the next; ``None`` while it is not known.
        shared_interval: The same of saves to shared storage; ``None`` without any, too.
        saved, shared_saved: Steps of the last saves that the plan knows of.
        stop: Why the job is to stop; ``None`` if it is not.
        mismatch: How the steps of the ranks differ; ``None`` if they do not.
    """

    interval: int | None
    shared_interval: int | None
    saved: int = -1
    shared_saved: int = -1
    stop: str | None = None
    mismatch: str | None = None


def judge_reports(every: Every, shared_every: Every | None, told: Sequence[Any]) -> list[Any]:
    """Fields of the :class:`Plan` that follows from the reports of all ranks."""
    reports = [Report.from_json(fields) for fields in told]
    steps = [report.step for report in reports]
    mismatch = None
    if len(set(steps)) > 1:
        slow, fast = steps.index(min(steps)), steps.index(max(steps))
        mismatch = (
            f"the ranks are in different steps: rank {slow} called step({steps[slow]}) when rank "
            f"{fast} called step({steps[fast]}). Call step() once in each step, on every rank"
        )
    costs = Costs(
        _slowest([report.costs.step_s for report in reports]),
        _slowest([report.costs.save_s for report in reports]),
    )
    stops = [f"rank {rank}: {report.stop}" for rank, report in enumerate(reports) if report.stop]
    # A rank may have saved alone.
    saved, shared_saved = (max(steps) for steps in zip(*(r.saved for r in reports), strict=True))
    return [
        every.interval(costs),
        None if shared_every is None else shared_every.interval(costs),
        saved,
        shared_saved,
        stops[0] if stops else None,
        mismatch,
    ]


class Pulse:
    """The pulses of one rank.

    Args:
        every, shared_every: Cadences of the saves.
        timeout_s: Deadline of the agreement, in seconds.
        why_stop: Tells why this rank is to stop, ``None`` if it is not; called in a thread.
        asked: Set once this rank is asked to stop, which ends its wait.
        costs: Returns this rank's measurements; called in a thread.

    Attributes:
        is_under_way: Whether a pulse was begun whose plan is to come.
    """

    def __init__(
        self,
        every: Every,
        shared_every: Every | None,
        timeout_s: float,
        why_stop: Callable[[], str | None],
        asked: Latch,
        costs: Callable[[], Costs],
    ) -> None:
        self._queue = AsyncCallsQueue(timeout_s=timeout_s)
        self._judge = partial(judge_reports, every, shared_every)
        self._why_stop = why_stop
        self._ends_wait = asked, Latch()
        # The first pulse is to find out what is not known yet.
        self._waits_s = 0.0
        self._costs = costs
        self._plan: Plan | None = None
        self._was_mismatched = False
        self.is_under_way = False

    def begin(self, step: int, saved: tuple[int, int], poll: int | None = None) -> None:
        """Begin a pulse; all ranks call it in the same step, or poll.

        Args:
            step: The step.
            saved: As for :class:`Report`.
            poll: As for :meth:`poll`.
        """
        self._queue.pass_step(step if poll is None else poll)
        fields: list[Any] = []
        waits_s, self._waits_s = self._waits_s, _PULSE_S

        # Here and not in report_fn: what tells why to stop may have to ask for it over a network,
        # and a rank that is alone would do so in its training loop.
        @runs_in_trainer
        def look() -> None:
            wait_for_any(self._ends_wait, waits_s)
            fields.extend(Report(step, self._why_stop(), self._costs(), saved).to_json())

        call = AsyncCall(
            look,
            report_fn=lambda: fields,
            judge_fn=self._judge,
            verdict_fn=self._take,
            name="plan the next saves",
            is_urgent_fn=lambda fields: Plan(*fields).stop is not None,
        )
        self._queue.schedule_async_request(AsyncRequest(call, (), []))
        self.is_under_way = True

    def poll(self, step: int) -> Plan | None:
        """Return the plan, in the step in which all ranks have it; ``None`` else.

        Args:
            step: The step; or any number that grows from poll to poll, the same on all ranks.

        Raises:
            MismatchError: The ranks were in different steps in the last pulse and in this one; on
                all ranks. After one they agree again, as when one rank has made a step alone.
            PeerLostError: Some rank did not come in time.
        """
        self._queue.pass_step(step)
        if not self._queue.maybe_finalize_async_calls():
            return None
        self.is_under_way = False
        plan, self._plan = self._plan, None
        if plan is not None and plan.mismatch is not None:
            if self._was_mismatched:
                raise MismatchError(plan.mismatch)
            logger.warning("%s", plan.mismatch)
        self._was_mismatched = plan is not None and plan.mismatch is not None
        return plan

    def finish(self) -> None:
        """Wait for the pulse that is under way, and forget its plan; all ranks do so."""
        if self.is_under_way:
            self._queue.maybe_finalize_async_calls(blocking=True)
            self.is_under_way, self._plan = False, None

    def close(self, *, is_in_step: bool) -> None:
        """End the thread.

        Args:
            is_in_step: Whether all ranks close theirs, too, after the same step.
        """
        self._ends_wait[1].set()
        self._queue.close(abort=not is_in_step)

    def _take(self, fields: Sequence[Any]) -> None:
        self._plan = Plan(*fields)


def _slowest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # A rank that has measured nothing may be the slowest.
    return max(known) if len(known) == len(values) else None
