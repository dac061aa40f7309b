"""Agreement of all ranks, behind training, on the ends of calls, which take effect in one poll.

A thread of each rank reports the calls that are over there, in two rounds. In the first the root
judges how they ended. In the second each rank promises not to pass a certain poll before it has
read the verdict, and all ranks act in the first poll that none of them can have passed. So a poll
counts itself and compares numbers; it waits only if it would break its rank's promise.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Any

import torch.distributed as dist

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.ranks.deadline import Deadline, Patience, begin, store_is_silent
from localckpt.ranks.failure import CallEnd, Failure, failure_of
from localckpt.ranks.ranks import Ranks
from localckpt.threads import Ending, Latch, Task

_NEVER = sys.maxsize
# So many polls may pass while the ranks fix the one in which they act, unless that is urgent.
_MARGIN = 1
# The root gives up first, so that it is the one to say who did not come.
_AFTER_ROOT = 1.1
_LAST_WAIT_S = 3.0
_AGREE = "agree on the ends of async calls"
_LEAVING_S = 1.0


@dataclass(slots=True, eq=False)
class Watched:
    """A call whose end all ranks agree on; its functions are those of an ``AsyncCall``.

    It is watched ``since`` a poll, and ``may_stand`` if other ranks may act on it without this one.
    """

    number: int
    name: str
    ending: Ending
    report: Callable[[], Any] | None = None
    judge: Callable[[list[Any]], Any] | None = None
    iteration: int | None = None
    is_urgent: Callable[[Any], bool] | None = None
    since: int = 0
    may_stand: bool = False

    @property
    def what(self) -> str:
        if self.iteration is None:
            return f"agree on async call {self.number} ({self.name})"
        return f"agree on the save of iteration {self.iteration}"

    def end(self, offset: int = 0) -> CallEnd:
        return CallEnd.of(
            *(self.number - offset, self.name, self.ending.error, self.report, self.iteration)
        )


@dataclass(frozen=True, slots=True)
class CallVerdict:
    """Verdict of all ranks on one call, on which they act in the poll that is ``due``."""

    number: int
    due: int = 0
    failure: Failure | None = None
    value: Any = None
    # The others are at an earlier call, which failed; this one is still to come.
    is_ahead: bool = False
    # The ranks did not come together.
    is_lost: bool = False
    # No other rank was asked, so nothing was judged.
    is_own: bool = False
    # Ranks saved different iterations, or one by different numbers: some rank made a call alone,
    # and no call that any rank has made so far can be matched.
    is_mismatched: bool = False


def judge_ends(
    watched: Watched, ends: Sequence[CallEnd], ranks: Sequence[int]
) -> tuple[Failure | None, Any]:
    """Judge one call that is over on all ranks: the failure that all raise, or the value."""
    failure = failure_of(ends, ranks)
    if failure is not None or watched.judge is None:
        return failure, None
    try:
        return None, watched.judge([end.value for end in ends])
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return Failure.of(error), None


class Watch:
    """The agreement of one rank with the others on its calls, one after another.

    All ranks watch the same calls in the same order, and poll equally often, or at most once in a
    ``step`` of the training loop, if that is counted. The trainer calls everything here; whatever
    goes over the job's store does so in a thread that lives while a call is watched.
    """

    def __init__(
        self,
        timeout_s: float,
        process_group: dist.ProcessGroup | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._process_group = process_group
        self._known_ranks = ranks
        self._lock = threading.Lock()
        # Calls that the thread agrees on, and those that it does from the next poll on.
        self._calls: deque[Watched] = deque()
        self._added: deque[Watched] = deque()
        self._verdicts: deque[CallVerdict] = deque()
        self._thread: Task[None] | None = None
        self._has_left = False
        # The polls so far, and the one that the trainer does not pass before the next verdict.
        self._polls = 0
        self._limit = _NEVER
        self._news = Latch()
        self.has_lost_ranks = False
        self.step: int | None = None
        # Number of the first call since the last mismatch.
        self._offset = 0
        self._is_mismatched = False

    def join(self) -> None:
        """Find the other ranks: the process group may be made after this object is."""
        if self._known_ranks is None:
            self._known_ranks = Ranks("async calls", self._process_group, self._timeout_s)
        self._require_same_world()

    def patience(self, what: str) -> Patience:
        return self._ranks.patience(what)

    def add(self, call: Watched) -> None:
        """Add a call, which the ranks agree on from the next poll on, once it is over here."""
        if not self._is_alone:
            self._added.append(call)

    def begin_anew(self, number: int) -> None:
        """Forget all calls after a mismatch, on all ranks, and count from this rank's next."""
        with self._lock:
            self._added.clear()
            self._calls.clear()
            self._verdicts.clear()
            self._offset, self._is_mismatched = number, False

    def poll(self, blocking: bool) -> None:
        """Count a poll, which waits if all ranks may act in it; ``blocking`` as on all ranks."""
        self._require_same_world()
        if self._is_alone:
            return
        self._follow_added()
        self._polls = self._polls + 1 if self.step is None else self.step
        if self._polls > self._limit and not blocking:
            try:
                self._await(lambda: self._polls <= self._limit, time.monotonic())
            except CheckpointingException:
                self._limit = _NEVER
                raise

    def verdict(
        self, call: Watched, blocking: bool, no_dist: bool, await_own: Callable[[float], None]
    ) -> CallVerdict | None:
        """The verdict on the oldest call; ``None`` while it is not one that all ranks act on.

        ``await_own`` waits for the work of this rank, since a moment by the monotonic clock.
        """
        start = time.monotonic()
        if no_dist or self._is_alone:
            if blocking:
                await_own(start)
            return self._own_verdict(call) if call.ending.done() else None
        if not blocking:
            return self._due_verdict(call.number)
        self._follow_added()
        await_own(start)
        try:
            return self._await_verdict(call.number, start)
        except CheckpointingException as error:
            return CallVerdict(call.number, failure=Failure.of(error), is_lost=True)

    def coming(self, call: Watched) -> CallVerdict | None:
        """The verdict on a call, also if it takes effect in a later poll; asks no other rank."""
        if self._is_alone:
            return self._own_verdict(call) if call.ending.done() else None
        return self._known_verdict(call.number)

    def cut_off(self) -> None:
        """End all waits with an error, and take part in nothing any more."""
        self._has_left = True
        if self._known_ranks is not None:
            self._known_ranks.cut_off()
        self._wake()

    def leave(self) -> None:
        """Take part in nothing any more: who waits for this rank gets an error, the trainer too."""
        self._has_left = True
        self._wake()
        if calls := (*self._calls, *self._added):
            self._ranks.leave(calls[0].what)

    def close(self) -> None:
        """End the thread. No rank watches anything any more, or this one has left."""
        if self._calls:
            self.leave()
        thread = self._thread
        if thread is None or thread.wait(_LEAVING_S):
            # Nobody else keeps what their requests hold.
            self._calls.clear()
            self._added.clear()
        if self._known_ranks is not None:
            self._known_ranks.close()

    @property
    def _ranks(self) -> Ranks:
        assert self._known_ranks is not None, "a call was added"
        return self._known_ranks

    @property
    def _is_alone(self) -> bool:
        return self._ranks.world_size == 1

    def _require_same_world(self) -> None:
        try:
            self._ranks.require_same_world()
        except MismatchError:
            self.has_lost_ranks = True
            raise

    def _follow_added(self) -> None:
        self._ranks.prepare()
        while self._added:
            self._follow(self._added.popleft())

    def _follow(self, call: Watched) -> None:
        if self.step is not None:
            self._polls = self.step
        call.since = self._polls if self.step is None else 0
        with self._lock:
            self._calls.append(call)
            if self._thread is None and not self._is_mismatched:
                self._thread = begin(self._run)

    def _own_verdict(self, call: Watched) -> CallVerdict:
        me = self._ranks.global_ranks[self._ranks.rank]
        if self._added and self._added[0] is call:
            self._added.popleft()
        if self._is_alone:
            failure, value = judge_ends(call, [call.end()], [me])
            return CallVerdict(call.number, failure=failure, value=value)
        # Whoever judges needs the ends on all ranks.
        end = CallEnd.of(call.number, call.name, call.ending.error)
        return CallVerdict(call.number, failure=failure_of([end], [me]), is_own=True)

    def _due_verdict(self, number: int) -> CallVerdict | None:
        """The verdict on this rank's oldest call, if all ranks act on it in this poll."""
        verdicts = self._verdicts
        # Those on calls that this rank has decided alone are void.
        while verdicts and verdicts[0].number < number:
            verdicts.popleft()
        return verdicts.popleft() if verdicts and verdicts[0].due <= self._polls else None

    def _known_verdict(self, number: int) -> CallVerdict | None:
        return next((v for v in tuple(self._verdicts) if v.number >= number), None)

    def _await_verdict(self, number: int, start: float) -> CallVerdict:
        """Wait for the verdict on the oldest call, for which the waits began at ``start``."""
        self._await(lambda: self._known_verdict(number) is not None, start)
        while (verdict := self._verdicts.popleft()).number < number:
            continue
        return verdict

    def _await(self, is_there: Callable[[], bool], start: float) -> None:
        """Wait for the thread, and end the round that it is in when the time is over."""
        timeout_s = self._timeout_s * (1.0 if self._ranks.is_root else _AFTER_ROOT)
        if self._news_until(is_there, start + timeout_s):
            return
        self._ranks.give_up(min(time.monotonic() - start, self._ranks.timeout_s))
        if not self._news_until(is_there, time.monotonic() + _LAST_WAIT_S):
            why = f"not for {time.monotonic() - start:.1f} s"
            raise store_is_silent("agree on the async calls", why)

    def _news_until(self, is_there: Callable[[], bool], until: float) -> bool:
        patience = self._ranks.patience("finalize async calls")
        while True:
            # Before the look: what comes after that ends the wait.
            news = self._news
            if is_there():
                return True
            if self._has_left:
                raise PeerLostError("this rank has given up its async calls: its queue was aborted")
            next_s = patience.left_s(lambda: self._ranks.awaits() or "its own calls")
            if not news.wait(min(until - time.monotonic(), next_s)) and time.monotonic() >= until:
                return is_there()

    # All that follows runs in the thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._has_left or self._is_mismatched or not self._calls:
                    self._thread = None
                    return
            self._calls[0].ending.wait()
            if not self._has_left:
                self._agree()

    def _agree(self) -> None:
        """Agree on the calls that are over on all ranks; on one at least."""
        over = list(takewhile(lambda call: call.ending.done(), tuple(self._calls)))
        # The numbers are compared by the judge.
        what, since = over[0].what, over[0].since
        try:
            ends = [call.end(self._offset).to_json() for call in over]
            judged = self._agreed(what, ends, lambda reports: self._judge(over, reports))
            for call in over:
                call.may_stand = True
            due = 0
            # Polls of ranks that began to count them at different calls cannot be compared.
            if self.step is not None or not judged[0][3]:
                is_urgent = any(
                    call.is_urgent is not None and failure is None and call.is_urgent(value)
                    for call, (_, failure, value, _) in zip(over, judged, strict=False)
                )
                promise = self._promise(0 if is_urgent else _MARGIN) - since
                due = since + 1 + self._agreed(what, promise, max)
        except Exception as error:  # noqa: BLE001 - raised by the next poll
            self._publish([CallVerdict(over[0].number, failure=Failure.of(error), is_lost=True)])
            return
        self._publish(
            [
                CallVerdict(
                    call.number,
                    due,
                    None if failure is None else Failure.from_json(failure),
                    value,
                    is_ahead=not is_mismatched and call.number - self._offset > oldest,
                    is_mismatched=is_mismatched,
                )
                for call, (oldest, failure, value, is_mismatched) in zip(over, judged, strict=False)
            ]
        )

    def _agreed(self, what: str, result: Any, judge: Callable[[list[Any]], Any]) -> Any:
        forever = Deadline(inf, inf)
        return self._ranks.decide(
            what, lambda: result, judge, deadline=forever, grace_s=0.0, kind=_AGREE
        )

    def _judge(self, over: list[Watched], reports: list[list[Any]]) -> list[list[Any]]:
        """The verdicts on the calls that are over on all ranks, up to one that is not the same."""
        verdicts: list[list[Any]] = []
        for call, *fields_by_rank in zip(over, *reports, strict=False):
            ends = [CallEnd.from_json(fields) for fields in fields_by_rank]
            failure, value = judge_ends(call, ends, self._ranks.global_ranks)
            oldest = min(end.number for end in ends)
            iterations = {end.iteration for end in ends}
            # The same save by another number: a rank has missed a call that it knows nothing of.
            is_missed = iterations != {None} and any(end.number > oldest for end in ends)
            is_mismatched = len(iterations) > 1 or is_missed
            judged = [oldest, None if failure is None else failure.to_json(), value, is_mismatched]
            verdicts.append(judged)
            if is_mismatched or any(end.number > oldest for end in ends):
                break
        return verdicts

    def _promise(self, margin: int = _MARGIN) -> int:
        """Fix the poll that the trainer does not pass before the verdict, so many from now."""
        # The trainer counts a poll and then looks at the limit. So if the count is below the limit
        # after the limit was set, the trainer has seen it, or will.
        while True:
            limit = self._limit = self._polls + margin
            if self._polls <= limit:
                return limit

    def _publish(self, verdicts: list[CallVerdict]) -> None:
        with self._lock:
            self._is_mismatched = any(verdict.is_mismatched for verdict in verdicts)
            for verdict in verdicts:
                if not verdict.is_ahead:
                    self._calls.popleft()
            self._verdicts.extend(verdicts)
            self._limit = _NEVER
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, Latch()
        news.set()
