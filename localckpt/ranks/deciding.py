"""One rank's part in the rounds of its group: as the root, or as a rank that reports to it.

The root waits for the reports of all ranks and gives the verdict. A rank that waits for it in vain
finds out who is missing, and gives the verdict in its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.ranks.asking import StoreWait, ask_store, ask_until_stopped, store_errors
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import NAMED, Absences, Failure, named
from localckpt.ranks.job_store import Members
from localckpt.ranks.patience import Patience
from localckpt.ranks.round import RESULT, VERDICT, Round
from localckpt.ranks.store_part import AbandonedError, StorePart
from localckpt.ranks.verdict import Call, Verdict, joint_failure, judge_reports
from localckpt.threads import Latch
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The root gives up first; then the first of those that waited for it in vain looks why, and the
# others wait for what it finds.
_AFTER_ROOT, _AFTER_FIRST_S = 0.1, 2.0
_LEAVING_S = 1.0
# The job's store may live in the root's process, so others get time to read the last verdict.
_DRAIN_S = 2.0
# For a look whom a wait is for.
_LOOKING_S = 1.0

_Outcome = tuple[Verdict, Exception | None]
"""A verdict, and on the root the error of the judge that it comes of."""


class Deciding:
    """One rank's part in rounds, one after another; :class:`Ranks` is what others call.

    Attributes:
        rank, root, is_root: This process's rank in the group, the rank that judges, and whether it
            is this one.
        global_ranks: The ranks of the group, as ranks of the job.
        rounds: Number of the next decision. Where an interrupt may keep a rank from one, all get
            its number by a decision of other ``Ranks``.
    """

    def __init__(
        self, name: str, group: Members, root: int, timeout_s: float, hint: Callable[[], str]
    ) -> None:
        self.rank, self.root, self.is_root = group.rank, root, group.rank == root
        self.global_ranks, self.world_size = list(group.ranks), len(group.ranks)
        self._absences = Absences(group.ranks[group.rank], group.ranks, group.ranks[root])
        self._store_timeout_s = timeout_s
        self._hint = hint
        self._part = StorePart(name, group, timeout_s, hint)
        self.rounds = 0
        # Set while no call waits.
        self._stopped = Latch()
        # Verdicts before it have been deleted.
        self._forgotten = 0
        # Number and name of a round in which this rank waits for others.
        self._waits: tuple[int, str] | None = None
        self._has_left = False

    def close(self) -> None:
        """Let what is left in the job's store be removed; no call may follow, on any rank.

        A rank that does not wait any more leaves its keys: the others may look at them still.
        """
        if self._stopped.is_set():
            self._part.close_clients()
        else:
            self._part.close()

    def _meet(self, call: Call) -> _Outcome:
        """Take part in the next round; return the verdict as this rank has it."""
        while True:
            if self._part.is_alone:
                self.rounds += 1
                own = {self.root: call.data or b""}
                judged, cause = judge_reports(call, [call.report()], own, self.global_ranks)
                return self._own(judged), cause
            # Before it counts: a round that no rank could begin has no number.
            self._part.open(self._stopped, call.deadline)
            number, deadline = self.rounds, call.deadline
            self.rounds += 1
            waits_s = deadline.left_s + deadline.timeout_s * _AFTER_ROOT + call.grace_s
            outcome = self._wait(number, call.what, partial(self._take_part, call), waits_s)
            if outcome is None and self._has_left:
                raise PeerLostError(f"could not {call.what}: this rank has left")
            if outcome is None:
                outcome = self._ask(number, call.what, partial(self._end_now, call))
            verdict, cause = outcome
            if not self._is_for_others(call.what, verdict):
                break
        if verdict.failure is not None and not verdict.late:
            # An error may end this process, and with it the store.
            self._drain_readers(number)
        return self._for_this_rank(call.what, verdict), cause

    def _has_failed(self, what: str) -> bool:
        """Return whether there is a verdict already on the next round: others have failed."""
        while (given := self._ask(self.rounds, what, Round.verdict)) is not None:
            if not self._is_for_others(what, Verdict.received(given, bytes)):
                return True
            self.rounds += 1
        return False

    def _tell(self, what: str, done: Verdict | None, waits_s: float) -> Verdict:
        """Tell what the root has done after a round; returns once all ranks have read it, or soon.

        ``done`` is that on the root, and ``None`` on the other ranks, which wait ``waits_s`` for
        it. Only the root knows, so none of the others decides anything for all ranks.
        """
        number = self.rounds - 1

        def read(round_: Round) -> Verdict:
            given = round_.await_verdict(time.monotonic() + waits_s, RESULT)
            round_.count_reader()
            return unknown if given is None else Verdict.received(given, round_.part)

        if done is not None:
            if self._part.is_alone:
                return self._own(done)
            told = self._ask(number, what, lambda round_: self._give(round_, done, RESULT))
            self._drain_readers(number)
            return told
        unknown = Verdict(failure=self._absences.unknown(what, waits_s))
        heard = self._wait(number, what, read, waits_s)
        if heard is None:
            self._ask(number, what, Round.count_reader)
        return heard or unknown

    def _alone(self, what: str, failure: Failure) -> Failure:
        """Describe for the others what has failed on this rank."""
        return Failure.joint(f"could not {what}: ", {self._absences.me: failure})

    def _own(self, verdict: Verdict) -> Verdict:
        parts = verdict.parts or {}
        return Verdict.received(verdict.to_json(), lambda: parts.get(self.root))

    def _is_for_others(self, what: str, verdict: Verdict) -> bool:
        """Return whether a round was given up in which others were in a call that this rank is not.

        Such a call one rank made alone, or this rank has missed it: its next one is another round.
        """
        return self._absences.me in verdict.late and verdict.given_up != what

    def _for_this_rank(self, what: str, verdict: Verdict) -> Verdict:
        failure = verdict.failure
        is_late = self._absences.me in verdict.late
        if failure is None or not is_late or failure.kind != PeerLostError.__name__:
            return verdict
        return replace(verdict, failure=self._absences.too_late(what, verdict.late))

    def _drain_readers(self, number: int) -> None:
        """On the root: return once all ranks have read the verdict of a round, or soon."""
        if not self.is_root:
            return
        what = "wait until the other ranks have read the verdict"
        # A store that cannot be reached is not waited for.
        with suppress(CheckpointingException):
            self._ask(number, what, lambda round_: wait_until(round_.is_read_by_all, _DRAIN_S))

    # Called in a thread that may wait at the store.

    def _take_part(self, call: Call, round_: Round) -> _Outcome:
        report, deadline = call.report(), call.deadline
        has_failed = report[1] is not None
        if call.data and not self.is_root:
            round_.put_data(call.data)
        round_.report(report, wakes_root=has_failed)
        if self.is_root:
            round_.wait_for_reports(deadline.at, call.grace_s)
            return self._lead(call, round_)
        if has_failed and not call.grace_s:
            given = self._fail(round_, self._alone(call.what, Failure.from_json(report[1])))
        else:
            given = round_.await_verdict(deadline.at + deadline.timeout_s * _AFTER_ROOT)
        if given is None:
            given = self._give_up(round_, call.what, deadline.waited_s)
        return self._ended(round_, call, given), None

    def _end_now(self, call: Call, round_: Round) -> _Outcome:
        """End a round in which this rank has reported, and waits no longer."""
        if self.is_root:
            return self._lead(call, round_)
        given = self._give_up(round_, call.what, call.deadline.waited_s)
        return self._ended(round_, call, given), None

    def _lead(self, call: Call, round_: Round) -> _Outcome:
        """On the root: judge the reports, or find out who is missing; give the verdict."""
        cause, data = None, {self.rank: call.data or b""}
        try:
            with store_errors(call.what):
                reports = round_.reports()
                if None in reports:
                    waited_s = call.deadline.waited_s
                    verdict = self._verdict_on_missing(round_, call.what, reports, waited_s)
                else:
                    # What is left of earlier rounds has been read by all.
                    round_.forget_before(self._forgotten)
                    self._forgotten = round_.number
                    if joint_failure(call.what, reports, self.global_ranks) is None:
                        for rank, (_, _, _, nbytes, *_) in enumerate(reports):
                            if nbytes and rank != self.rank:
                                data[rank] = round_.take_data(rank)
                    verdict, cause = judge_reports(call, reports, data, self.global_ranks)
        except MismatchError as error:
            # What a rank has reported cannot be read.
            verdict = Verdict(failure=Failure.of(error))
        return self._give(round_, verdict), cause

    def _give(self, round_: Round, verdict: Verdict, key: str = VERDICT) -> Verdict:
        """Give a verdict, unless another rank has; return the one that holds."""
        round_.give_parts(verdict.parts or {})
        return Verdict.received(round_.decide(verdict.to_json(), key), round_.part)

    def _fail(self, round_: Round, failure: Failure) -> Any:
        """Fail a round for all ranks, unless it has a verdict; return the one that holds."""
        given = round_.decide(Verdict(failure=failure).to_json())
        round_.wake_root()
        return given

    def _ended(self, round_: Round, call: Call, given: Any) -> Verdict:
        verdict = Verdict.received(given, round_.part)
        if verdict.failure is not None:
            round_.count_reader()
            if call.data:
                round_.drop_data(len(call.data))
        return verdict

    # Waits with no deadline, in another thread.

    def give_up(self, waited_s: float) -> None:
        """End a wait with no deadline in another thread: ranks that have not reported are lost.

        Raises PeerLostError if the store cannot be reached.
        """
        if (waits := self._waits) is not None:
            number, what = waits
            self._ask(number, what, lambda round_: self._give_up(round_, what, waited_s))

    def leave(self, next_what: str) -> None:
        """Take part in nothing any more.

        It ends a wait with no deadline in another thread, on all ranks; else the others' next one,
        which is that for ``next_what``.
        """
        number, what = self._waits or (self.rounds, next_what)
        self._has_left = True
        self._stopped.set()

        def decide() -> None:
            # The others may wait for this rank to come here first.
            store = self._part.open(Latch(), Deadline.after(_LEAVING_S))
            self._fail(self._round(store, number, StoreWait()), self._absences.left(what))

        try:
            ask_store("leave the others", _LEAVING_S, decide)
        except CheckpointingException as error:
            logger.debug("%s", error)

    # Ranks that do not come.

    def _give_up(self, round_: Round, what: str, waited_s: float) -> Any:
        """Decide that the ranks which have not reported are lost, unless another rank does."""
        is_stopped = self._stopped.is_set()
        is_first = is_stopped or self.is_root or round_.is_first_to_ask()
        try:
            with store_errors(what):
                reports = round_.reports() if is_first else []
                if None not in reports:
                    if is_first:
                        # A rank may have died after its report, before it was counted.
                        round_.wake_root()
                    # The others wait longer, for what the first one decides.
                    wait_s = 0.0 if is_stopped else _AFTER_FIRST_S / (2 if is_first else 1)
                    if (given := round_.await_verdict(time.monotonic() + wait_s)) is not None:
                        return given
                    reports = round_.reports()
                missing = self._verdict_on_missing(round_, what, reports, waited_s)
        except MismatchError as error:
            # What a rank has reported cannot be read.
            missing = Verdict(failure=Failure.of(error))
        given = round_.decide(missing.to_json())
        round_.wake_root()
        return given

    def _verdict_on_missing(
        self, round_: Round, what: str, reports: list[Any], waited_s: float
    ) -> Verdict:
        ranks = self.global_ranks
        late = _missing(reports) or [self.root]
        failure = joint_failure(what, reports, ranks)
        missing = tuple(ranks[rank] for rank in late)
        if failure is None or failure.kind == PeerLostError.__name__:
            seen = round_.last_seen(late[:NAMED], ranks)
            absent = self._absences.late(what, missing, seen, waited_s, self._hint())
            # Ranks that have lost a peer say so, and this which of them is to blame.
            also = "" if failure is None else f" Also: {failure.text}"
            failure = replace(absent, text=f"{absent.text}{also and '.'}{also}")
        return Verdict(failure=failure, late=missing, given_up=what)

    def awaits(self) -> str:
        """Return in words which ranks a call in another thread waits for; empty for none."""
        return "" if (waits := self._waits) is None else self._awaited(waits[0])

    def _awaited(self, number: int) -> str:
        """Return in words which ranks a round waits for: on the root all, else whether it does."""

        def look() -> str:
            round_ = self._round(self._part.open(self._stopped), number, StoreWait())
            reported = round_.last_report(self.root)
            if not self.is_root and reported is not None and reported[0] >= number:
                return f"ranks that rank {self._absences.root} names"
            late = _missing(round_.reports()) if self.is_root else [self.root]
            seen = round_.last_seen(late[:NAMED], self.global_ranks)
            return named([self.global_ranks[rank] for rank in late], seen) or "the job's store"

        try:
            return ask_store("see which ranks are waited for", _LOOKING_S, look)
        except CheckpointingException:
            return "the job's store, which does not answer"

    # Talking to the store.

    def _ask(self, number: int, what: str, call: Callable[[Round], T]) -> T:
        """Call ``call`` in another thread; the store waits for ever for a lost host."""
        return self._in_thread(number, what, call, 0.0, Latch())  # type: ignore[return-value]

    def _wait(self, number: int, what: str, call: Callable[[Round], T], waits_s: float) -> T | None:
        """Ask as :meth:`_ask`, by a call that waits; ``None`` once this rank stops waiting."""
        self._waits = number, what
        try:
            return self._in_thread(number, what, call, waits_s, self._stopped)
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
        store = self._part.open(self._stopped)
        if waits_s == inf:
            # In a thread behind training, which has nothing else to do.
            with store_errors(what), suppress(AbandonedError):
                return call(self._round(store, number, StoreWait(stopped)))
            return None
        # However long the wait for other ranks, the store needs its time.
        limit_s = waits_s + self._store_timeout_s + 2 * _AFTER_FIRST_S
        patience = Patience(self._absences.me, what)
        return ask_until_stopped(
            *(what, limit_s, lambda wait: call(self._round(store, number, wait))),
            *(stopped, lambda: patience.left_s(lambda: self._awaited(number))),
        )

    def _round(self, store: Store, number: int, wait: StoreWait) -> Round:
        def fetch(key: str, until: float) -> bytes | None:
            return self._part.fetch(key, until, wait)

        return Round(store, number, self.rank, self.world_size, fetch)


def _missing(reports: list[Any]) -> list[int]:
    return [rank for rank, report in enumerate(reports) if report is None]
