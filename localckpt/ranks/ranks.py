"""Decisions of a job's ranks: each reports, one of them judges, and all get the verdict.

They go over the key-value store that the process group was made with, never over a device: deciding
costs no GPU synchronisation and needs no gloo group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from localckpt.errors import AbortedError, CheckpointingException, PeerLostError
from localckpt.ranks.deadline import (
    Deadline,
    Patience,
    StoreWait,
    ask_store,
    ask_until_stopped,
    begin,
    store_errors,
)
from localckpt.ranks.failure import Attempt, CallEnd, Failure, Place, failure_of
from localckpt.ranks.job_store import Members
from localckpt.ranks.round import AFTER_FIRST_S, AFTER_ROOT, RESULT, VERDICT, Outcome, Round
from localckpt.ranks.store_part import AbandonedError, StorePart
from localckpt.ranks.verdict import REFUSED, Call, PerRank, Verdict, judge_reports, shaped, to_all
from localckpt.threads import Abort, Latch, Task, raise_if_aborted
from localckpt.waiting import wait_until

__all__ = ["GRACE_S", "MANAGER", "PerRank", "Ranks", "refused_together", "shaped", "to_all"]

T = TypeVar("T")

MANAGER = "manager"
"""Name of the :class:`Ranks` of a manager of the nodes' checkpoints."""

# Once a rank has failed, the others get so long to report why they did, too.
GRACE_S = 10.0
# A rank at work looks so often whether another has failed, and less often where they are many.
_LOOK_S, _MANY = 0.25, 1024
# Others may make nothing together with a rank that was refused, whose error is not to wait long.
_LONGEST_S = 30.0

_LEAVING_S = 1.0
# The job's store may live in the root's process, so others get time to read the last verdict.
_DRAIN_S = 2.0
# For a look whom a wait is for.
_LOOKING_S = 1.0

logger = logging.getLogger(__name__)

_nested = threading.local()


class Ranks:
    """Decisions of the ranks of one process group; without torch.distributed of a world of one.

    All ranks call the same methods in the same order, also over all objects of one ``name``, and
    the first call waits until all have come to theirs. ``timeout_s`` is the time for the job's
    store, and for other ranks in calls without a deadline. ``hint`` returns a likely cause for
    ranks that do not come.

    Where an interrupt may keep a rank from a decision, all get its number (``rounds``) by a
    decision of other ``Ranks``.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        *,
        ranks: Sequence[int] | None = None,
        group: Members | None = None,
        root: int = 0,
        hint: Callable[[], str] = str,
    ) -> None:
        group = group or Members.of(process_group, ranks)
        self.rank, self.root, self.is_root = group.rank, root, group.rank == root
        self.global_ranks, self.world_size = list(group.ranks), len(group.ranks)
        self.timeout_s = self._store_timeout_s = timeout_s
        self.under_way: str | None = None
        self.rounds = 0
        self._place = Place(group.rank, self.global_ranks, root, hint)
        self._part = StorePart(name, group, self._place, timeout_s)
        # Set while no call waits.
        self._stopped = Latch()
        # Set once no call is to do anything at all.
        self._cut_off = Abort(partial(_cut_off, name))
        self._leaving: Task[None] | None = None
        # Number and name of a round in which this rank waits for others.
        self._waits: tuple[int, str] | None = None
        self._has_left = False

    def require_same_world(self) -> None:
        """Raise MismatchError if the group or its members have changed; ask no other rank."""
        self._part.require_same_world()

    def prepare(self) -> None:
        """Begin to open the store's part; in the trainer if a thread calls first, for the order."""
        self._part.prepare()

    def close(self) -> None:
        """Let what is left in the job's store be removed; no call may follow, on any rank."""
        if self._leaving is not None:
            self._leaving.wait(_LEAVING_S)
        # The others may look at this rank's keys until they come to another part.
        self._part.close()

    def abandon(self) -> None:
        """Close without a word to the other ranks, which may never come; no call may follow."""
        self.abort()
        self.close()

    @property
    def is_aborted(self) -> bool:
        return self._stopped.is_set()

    def abort(self) -> None:
        """From now on no call waits, nor one that is under way in another thread."""
        self._stopped.set()

    def cut_off(self) -> None:
        """From now on raise AbortedError in all calls, also those under way in other threads.

        Ranks that wait for this one get an error, as far as the store answers.
        """
        waits = self._waits
        self._cut_off.set()
        self._stopped.set()
        if waits is not None:
            self._leaving = begin(partial(self._leave, *waits))
        self._part.cut_off()

    def wait_again(self) -> None:
        if self.is_aborted:
            self._stopped = Latch()

    def decide(
        self,
        what: str,
        work: Callable[[], T] | Attempt,
        judge: Callable[[list[T]], Any] = lambda results: None,
        *,
        deadline: Deadline | None = None,
        grace_s: float = GRACE_S,
        kind: str = "",
        order: int | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Do a part on each rank, and have one verdict on all parts on every rank.

        ``what`` is an infinitive, for messages. ``work``, or what an Attempt was ``of``, is JSON or
        a :class:`Message`; ``judge``, a pure function, is called on the root with all of these, and
        returns JSON, or a :class:`PerRank`, which comes as a list of the common value and this
        rank's part. ``read``, such as :func:`shaped`, makes the result of that: what it cannot read
        is a MismatchError. The deadline is by default ``timeout_s`` from the end of the work on,
        and ``grace_s`` the longest wait for other ranks once some rank has failed. ``kind`` is what
        all ranks must do alike, where that is less than ``what``. Of calls of one kind for several
        iterations (``order``) those behind fail, and the others wait, if they are at least half.

        What fails on one rank is raised on all, late ones too: the error of a work or of the judge,
        a PeerLostError that names ranks that did not come and what they last did, or a
        MismatchError if the ranks are in different calls, or the process group has changed.
        """
        attempt = work if isinstance(work, Attempt) else Attempt.at(work)
        failure, result = attempt.take()
        mine = None if failure is None else Failure.of(failure)
        self.under_way = what
        try:
            self._part.require_same_world()
            deadline = deadline or Deadline.after(self.timeout_s)
            call = Call(what, mine, result, judge, deadline, grace_s, kind, order)
            return _outcome(what, *self._meet(call), read)
        except CheckpointingException as error:
            if failure is None or mine is None or isinstance(error, AbortedError):
                raise
            if isinstance(error, PeerLostError) and mine.text not in str(error):
                raise PeerLostError(f"could not {what}: {mine.text} Also: {error}") from failure
            raise error from failure
        finally:
            self.under_way = None
            # Else the errors would keep themselves by these variables.
            del failure, attempt, work

    def decide_end(self, what: str, end: CallEnd | None) -> bool:
        """Decide whether a call is over on all ranks; raise what it failed with on any."""

        def judge(ends: list[Any]) -> bool:
            if None in ends:
                return False
            failure = failure_of([CallEnd.from_json(end) for end in ends], self.global_ranks)
            if failure is not None:
                raise failure.error()
            return True

        return bool(self.decide(what, lambda: end and end.to_json(), judge))

    def commit(
        self,
        what: str,
        work: Callable[[], T],
        commit: Callable[[list[T]], Any],
        *,
        kind: str = "",
        order: int | None = None,
        timeout_s: float | None = None,
        on_failure: Callable[[], None] | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Decide that all ranks have done a part, do one thing on the root, and decide its result.

        The first failure is raised at once on all ranks. ``commit`` is called on the root with all
        results; a rank that is not told in time what came of it raises that it does not know.
        ``timeout_s`` is the time for the other ranks, and then for the root. ``on_failure`` has
        work that takes long raise anything: it is called in another thread once some rank has
        failed, or the store cannot be reached. Else as :meth:`decide`.
        """
        self._part.require_same_world()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        done, said = Attempt(), list[T]()

        def keep(results: list[T]) -> None:
            # Not added to: a rank that is aborted may judge again.
            said[:] = results

        attempt = self._worked(what, work, on_failure)
        deadline = Deadline.after(timeout_s)
        self.decide(what, attempt, keep, deadline=deadline, grace_s=0.0, kind=kind, order=order)
        if self.is_root:
            done = self._attempted(what, RESULT, lambda: Verdict.of(commit(said)))
        cause, verdict = done.take()
        if cause is not None:
            verdict = Verdict(failure=self._place.failed(what, Failure.of(cause)))
        return _outcome(what, self._tell(what, verdict, timeout_s), cause, read)

    def _worked(
        self, what: str, work: Callable[[], T], on_failure: Callable[[], None] | None
    ) -> Attempt:
        """Do this rank's part; its failure is that of another rank that has ended it."""
        if self._part.is_alone:
            return Attempt.at(work)
        over, looking = Latch(), None
        # It opens the part: else who has failed would wait for those at work.
        self._ask(self.rounds, what, lambda round_: round_.note(what))
        if on_failure is not None:
            looking = begin(partial(self._look_for_failure, what, over, on_failure))
        try:
            attempt = self._attempted(what, VERDICT, work)
        finally:
            over.set()
        if looking is not None and looking.wait() and attempt.failure is not None:
            try:
                # What has failed elsewhere is raised here too, and nothing else is reported.
                attempt.failure = None if looking.take_result() else attempt.failure
            except CheckpointingException as error:
                attempt.failure = error
        return attempt

    def _attempted(self, what: str, key: str, work: Callable[[], Any]) -> Attempt:
        """Do a part; what is no Exception is a verdict, since others need not wait for that."""
        try:
            return Attempt.at(work)
        except BaseException as error:
            # A fork that ends has not failed.
            if not (self._part.is_alone or self._part.is_fork):
                failed = Verdict(failure=self._place.failed(what, Failure.of(error)))
                number = self.rounds - (key == RESULT)

                def tell(round_: Round) -> None:
                    round_.give(failed, key)
                    if not self.is_root:
                        # It knows the verdict, which the root waits for.
                        round_.count_reader()

                with suppress(CheckpointingException):
                    self._ask(number, what, tell)
                if key == RESULT:
                    self._drain_readers(number)
                self.rounds = number + 1
            raise

    def _look_for_failure(self, what: str, over: Latch, on_failure: Callable[[], None]) -> bool:
        """Look now and then whether others have failed, as the next verdict says."""
        pause_s = _LOOK_S * max(1.0, self.world_size / _MANY)
        try:
            while True:
                given = self._ask(self.rounds, what, Round.verdict)
                if given is None and over.wait(pause_s):
                    return False
                if given is not None and not self._is_for_others(what, given):
                    return True
                self.rounds += given is not None
        finally:
            if not over.is_set():
                on_failure()

    def _tell(self, what: str, done: Verdict | None, waits_s: float) -> Verdict:
        """Tell what the root has done after a round, ``done``; the others wait for it."""
        number, until = self.rounds - 1, time.monotonic() + waits_s
        if done is None:
            heard = self._wait(number, what, lambda round_: [round_.hear(RESULT, until)], waits_s)
            if heard is None:
                self._ask(number, what, Round.count_reader)
            return (heard and heard[0]) or Verdict(failure=self._place.unknown(what, waits_s))
        if self._part.is_alone:
            return self._own(done)
        told = self._ask(number, what, lambda round_: round_.give(done, RESULT))
        self._drain_readers(number)
        return told

    def raise_hand(self) -> None:
        """Have :meth:`is_hand_raised` be true on all ranks from now on; waits for none of them."""
        if not self._part.is_alone:
            self._ask(self.rounds, "raise a hand", Round.raise_hand)

    def is_hand_raised(self) -> bool:
        """Return whether some rank has raised its hand, as the job's store says. May be polled."""
        if self._part.is_alone:
            return False
        return self._ask(self.rounds, "look for a hand", Round.is_hand_raised)

    def patience(self, what: str) -> Patience:
        return Patience(self.global_ranks[self.rank], what)

    def give_up(self, waited_s: float) -> None:
        """End a wait with no deadline in another thread: ranks that have not reported are lost."""
        if (waits := self._waits) is not None:
            number, what = waits
            self._ask(number, what, lambda round_: round_.give_up(what, waited_s))

    def leave(self, next_what: str) -> None:
        """Take part in nothing any more, and end the wait of all ranks, now or for the next."""
        number, what = self._waits or (self.rounds, next_what)
        self._has_left = True
        self._stopped.set()
        if not self._cut_off.is_set():
            self._leave(number, what)

    def _leave(self, number: int, what: str) -> None:
        def decide() -> None:
            # The others may wait for this rank to come here first.
            store = self._part.open(Latch(), Deadline.after(_LEAVING_S))
            verdict = Verdict(failure=self._place.left(what))
            self._round(store, number, StoreWait()).give(verdict)

        try:
            ask_store("leave the others", _LEAVING_S, decide)
        except CheckpointingException as error:
            logger.debug("%s", error)

    def awaits(self) -> str:
        """Return in words which ranks a call in another thread waits for; empty for none."""
        return "" if (waits := self._waits) is None else self._awaited(waits[0])

    def _meet(self, call: Call) -> Outcome:
        """Take part in the next round; return the verdict as this rank has it."""
        while True:
            if self._part.is_alone:
                self.rounds += 1
                own = {self.root: call.data or b""}
                judged, cause = judge_reports(call, [call.report()], own, self.global_ranks)
                return self._own(judged), cause
            # Before it counts: a round that no rank could begin has no number.
            with self._cut_off:
                self._part.open(self._stopped, call.deadline)
            number, deadline = self.rounds, call.deadline
            self.rounds += 1
            waits_s = deadline.left_s + deadline.timeout_s * AFTER_ROOT + call.grace_s
            outcome = self._wait(number, call.what, lambda round_: round_.take_part(call), waits_s)
            if outcome is None and self._has_left:
                raise PeerLostError(f"could not {call.what}: this rank has left")
            if outcome is None:
                outcome = self._ask(number, call.what, lambda round_: round_.end_now(call))
            verdict, cause = outcome
            if not self._is_for_others(call.what, verdict):
                break
        if verdict.failure is not None and not verdict.late:
            # An error may end this process, and with it the store.
            self._drain_readers(number)
        failure, is_late = verdict.failure, self._place.me in verdict.late
        if failure is not None and is_late and failure.kind == PeerLostError.__name__:
            verdict = Verdict(failure=self._place.too_late(call.what, verdict.late))
        return verdict, cause

    def _is_for_others(self, what: str, verdict: Verdict) -> bool:
        """Return whether the round was one of another call, which others made, and gave up."""
        return self._place.me in verdict.late and verdict.given_up != what

    def _own(self, verdict: Verdict) -> Verdict:
        parts = verdict.parts or {}
        return Verdict.received(verdict.to_json(), lambda: parts.get(self.root))

    def _drain_readers(self, number: int) -> None:
        """On the root: return once all ranks have read the verdict of a round, or soon."""
        if not self.is_root:
            return
        what = "wait until the other ranks have read the verdict"
        # A store that cannot be reached is not waited for.
        with suppress(CheckpointingException):
            self._ask(number, what, lambda round_: wait_until(round_.is_read_by_all, _DRAIN_S))

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
        self, number: int, what: str, call: Callable[[Round], T], waits_s: float, stopped: Latch
    ) -> T | None:
        with self._cut_off:
            raise_if_aborted()
            store = self._part.open(self._stopped)
            if waits_s == inf:
                # In a thread behind training, which has nothing else to do.
                with store_errors(what), suppress(AbandonedError):
                    return call(self._round(store, number, StoreWait(stopped)))
                return None
            # However long the wait for other ranks, the store needs its time.
            limit_s = waits_s + self._store_timeout_s + 2 * AFTER_FIRST_S
            return ask_until_stopped(
                *(what, limit_s, lambda wait: call(self._round(store, number, wait))),
                *(stopped, lambda: self._awaited(number), self.patience(what)),
            )

    def _awaited(self, number: int) -> str:
        def look() -> str:
            return self._round(self._part.open(self._stopped), number, StoreWait()).awaited()

        try:
            return ask_store("see which ranks are waited for", _LOOKING_S, look)
        except CheckpointingException:
            return "the job's store, which does not answer"

    def _round(self, store: Store, number: int, wait: StoreWait) -> Round:
        return Round(store, self._place, number, partial(self._part.fetch, wait=wait))


def _cut_off(name: str) -> AbortedError:
    return AbortedError(
        f"what the ranks decide as {name!r} was aborted on this one, and the others may have come "
        f"further. Checkpoints saved before are as they were"
    )


def _outcome(
    what: str,
    verdict: Verdict,
    cause: BaseException | None,
    read: Callable[[Any], Any] | None = None,
) -> Any:
    if verdict.failure is not None:
        raise verdict.failure.error() from cause
    if read is None:
        return verdict.value
    with store_errors(what):
        return read(verdict.value)


class refused_together:
    """Context of a constructor: what it raises on this rank, the others raise where they meet.

    The outermost of several acts. No generator, for the reason that ``storage_errors`` has.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._name, self._group, self._timeout_s = name, process_group, timeout_s

    def __enter__(self) -> None:
        _nested.depth = getattr(_nested, "depth", 0) + 1

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        timeout_s = self._timeout_s
        try:
            if _nested.depth == 1 and isinstance(error, Exception):
                # It may be what is refused.
                is_time = isinstance(timeout_s, int | float) and 0 < timeout_s < inf
                waits_s = min(timeout_s, _LONGEST_S) if is_time and timeout_s else _LONGEST_S
                # Without the ranks nobody waits for this one. What they say is this error, or that
                # they did not come.
                with suppress(CheckpointingException):
                    ranks, refused = Ranks(self._name, self._group, waits_s), Attempt()
                    refused.failure = error
                    try:
                        ranks.decide("begin together", refused, kind=REFUSED)
                    finally:
                        ranks.close()
        finally:
            _nested.depth -= 1
            # Else the error would keep itself by this variable.
            del error, trace


def timeout_in(given: Mapping[str, Any]) -> Any:
    """Return the deadline among options that may be refused; ``None`` for the usual one."""
    return given.get("timeout_s", given.get("timeout"))
