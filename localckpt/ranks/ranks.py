"""How the ranks of a job decide together: each reports, one of them judges, all have the verdict.

Reports and verdicts travel over the key-value store that the process group was made with, never
over a device, so deciding costs no GPU synchronisation and needs no gloo group. Messages are JSON;
nothing that a peer sends is executed. This is not a transport for shards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.failure_texts import ranks_named, said_by, short, with_short_texts
from localckpt.ranks.failure import Attempt, Failure
from localckpt.ranks.job_store import Group, StorePart, ask_store
from localckpt.ranks.round import Round, remove_rounds
from localckpt.ranks.values import if_there
from localckpt.threads import Latch

__all__ = ["GRACE_S", "Ranks"]

T = TypeVar("T")
V = TypeVar("V")

# Once a rank has failed, the others get so long to say why they did, too.
GRACE_S = 10.0

# The root gives up first; then the first of those that waited for it in vain looks why, and the
# others wait for what it finds.
_AFTER_ROOT, _AFTER_FIRST_S = 0.1, 2.0
# A wait for other ranks ends at the deadline, and for the store not much later.
_STORE_TIMES = 2
# Texts in a larger report are cut; one that still takes more cannot be sent.
_LARGE_NBYTES, _MOST_NBYTES = 1 << 20, 16 << 20
_NAMED = 16

# All answers to a question are one number in the store, which is read without waiting and in one
# round trip: a no adds 2 to it, the yes that ends it adds 1.
_NO = 2
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.02


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How a round ended: with a value, or with what went wrong, which late ranks hear as well.

    Attributes:
        value: What was decided.
        failure: Why nothing was.
        late: The ranks that were not waited for any longer.
    """

    value: Any = None
    failure: Failure | None = None
    late: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        return [self.value, self.failure and self.failure.to_json(), list(self.late)]

    @classmethod
    def from_json(cls, fields: list[Any]) -> _Verdict:
        value, failure, late = fields
        return cls(value, failure and Failure.from_json(failure), tuple(late))


def _nothing(_: list[Any]) -> None:
    return None


def _all(results: list[Any]) -> list[Any]:
    return results


# The rank of the group that judges.
_ROOT = 0


class Ranks:
    """Decisions of the ranks of one process group.

    All ranks of the group create theirs with the same name in the same order, and then call the
    same methods in the same order. The first call, whichever it is, waits until all ranks have
    created theirs; :attr:`is_open` tells whether it would. Without torch.distributed it is a world
    of one.

    Args:
        name: Keeps these messages apart from those of others.
        process_group: The ranks that take part; ``None`` for all.
        timeout_s: Deadline of each call, in seconds.
        ranks: Those that take part, where they have no process group.
        group: The ranks and the store, where they are known already.

    Attributes:
        rank: This process's rank in the group.
        global_ranks: The ranks of the group, as ranks of the job.
        in_a_hurry: Whether no call waits; see :meth:`stop_waiting`.
        hint: What to look at first when ranks do not come, as the end of the error message.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        *,
        ranks: Sequence[int] | None = None,
        group: Group | None = None,
    ) -> None:
        self.set_timeout(timeout_s)
        self.hint = ""
        self.in_a_hurry = False
        self._interrupted = Latch()
        self._rounds = 0
        self._counters: set[str] = set()
        group = group or Group.of(process_group, ranks)
        self.rank, self.global_ranks = group.rank, list(group.ranks)
        self.world_size = len(group.ranks)
        self._part = StorePart(name, group, timeout_s, remove_keys=self._remove_keys)

    @property
    def is_open(self) -> bool:
        """Whether a call need not wait until all ranks have created theirs."""
        return self._part.is_open

    def close(self) -> None:
        """Let what is left in the job's store be removed; no call may follow, on any rank."""
        if not self.in_a_hurry:
            self._part.close()

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline for good; ``timeout_s`` may be set for a single call."""
        self.timeout_s = self._usual_s = timeout_s

    def stop_waiting(self) -> None:
        """From now on no call waits, nor one that is under way in another thread."""
        self.in_a_hurry = True

    def wait_again(self) -> None:
        """Undo :meth:`stop_waiting`."""
        self.in_a_hurry = False

    def decide(
        self,
        what: str,
        work: Callable[[], T],
        judge: Callable[[list[T]], V],
        *,
        grace_s: float = GRACE_S,
    ) -> V:
        """Do a part on each rank, and have one verdict on all parts on every rank.

        Args:
            what: What the ranks do together, as an infinitive, for messages.
            work: This rank's part; its result, anything that JSON can carry, goes to the root.
            judge: A pure function, called on the root with the results in rank order. What it
                returns is JSON, too.
            grace_s: Once some rank has failed, how long the others are waited for, in seconds.

        Returns:
            What ``judge`` returned.

        Raises:
            CheckpointingException: ``work`` failed on some rank, or ``judge``: the same on all
                ranks, of the class that was raised where that is one of localckpt's.
            PeerLostError: Some rank did not come in time; it is raised on all ranks, late ones
                too. It names them, and what each of them last did.
            MismatchError: The ranks are in different calls, or the job's process group is another
                one than when this was made.
        """
        result: T | None = None
        with Attempt() as attempt:
            result = work()
        verdict: V = self.settle(what, attempt, result, judge, grace_s=grace_s)
        return verdict

    def settle(
        self,
        what: str,
        attempt: Attempt,
        result: Any = None,
        judge: Callable[[list[Any]], Any] = _nothing,
        *,
        grace_s: float = GRACE_S,
        others_s: float = 0.0,
    ) -> Any:
        """As :meth:`decide`, for work that is done.

        Args:
            what, grace_s: As for :meth:`decide`.
            judge: As for :meth:`decide`; by default there is nothing to judge.
            attempt: How it ended here.
            result: What came of it, if it succeeded.
            others_s: How much longer than usual to wait: others may be in the middle of work with
                a deadline of its own, and are to say how it ended.
        """
        failure, attempt.failure = attempt.failure, None
        said = None if failure is None else Failure.of(failure).to_json()
        try:
            self._part.require_same_world()
            verdict = self._meet(what, [short(what), said, result], judge, grace_s, others_s)
            return verdict.value
        except CheckpointingException as error:
            if failure is None or said is None:
                raise
            if isinstance(error, PeerLostError) and said[1] not in str(error):
                raise PeerLostError(f"could not {what}: {said[1]} Also: {error}") from failure
            raise error from failure
        finally:
            # Else the errors would keep themselves by these variables.
            del failure, attempt

    def share(self, what: str, attempt: Attempt, result: Any) -> list[Any]:
        """As :meth:`settle`, and every rank gets all results, in rank order: for short ones."""
        results: list[Any] = self.settle(what, attempt, result, _all)
        return results

    def gather(self, what: str, record: Any) -> list[Any]:
        """Give every rank's record to every rank: for few ranks, or short records.

        Args:
            what: What is being done, for the error message of whoever waits in vain.
            record: Anything that JSON can carry.

        Returns:
            The records in rank order.

        Raises:
            PeerLostError, MismatchError: As :meth:`decide`.
        """
        return self.share(what, Attempt(), record)

    def barrier(self, what: str) -> None:
        """Return once every rank has called it; raises as :meth:`decide`."""
        self.settle(what, Attempt())

    def post_failure(self, what: str, failure: BaseException) -> None:
        """Report a failure of this rank's part of a decision, without waiting for the verdict."""
        if self._part.is_alone:
            return
        self._open()
        number = self._next_round()
        report = _sendable(what, [short(what), Failure.of(failure).to_json(), None])
        self._ask(what, lambda store: self._round(number, store).report(report, wakes_root=True))

    def report(self, counter: str) -> None:
        """Add this rank to a named counter; see :meth:`reported_by_all`."""
        self._add(f"report {counter}", f"count/{counter}", 1)

    def reported_by_all(self, counter: str) -> bool:
        """Whether every rank has reported. Never waits; for a world of one always true."""
        return self._add(f"poll {counter}", f"count/{counter}", 0) >= self.world_size

    def answer(self, question: str, yes: bool, *, noes_before: int = 0) -> None:
        """On rank 0: say no to a question any number of times, then yes. Never waits.

        Args:
            question: The question.
            yes: The answer.
            noes_before: How often it was no before, without having been said.
        """
        number = noes_before * _NO + (1 if yes else _NO)
        self._add(f"answer {question}", f"count/{question}", number)

    def is_answered(self, question: str) -> bool:
        """Whether rank 0 has answered a question so far, yes or no. Never waits."""
        return self._add(f"poll {question}", f"count/{question}", 0) > 0

    def hear_answer(self, question: str, number: int) -> bool:
        """What rank 0 answers to a question, or has answered, for the ``number``-th time from 1.

        A yes is the last answer, and holds for all numbers after it, too.

        Raises:
            PeerLostError: Rank 0 did not say in time.
        """
        phase = f"{question} ({number})"
        return self._ask(phase, partial(self._hear, f"count/{question}", number, phase))

    def forget(self, counter: str) -> None:
        """Drop a counter or question that every rank is done with (called on one rank)."""
        if not self._part.is_alone:
            self._ask(f"forget {counter}", partial(self._drop_counter, f"count/{counter}"))

    def _add(self, what: str, counter: str, number: int) -> int:
        if self._part.is_alone:
            # A world of one has always reported.
            return self.world_size
        return self._ask(what, partial(self._add_to, counter, number))

    def _meet(
        self,
        what: str,
        report: list[Any],
        judge: Callable[[list[Any]], Any],
        grace_s: float,
        others_s: float,
    ) -> _Verdict:
        if self._part.is_alone:
            verdict = self._judged(what, [json.loads(json.dumps(report))], judge)
        else:
            # Before it counts: a round that no rank could begin has no number.
            self._open()
            number, report = self._next_round(), _sendable(what, report)
            patience_s = self.timeout_s + others_s
            if self.rank == _ROOT:
                verdict = self._hold(number, what, report, judge, patience_s, grace_s)
            else:
                verdict = self._ask(
                    what,
                    lambda store: self._attend(store, number, what, report, patience_s),
                    longer_s=others_s,
                )
        if verdict.failure is None:
            return verdict
        me = self.global_ranks[self.rank]
        if me in verdict.late and verdict.failure.kind == PeerLostError.__name__:
            raise PeerLostError(self._describe_too_late(what, verdict.late))
        raise verdict.failure.error()

    def _hold(
        self,
        number: int,
        what: str,
        report: list[Any],
        judge: Callable[[list[Any]], Any],
        patience_s: float,
        grace_s: float,
    ) -> _Verdict:
        """The root's part of a round."""
        began = time.monotonic()

        def collect(store: Store) -> list[Any] | _Verdict:
            meeting = self._round(number, store)
            meeting.report(report, wakes_root=report[1] is not None)
            until = began + patience_s
            if meeting.wait_for_reports(until, lambda: time.monotonic() + grace_s):
                meeting.forget_before()
                return meeting.reports()
            waited_s = time.monotonic() - began
            return self._verdict_on_missing(meeting, what, min(waited_s, patience_s))

        collected = self._ask(what, collect, longer_s=patience_s - self.timeout_s + grace_s)
        if isinstance(collected, _Verdict):
            verdict = collected
        else:
            verdict = self._judged(what, collected, judge)
        decide = verdict.to_json()
        return _Verdict.from_json(
            self._ask(what, lambda store: self._round(number, store).decide(decide))
        )

    def _attend(
        self, store: Store, number: int, what: str, report: list[Any], patience_s: float
    ) -> _Verdict:
        """The part of all other ranks."""
        began, meeting = time.monotonic(), self._round(number, store)
        meeting.report(report, wakes_root=report[1] is not None)
        heard = meeting.hear(began + patience_s * (1 + _AFTER_ROOT))
        if heard is None and (self._is_stopped() or meeting.is_first_to_ask()):
            waited_s = min(time.monotonic() - began, patience_s)
            found = self._verdict_on_missing(meeting, what, waited_s)
            return _Verdict.from_json(meeting.decide(found.to_json()))
        if heard is None:
            heard = meeting.hear(time.monotonic() + _AFTER_FIRST_S)
        if heard is None:
            text = self._describe_late([_ROOT], {}, what, patience_s)
            return _Verdict(failure=Failure(PeerLostError.__name__, text))
        return _Verdict.from_json(heard)

    def _judged(self, what: str, reports: list[Any], judge: Callable[[list[Any]], Any]) -> _Verdict:
        """What the root decides when all have reported."""
        ranks = self.global_ranks
        # Numbers tell which one of its kind a call is; whoever judges compares those.
        if len({re.sub(r"\d+", "", said) for said, _, _ in reports}) > 1:
            at = said_by({rank: r[0] for rank, r in zip(ranks, reports, strict=True)})
            text = (
                f"the ranks do not do the same: {at}. All "
                f"ranks must make the same calls in the same order. What was saved before stands"
            )
            return _Verdict(failure=Failure(MismatchError.__name__, text))
        if (failure := self._joint_failure(what, reports)) is not None:
            return _Verdict(failure=failure)
        try:
            return _Verdict(json.loads(json.dumps(judge([result for _, _, result in reports]))))
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            return _Verdict(failure=Failure.of(error))

    def _joint_failure(self, what: str, reports: list[Any]) -> Failure | None:
        failures = {
            rank: Failure.from_json(report[1])
            for rank, report in zip(self.global_ranks, reports, strict=True)
            if report is not None and report[1] is not None
        }
        return Failure.joint(what, failures) if failures else None

    def _verdict_on_missing(self, meeting: Round, what: str, waited_s: float) -> _Verdict:
        """What is decided when not all have reported in time."""
        reports = meeting.reports()
        late = [rank for rank, report in enumerate(reports) if report is None] or [_ROOT]
        failure = self._joint_failure(what, reports)
        if failure is None:
            named = late[:_NAMED]
            last = {rank: meeting.last_report(rank) for rank in named}
            seen = {rank: said[1][0] for rank, said in last.items() if said is not None}
            text = self._describe_late(late, seen, what, waited_s)
            failure = Failure(PeerLostError.__name__, text)
        return _Verdict(failure=failure, late=tuple(self.global_ranks[rank] for rank in late))

    def _describe_late(
        self, late: Sequence[int], seen: dict[int, str], what: str, waited_s: float
    ) -> str:
        told = [
            f"rank {self.global_ranks[rank]} (last seen: {seen.get(rank, 'not seen yet')})"
            for rank in late[:_NAMED]
        ]
        told += [f"{len(late) - _NAMED} more"] * (len(late) > _NAMED)
        return (
            f"rank {self.global_ranks[self.rank]} waited {round(waited_s, 2):g} s to {what}, and "
            f"{', '.join(told)} did not come. What was saved before stands. If the ranks are alive "
            f"but slow, give the manager a longer timeout; else restart the job.{self.hint}"
        )

    def _describe_too_late(self, what: str, late: Sequence[int]) -> str:
        me = self.global_ranks[self.rank]
        others = ranks_named(rank for rank in self.global_ranks if rank != me)
        missing = [rank for rank in late if rank != me]
        named = ", ".join(f"rank {rank}" for rank in missing[:_NAMED])
        nor = f", and {named} had not come either" if missing else ""
        return (
            f"rank {me} came too late to {what}: the others ({others}) were not all waiting any "
            f"more{nor}. What was saved before stands. If this rank is alive but slow, give the "
            f"manager a longer timeout; else restart the job."
        )

    def _round(self, number: int, store: Store) -> Round:
        stopped = self._is_stopped

        def await_key(key: str, until: float) -> bool:
            return self._part.await_key(key, until, stopped)

        return Round(store, number, self.rank, self.world_size, await_key)

    def _next_round(self) -> int:
        number = self._rounds
        self._rounds += 1
        return number

    def _open(self) -> Store:
        return self._part.open(lambda: self.in_a_hurry)

    def _is_stopped(self) -> bool:
        return self.in_a_hurry or self._interrupted.is_set()

    def _ask(self, what: str, call: Callable[[Store], T], longer_s: float = 0.0) -> T:
        """Talk to the job's store, which waits for ever for a host that cannot be reached."""
        # However little is left for this wait, the store needs its time.
        store = self._open()
        limit_s = _STORE_TIMES * max(self._usual_s, self.timeout_s) + longer_s + _AFTER_FIRST_S
        # Of this call alone: one that is interrupted must not go on in its thread.
        interrupted = self._interrupted = Latch()
        return ask_store(what, limit_s, lambda: call(store), interrupted.set)

    def _remove_keys(self, store: Store, rank: int) -> None:
        """Delete what a rank has left in a part of the store."""
        remove_rounds(store, rank, self.world_size)
        if rank == 0:
            for counter in json.loads(if_there(store, "counters") or b"[]"):
                store.delete_key(counter)
            store.delete_key("counters")

    # Counters, of which all ranks know by number only.

    def _add_to(self, counter: str, number: int, store: Store) -> int:
        if self.rank == 0 and counter not in self._counters:
            # For whoever removes what this rank leaves, should it die now.
            self._counters.add(counter)
            store.set("counters", json.dumps([*self._counters]))
        return int(store.add(counter, number))

    def _drop_counter(self, counter: str, store: Store) -> None:
        store.delete_key(counter)
        self._counters.discard(counter)
        store.set("counters", json.dumps([*self._counters]))

    def _hear(self, key: str, number: int, what: str, store: Store) -> bool:
        began, nap_s = time.monotonic(), _SHORTEST_NAP_S
        while True:
            noes, yes = divmod(int(store.add(key, 0)), _NO)
            if yes or noes >= number:
                return noes < number
            waited_s = time.monotonic() - began
            if self._is_stopped() or waited_s > self.timeout_s:
                waited_s = min(waited_s, self.timeout_s)
                meeting = self._round(self._rounds, store)
                last = meeting.last_report(0)
                seen = {} if last is None else {0: last[1][0]}
                raise PeerLostError(self._describe_late([0], seen, what, waited_s))
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def _sendable(what: str, report: list[Any]) -> list[Any]:
    """A report as it is sent: in one that is large texts are cut, and none is larger than that."""
    if (nbytes := len(json.dumps(report))) > _LARGE_NBYTES:
        report = with_short_texts(report)
        nbytes = len(json.dumps(report))
    if nbytes <= _MOST_NBYTES:
        return report
    text = (
        f"could not {what}: this rank has {nbytes} bytes to tell the others, and {_MOST_NBYTES} "
        f"can be sent. What was saved before stands"
    )
    return [report[0], Failure(MismatchError.__name__, text).to_json(), None]
