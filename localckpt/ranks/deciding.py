"""One rank's part in the rounds of its group: as the root, or as a rank that reports to it.

The root waits for the reports of all ranks and gives the verdict. A rank that waits for it in vain
finds out who is missing, and gives the verdict in its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from localckpt.errors import MismatchError, PeerLostError
from localckpt.failure_texts import short
from localckpt.ranks.absent import NAMED, Absences, named
from localckpt.ranks.asking import StoreThreads, StoreWait, ask_store, store_errors
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Failure
from localckpt.ranks.job_store import Group, StorePart
from localckpt.ranks.patience import Patience
from localckpt.ranks.round import Round
from localckpt.ranks.verdict import Call, Verdict, joint_failure, judge_reports
from localckpt.threads import Latch
from localckpt.waiting import wait_until

__all__ = ["Deciding"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The root gives up first; then the first of those that waited for it in vain looks why, and the
# others wait for what it finds.
_AFTER_ROOT, _AFTER_FIRST_S = 0.1, 2.0
_LEAVING_S = 1.0
# While a rank does its part, which may take hours, it asks less often whether another has failed.
# In a large world it waits instead, and torch prints two warnings for each wait that ends in vain.
_PAUSE_OF_HEARING_S, _HEARING_S = 0.25, 600.0
# The job's store may live in the root's process, so others get time to read the last verdict.
_SEE_OFF_S = 2.0
# For a look whom a wait is for.
_LOOKING_S = 1.0


class Deciding:
    """One rank's part in rounds, one after another.

    Args:
        part: Part of the job's store.
        group: The ranks.
        root: The rank of the group that judges.
        timeout_s: The time that the store has to answer, in seconds.
        hint: See :class:`localckpt.ranks.ranks.Ranks`.

    Attributes:
        stopped: Set while no call waits.
    """

    def __init__(
        self, part: StorePart, group: Group, root: int, timeout_s: float, hint: Callable[[], str]
    ) -> None:
        self._part = part
        self._rank, self._ranks, self._root = group.rank, group.ranks, root
        self._absences = Absences(group.ranks[group.rank], group.ranks, group.ranks[root])
        self._timeout_s = timeout_s
        self._hint = hint
        self._threads = StoreThreads()
        self.stopped = Latch()
        # Verdicts before it have been deleted.
        self._forgotten = 0
        self._attended: tuple[int, str] | None = None
        # Round in which this rank waits for others.
        self._waits: int | None = None

    @property
    def is_root(self) -> bool:
        """True if this rank is the one that judges."""
        return self._rank == self._root

    def close(self) -> None:
        """End the threads that talk to the store."""
        # A fork has no threads of the process that it was made of.
        if not self._part.is_fork:
            self._threads.close()

    def open(self, deadline: Deadline | None = None) -> Store:
        """Return the part of the store, once all ranks have come to theirs."""
        return self._part.open(self.stopped, deadline)

    def ask(self, what: str, call: Callable[[Store], T]) -> T:
        """Call what asks the part of the store, outside of any round."""
        store = self.open()
        return ask_store(what, self._timeout_s, lambda: call(store))

    def meet(self, number: int, call: Call) -> tuple[Verdict, Exception | None]:
        """Take part in a round.

        Returns:
            The verdict, and on the root the error of ``call.judge`` that it comes of.
        """
        if self._part.is_alone:
            own = {self._root: call.data or b""}
            judged, cause = judge_reports(call, [call.report()], own, self._ranks, self._root)
            parts = judged.parts or {}
            return Verdict.received(judged.to_json(), lambda: parts.get(self._root)), cause
        if self.is_root:
            return self._lead(number, call)
        return self._follow(number, call), None

    def too_late(self, what: str, verdict: Verdict) -> Failure | None:
        """The failure for this rank, if the others did not wait for it; else the verdict's."""
        failure = verdict.failure
        is_late = self._absences.me in verdict.late
        if failure is None or not is_late or failure.kind != PeerLostError.__name__:
            return failure
        return self._absences.too_late(what, verdict.late)

    def is_for_others(self, what: str, verdict: Verdict) -> bool:
        """Return whether a round was given up in which others were in a call that this rank is not.

        Such a call one rank made alone, or this rank has missed it: its next one is another round.
        """
        return self._absences.me in verdict.late and verdict.given_up != what

    def is_over(self, number: int, what: str) -> bool:
        """Return whether a round is over already that this rank has not begun; see above."""

        def is_over(round_: Round) -> bool:
            given = round_.verdict()
            return given is not None and self.is_for_others(what, Verdict.received(given, bytes))

        return self._ask(number, what, is_over)

    def note(self, number: int, what: str) -> None:
        """Say what this rank begins to do."""
        self._ask(number, what, lambda round_: round_.note(short(what)))

    def post(self, number: int, call: Call) -> None:
        """Report, without waiting for the verdict."""
        self._ask(number, call.what, lambda round_: round_.report(call.report(), wakes_root=True))

    def see_off(self, number: int) -> None:
        """On the root: return once all ranks have read the verdict of a round, or soon."""

        def see_off(round_: Round) -> None:
            wait_until(round_.is_read_by_all, _SEE_OFF_S)

        # A store that cannot be reached is not waited for.
        with suppress(PeerLostError):
            self._ask(number, "see the other ranks off", see_off)

    # The root.

    def _lead(self, number: int, call: Call) -> tuple[Verdict, Exception | None]:
        verdict, cause = Verdict(), None
        report, data = call.report(), {self._rank: call.data or b""}

        def collect(round_: Round) -> list[Any] | Verdict:
            round_.report(report, wakes_root=report[1] is not None)
            grace_until = lambda: time.monotonic() + call.grace_s  # noqa: E731
            is_complete = round_.wait_for_reports(call.deadline.at, grace_until)
            return self._collected(round_, call, data, is_complete)

        def collect_now(round_: Round) -> list[Any] | Verdict:
            return self._collected(round_, call, data, round_.is_complete())

        def decide(round_: Round) -> Verdict:
            round_.give_parts(verdict.parts or {})
            return Verdict.received(round_.decide(verdict.to_json()), round_.part)

        try:
            waits_s = call.deadline.left_s + call.grace_s
            collected = self._wait(number, call.what, collect, waits_s)
            if collected is None:
                collected = self._ask(number, call.what, collect_now)
            if isinstance(collected, Verdict):
                verdict = collected
            else:
                verdict, cause = judge_reports(call, collected, data, self._ranks, self._root)
        except MismatchError as error:
            # What a rank has reported cannot be read.
            verdict = Verdict(failure=Failure.of(error))
        except BaseException as error:
            if call.acts and not isinstance(error, Exception) and not self._part.is_fork:
                # The others wait for a verdict.
                verdict = Verdict(failure=self._failure_here(call.what, Failure.of(error)))
                with suppress(PeerLostError):
                    self._ask(number, call.what, decide)
            raise
        try:
            return self._ask(number, call.what, decide), cause
        finally:
            # Else the error would keep itself by this variable, and what its callers work on.
            del cause

    def _collected(
        self, round_: Round, call: Call, data: dict[int, bytes], is_complete: bool
    ) -> list[Any] | Verdict:
        """The reports of all ranks, or the verdict if there is nothing to judge."""
        if not is_complete and not round_.join_teams():
            return self._verdict_on_missing(round_, call.what, call.deadline.waited_s)
        reports = self._all_reports(round_)
        if None not in reports and joint_failure(call.what, reports, self._ranks) is not None:
            return reports
        if None in reports or (call.acts and not round_.claim(acts=True)):
            # Another rank has given the verdict, or is about to.
            given = round_.await_verdict(time.monotonic() + _AFTER_FIRST_S)
            given = given or self._give_up(round_, call.what, call.deadline.timeout_s)
            return Verdict.received(given, round_.part)
        for rank, (_, _, _, nbytes, *_) in enumerate(reports):
            if nbytes and rank != self._rank:
                data[rank] = round_.take_data(rank)
        return reports

    def _all_reports(self, round_: Round) -> list[Any]:
        """Read the reports of all ranks, and delete what is left of earlier rounds."""
        round_.forget_before(self._forgotten)
        self._forgotten = round_.number
        return round_.reports()

    # All other ranks.

    def _follow(self, number: int, call: Call) -> Verdict:
        def take_part(round_: Round) -> Verdict:
            report, deadline = call.report(), call.deadline
            if call.data:
                round_.put_data(call.data)
            round_.report(report, wakes_root=report[1] is not None)
            if report[1] is not None and not call.grace_s:
                failure = self._failure_here(call.what, Failure.from_json(report[1]))
                return self._decided(round_, call, Verdict(failure=failure))
            given = round_.await_verdict(deadline.at + deadline.timeout_s * _AFTER_ROOT)
            if given is None and call.acts and not round_.claim(acts=False):
                # All have reported, and the root acts.
                given = round_.await_verdict(time.monotonic() + deadline.timeout_s)
                if given is None:
                    unknown = self._absences.unknown(call.what, deadline.timeout_s)
                    return self._ended(round_, call, Verdict(failure=unknown))
            if given is None:
                given = self._give_up(round_, call.what, deadline.waited_s)
            return self._ended(round_, call, Verdict.received(given, round_.part))

        def stop(round_: Round) -> Verdict:
            if call.acts and not round_.claim(acts=False):
                unknown = self._absences.unknown(call.what, call.deadline.waited_s)
                return self._ended(round_, call, Verdict(failure=unknown))
            missing = self._verdict_on_missing(round_, call.what, call.deadline.waited_s)
            verdict = self._decided(round_, call, missing)
            round_.wake_root()
            return verdict

        # For an act that is slow it waits twice.
        waits_s = call.deadline.left_s + call.deadline.timeout_s * (_AFTER_ROOT + call.acts)
        verdict = self._wait(number, call.what, take_part, waits_s)
        return self._ask(number, call.what, stop) if verdict is None else verdict

    def _decided(self, round_: Round, call: Call, mine: Verdict) -> Verdict:
        """Give a verdict on this rank, unless another rank has; the one that holds."""
        given = round_.decide(mine.to_json())
        return self._ended(round_, call, Verdict.received(given, round_.part))

    def _ended(self, round_: Round, call: Call, verdict: Verdict) -> Verdict:
        if call.acts or verdict.failure is not None:
            round_.count_reader()
        if verdict.failure is not None and call.data:
            round_.drop_data(len(call.data))
        return verdict

    # In a thread of its own, with no deadline.

    def hear(self, number: int, what: str, over: Latch) -> bool:
        """Wait for the verdict on a round in which this rank has not reported yet: a failure.

        Args:
            number: Of the round.
            what: What the ranks do together.
            over: Ends the wait: this rank is about to report.

        Returns:
            Whether there is a verdict; False if ``over`` is set.

        Raises:
            PeerLostError: The store cannot be reached.
        """
        with store_errors(what):
            store, fetch = self._part.listener(over, _PAUSE_OF_HEARING_S)
            round_ = Round(store, number, self._rank, len(self._ranks), fetch)
            while not over.is_set():
                if round_.await_verdict(time.monotonic() + _HEARING_S) is not None:
                    # Had this rank reported, the verdict may be any.
                    return not over.is_set()
        return False

    def attend(self, number: int, call: Call) -> Verdict:
        """Take part as in :meth:`meet`; see :meth:`localckpt.ranks.ranks.Ranks.attend`."""
        with store_errors(call.what):
            store, fetch = self._part.listener(self.stopped)
            round_ = Round(store, number, self._rank, len(self._ranks), fetch)
            self._attended = (number, call.what)
            try:
                return Verdict.received(self._await_attended(round_, call), round_.part)
            finally:
                self._attended = None

    def _await_attended(self, round_: Round, call: Call) -> Any:
        round_.report(call.report(), wakes_root=False)
        if self.is_root and round_.wait_to_look(inf) and round_.is_complete():
            reports = self._all_reports(round_)
            # A rank that has gone on knows the verdict that another one gave.
            if None not in reports:
                verdict, _ = judge_reports(call, reports, {}, self._ranks, self._root)
                return round_.decide(verdict.to_json())
        if (given := round_.await_verdict(inf)) is None:
            raise PeerLostError(f"could not {call.what}: this rank has left")
        return given

    def give_up(self, waited_s: float) -> None:
        """End an :meth:`attend` in another thread: ranks that have not reported are lost."""
        if (attended := self._attended) is not None:
            number, what = attended
            self._ask(number, what, lambda round_: self._give_up(round_, what, waited_s))

    def leave(self, next_number: int, next_what: str) -> None:
        """End an :meth:`attend` in another thread, on all ranks; else the next one of the others.

        Args:
            next_number: Of the round that this rank would attend next.
            next_what: What the ranks do together there.
        """
        self.stopped.set()
        number, what = self._attended or (next_number, next_what)

        def decide() -> None:
            # The others may wait for this rank to come here first.
            store = self._part.open(Latch(), Deadline.after(_LEAVING_S))
            round_ = self._round(store, number, StoreWait(_LEAVING_S))
            round_.decide(Verdict(failure=self._absences.left(what)).to_json())
            round_.wake_root()

        try:
            ask_store("leave the others", _LEAVING_S, decide)
        except PeerLostError as error:
            logger.debug("%s", error)

    # Ranks that do not come.

    def _give_up(self, round_: Round, what: str, waited_s: float) -> Any:
        """Decide that the ranks which have not reported are lost, unless another rank does."""
        given = None
        is_first = self.stopped.is_set() or self.is_root or round_.is_first_to_ask()
        if is_first and round_.join_teams():
            # The others wait longer, for what is decided here.
            given = round_.await_verdict(time.monotonic() + _AFTER_FIRST_S / 2)
        elif not is_first:
            given = round_.await_verdict(time.monotonic() + _AFTER_FIRST_S)
        if given is None:
            missing = self._verdict_on_missing(round_, what, waited_s)
            given = round_.decide(missing.to_json())
            round_.wake_root()
        return given

    def _verdict_on_missing(self, round_: Round, what: str, waited_s: float) -> Verdict:
        """The verdict when not all have reported in time."""
        reports, ranks = round_.reports(), self._ranks
        late = [rank for rank, report in enumerate(reports) if report is None] or [self._root]
        failure = joint_failure(what, reports, ranks)
        missing = tuple(ranks[rank] for rank in late)
        if failure is None:
            seen = {ranks[r]: s for r in late[:NAMED] if (s := round_.last_seen(r)) is not None}
            failure = self._absences.late(what, missing, seen, waited_s, self._hint())
        return Verdict(failure=failure, late=missing, given_up=what)

    def awaits(self) -> str:
        """Return in words which ranks a call in another thread waits for; empty for none."""
        number = self._waits if self._attended is None else self._attended[0]
        return "" if number is None else self._awaited(number)

    def _awaited(self, number: int) -> str:
        """Return in words which ranks a round waits for: on the root all, else whether it does.

        Only the root reads the reports of all.
        """

        def look() -> str:
            round_ = self._round(self.open(), number, StoreWait(_LOOKING_S))
            reported = round_.last_report(self._root)
            if not self.is_root and reported is not None and reported[0] >= number:
                return f"ranks that rank {self._absences.root} names"
            late = [self._root]
            if self.is_root:
                late = [rank for rank, report in enumerate(round_.reports()) if report is None]
            seen = {self._ranks[r]: s for r in late[:NAMED] if (s := round_.last_seen(r))}
            return named([self._ranks[rank] for rank in late], seen) or "the job's store"

        try:
            return ask_store("see which ranks are waited for", _LOOKING_S, look)
        except PeerLostError:
            return "the job's store, which does not answer"

    def _failure_here(self, what: str, failure: Failure) -> Failure:
        return Failure.joint(f"could not {what}: ", {self._absences.me: failure})

    # Talking to the store.

    def _ask(self, number: int, what: str, call: Callable[[Round], T]) -> T:
        """Call ``call`` in another thread; the store waits for ever for a lost host."""
        return self._in_thread(number, what, call, 0.0, Latch())  # type: ignore[return-value]

    def _wait(self, number: int, what: str, call: Callable[[Round], T], waits_s: float) -> T | None:
        """Ask as :meth:`_ask`, by a call that waits; ``None`` once this rank stops waiting."""
        self._waits = number
        try:
            return self._in_thread(number, what, call, waits_s, self.stopped)
        finally:
            self._waits = None

    def _in_thread(
        self,
        number: int,
        what: str,
        call: Callable[[Round], T],
        waits_s: float,
        stopped: Latch,
    ) -> T | None:
        store = self.open()
        # However long the wait for other ranks, the store needs its time.
        answer_s = 2 * self._timeout_s + _AFTER_FIRST_S
        patience = Patience(self._absences.me, what)
        return self._threads.ask_until_stopped(
            what,
            answer_s + waits_s,
            lambda wait: call(self._round(store, number, wait)),
            stopped,
            answer_s=answer_s,
            tell=lambda: patience.left_s(lambda: self._awaited(number)),
        )

    def _round(self, store: Store, number: int, wait: StoreWait) -> Round:
        def fetch(key: str, until: float) -> bytes | None:
            return self._part.fetch(key, until, wait)

        return Round(store, number, self._rank, len(self._ranks), fetch)
