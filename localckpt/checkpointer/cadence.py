"""Cadence of saves, and the pulse by which all ranks follow it, and stop, in the same step.

A cadence is a pure function of the time of a step and the cost of a save. A pulse is an
asynchronous call that does nothing but wait and report: every few seconds all ranks decide so,
behind training, when to save and whether to stop. One is always under way, and on a rank that is
asked to stop it ends at once. The root judges the reports, and all ranks have the verdict in the
same step, so no step sends a message.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import Any

from localckpt.async_save.queue import AsyncCallsQueue
from localckpt.async_save.request import AsyncCall, AsyncRequest, runs_in_trainer
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.threads import Latch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Costs:
    """Measurements of a running job, the slowest rank's.

    Attributes:
        step_s: Duration of a step without any save, in seconds; ``None`` before the first.
        save_s: Training time that one save takes away, in seconds: how long training waits for it,
            and how much slower the steps beside it are. ``None`` before the second save.
    """

    step_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True, slots=True)
class Every:
    """Interval between saves, given in one of four ways.

    Args:
        steps: A number of steps, counted from step 0 whatever was saved in between: with 5, after
            steps 4, 9 and 14.
        minutes: A time, turned into steps by the measured duration of a step.
        overhead: Largest share of training time that saves may take, such as 0.01.
        mtbf_hours: Mean time between failures of the whole job. The interval is the one that loses
            least time to saves and to repeated work together, by equation 37 of J. T. Daly, "A
            higher order estimate of the optimum checkpoint interval for restart dumps", Future
            Generation Computer Systems 22 (2006). The time that a restart takes does not change it.

    Raises:
        CheckpointingException: None of them is given, or several, or one that makes no sense.
    """

    steps: int | None = None
    minutes: float | None = None
    overhead: float | None = None
    mtbf_hours: float | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__slots__}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise CheckpointingException(
                f"Every() takes one of steps, minutes, overhead and mtbf_hours, and was given "
                f"{', '.join(given) or 'none'}"
            )
        ((name, value),) = given.items()
        if isinstance(value, bool) or not value > 0:
            raise CheckpointingException(f"Every({name}={value!r}): it must be above 0")
        if name == "steps" and not isinstance(value, int):
            raise CheckpointingException(f"Every(steps={value!r}): it must be an int")
        if name == "overhead" and value >= 1:
            raise CheckpointingException(
                f"Every(overhead={value!r}): it is a share of training time, and must be below 1"
            )

    def interval(self, costs: Costs) -> int | None:
        """Steps from one save to the next, at least 1.

        Returns:
            The interval; ``None`` as long as it depends on what is not measured yet.
        """
        if self.steps is not None:
            return self.steps
        if costs.step_s is None:
            return None
        if self.minutes is not None:
            return _in_steps(60 * self.minutes, costs.step_s)
        if costs.save_s is None:
            return None
        if self.overhead is not None:
            # Of interval + save_s, the saves take the share.
            return _in_steps(costs.save_s * (1 / self.overhead - 1), costs.step_s)
        assert self.mtbf_hours is not None
        return _in_steps(_daly_s(costs.save_s, 3600 * self.mtbf_hours), costs.step_s)


def _daly_s(save_s: float, mtbf_s: float) -> float:
    """Daly's optimum time between two saves, in seconds."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def _in_steps(seconds: float, step_s: float) -> int:
    return max(1, ceil(seconds / max(step_s, 1e-9)))


_PULSE_S = 1.5
"""Duration of a pulse: so long a request to stop may go unheard on other ranks."""


NODES, SHARED = 0, 1
"""The tiers: numbers of what plans and schedules have for each."""

Cadences = tuple[Every, Every | None]
"""Cadences of saves to the nodes, and to shared storage; ``None`` without it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of all ranks until the next one; ``intervals`` and ``saved`` are steps, by tier.

    ``mismatch`` says how the steps of the ranks differ, if they do.
    """

    intervals: Sequence[int | None]
    saved: Sequence[int] = (-1, -1)
    stop: str | None = None
    mismatch: str | None = None


def judge_reports(cadences: Cadences, reports: Sequence[Any]) -> list[Any]:
    """Fields of the :class:`Plan` that follows from the reports of all ranks.

    A report has the step in which the pulse began, why this rank is to stop, its costs, and the
    steps of its last saves.
    """
    steps, stops, step_s, save_s, saved = zip(*reports, strict=True)
    mismatch = None
    if len(set(steps)) > 1:
        slow, fast = steps.index(min(steps)), steps.index(max(steps))
        mismatch = (
            f"the ranks are in different steps: rank {slow} called step({steps[slow]}) when rank "
            f"{fast} called step({steps[fast]}). Call step() once in each step, on every rank"
        )
    costs = Costs(_slowest(step_s), _slowest(save_s))
    return [
        [None if every is None else every.interval(costs) for every in cadences],
        # A rank may have saved alone.
        list(map(max, zip(*saved, strict=True))),
        next((f"rank {rank}: {why}" for rank, why in enumerate(stops) if why), None),
        mismatch,
    ]


class Pulse:
    """The pulses of one rank. ``why_stop`` and ``costs`` are called in a thread."""

    def __init__(
        self,
        cadences: Cadences,
        timeout_s: float,
        why_stop: Callable[[], str | None],
        asked: Latch,
        costs: Callable[[], Costs],
    ) -> None:
        self._queue = AsyncCallsQueue(timeout_s=timeout_s)
        self._judge = partial(judge_reports, cadences)
        self._why_stop = why_stop
        self._asked, self._closing = asked, Latch()
        # The first pulse is to find out what is not known yet.
        self._waits_s = 0.0
        self._costs = costs
        self._plan: Plan | None = None
        self._was_mismatched = False
        self.is_under_way = False

    def begin(self, step: int, saved: Sequence[int], poll: int) -> None:
        """Begin a pulse; all ranks call it in the same step, and in the same poll."""
        self._queue.pass_step(poll)
        fields: list[Any] = []
        saved = list(saved)
        waits_s, self._waits_s = self._waits_s, _PULSE_S

        # Here and not in report_fn: what tells why to stop may have to ask for it over a network,
        # and a rank that is alone would do so in its training loop.
        @runs_in_trainer
        def look() -> None:
            self._asked.wait(waits_s, self._closing)
            why, costs = self._why_stop(), self._costs()
            fields.extend([step, why, costs.step_s, costs.save_s, saved])

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

    def poll(self, poll: int) -> Plan | None:
        """Return the plan, in the poll in which all ranks have it; ``None`` else.

        ``poll`` is the step, or grows from poll to poll, the same on all ranks. After a
        :class:`MismatchError` on ranks in different steps they agree again, as when one rank has
        made a step alone.
        """
        if not self.is_under_way:
            return None
        self._queue.pass_step(poll)
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

    def abort(self) -> None:
        """End its waits, from any thread."""
        self._closing.set()
        self._queue.abort(0.0)

    def close(self, *, is_in_step: bool) -> None:
        """End the thread. With ``is_in_step`` all ranks close theirs, too, after the same step."""
        self._closing.set()
        self._queue.close(abort=not is_in_step)

    def _take(self, fields: Sequence[Any]) -> None:
        self._plan = Plan(*fields)


def _slowest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # A rank that has measured nothing may be the slowest.
    return max(known) if len(known) == len(values) else None


_RECENT = 50


class Meter:
    """Clock of one rank's training loop.

    A step is timed from the end of one call of the checkpointer to the beginning of the next.
    Steps beside which a save is written are kept apart: what they take longer is a cost of saving.
    The first save does not count: training waits there for memory that later saves use again.
    """

    def __init__(self) -> None:
        self._left: float | None = None
        self._undisturbed: deque[float] = deque(maxlen=_RECENT)
        self._beside: list[float] = []
        self._waited_s = 0.0
        self._save_s: float | None = None
        self._is_first_save = True

    def enter(self, *, is_beside_save: bool) -> float:
        """Note that a step has ended; the time now, by the monotonic clock."""
        now = time.monotonic()
        if self._left is not None:
            (self._beside if is_beside_save else self._undisturbed).append(now - self._left)
        return now

    def leave(self, entered: float, *, is_save: bool) -> None:
        """Note that a step begins; with ``is_save`` time since ``entered`` went to a save."""
        self._left = time.monotonic()
        if is_save:
            self._waited_s += self._left - entered

    def end_save(self) -> None:
        """Note that no save is under way any more: what the last one cost is known."""
        slower_s = 0.0
        if self._beside and self._undisturbed:
            usual_s = _median(tuple(self._undisturbed))
            slower_s = max(0.0, sum(self._beside) - usual_s * len(self._beside))
        if not self._is_first_save:
            self._save_s = self._waited_s + slower_s
        self._is_first_save = False
        self._beside.clear()
        self._waited_s = 0.0

    def costs(self) -> Costs:
        # Copies, since another thread asks.
        steps = tuple(self._undisturbed) or tuple(self._beside)
        return Costs(_median(steps) if steps else None, self._save_s)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


_NEVER = 1 << 62
# The first pulse is to know how long a step takes.
_STEPS_BEFORE_PULSE = 2


class Schedule:
    """Steps at which something is to be done; the same on all ranks.

    They follow from the number of the step and from plans alone. A save, or a step, that one rank
    made alone changes nothing for longer than until the next plan.

    Attributes:
        saved: Steps of the last saves, or the step that the job was resumed from, by tier.
    """

    def __init__(self, cadences: Cadences) -> None:
        self._steps = [None if every is None else every.steps for every in cadences]
        self.saved = [-1, -1]
        self.end()

    def begin(self, resumed_from: int) -> None:
        """Schedule what follows the step that the job was resumed from, -1 for none."""
        for tier in (NODES, SHARED):
            self.note_save(tier, resumed_from)
        self._next_pulse = resumed_from + _STEPS_BEFORE_PULSE
        self._is_outdated = False

    def end(self) -> None:
        self._next, self._next_pulse = [_NEVER, _NEVER], _NEVER
        # Whether the plan of the pulse under way is not to be followed.
        self._is_outdated = False

    def follow(self, plan: Plan, step: int, *, may_save: bool) -> None:
        """Follow a plan of all ranks; if it ``may_save``, a first save measures the cost."""
        self._next_pulse = step
        if self._is_outdated:
            self._is_outdated = False
            return
        for tier, interval in enumerate(plan.intervals):
            if self._steps[tier] is None and interval is not None:
                # Saves may have begun since the pulse of this plan.
                self._next[tier] = max(self.saved[tier], plan.saved[tier]) + interval
            elif self._steps[tier] is None and tier == NODES and may_save:
                self._next[tier] = step

    def note_failure(self) -> None:
        """Note that a save to the nodes failed: where the cadence is measured, a plan follows."""
        if self._steps[NODES] is None:
            self._next[NODES] = _NEVER
            # Ranks may have begun it after different steps, of which the plan of a pulse that is
            # under way knows nothing.
            self._is_outdated = self._next_pulse == _NEVER

    @property
    def due(self) -> int:
        """First step at which something is to be done. Nothing is due before :meth:`begin`."""
        return min(*self._next, self._next_pulse)

    def is_save_due(self, tier: int, step: int) -> bool:
        return step >= self._next[tier]

    def takes_pulse(self, step: int) -> bool:
        if is_due := step >= self._next_pulse:
            self._next_pulse = _NEVER
        return is_due

    def note_save(self, tier: int, step: int) -> None:
        """Note that a save was begun; the next is a multiple of steps, or in a plan."""
        self.saved[tier], steps = step, self._steps[tier]
        self._next[tier] = _NEVER if steps is None else step + steps - (step + 1) % steps
