"""The agreement of all ranks on how the calls of one queue ended, the oldest first.

Several ranks agree behind training (:mod:`localckpt.ranks.watch`); a rank that is alone, or that
asks no other, judges by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from localckpt.errors import MismatchError, PeerLostError
from localckpt.ranks.ends import CallEnd, failure_of
from localckpt.ranks.failure import Failure
from localckpt.ranks.patience import Patience
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.watch import Verdict, Watch, Watched, judge_ends

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Agreement"]


class Agreement:
    """The part of one rank.

    Args:
        process_group: The ranks that agree; ``None`` for all.
        timeout_s: The longest wait for them, in seconds.

    Attributes:
        is_under_way: Whether the ranks are agreeing. It stays so after an interrupt: nobody knows
            then whether this poll counts on this rank.
        has_lost_ranks: Whether some rank did not come.
        step: As for :class:`Watch`.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._ranks: Ranks | None = None
        # None for a rank that is alone, as long as no call was scheduled, too.
        self._watch: Watch | None = None
        self._not_watched: deque[Watched] = deque()
        self.is_under_way = False
        self.has_lost_ranks = False
        self.step: int | None = None

    def patience(self, what: str) -> Patience:
        """Begin a wait of this rank, as :meth:`Ranks.patience`; after :meth:`join`."""
        assert self._ranks is not None, "a call was scheduled"
        return self._ranks.patience(what)

    def join(self) -> None:
        """Find the other ranks, before the first call is scheduled."""
        if self._ranks is None:
            # Not when the queue is made, which may be before the process group is.
            self._ranks = Ranks("async calls", self._process_group, self._timeout_s)
            if self._ranks.world_size > 1:
                self._watch = Watch(self._ranks, self._timeout_s)
        self._require_same_world()

    def add(self, call: Watched) -> None:
        """Add a call, which the ranks agree on from the next poll on."""
        if self._watch is not None:
            self._not_watched.append(call)

    def poll(self, blocking: bool) -> None:
        """Count a poll of this rank; it may wait where all ranks are about to finalize.

        Args:
            blocking: Whether the verdicts on all calls are waited for.

        Raises:
            MismatchError: The process group, or its members, are not those of the first call.
            PeerLostError: The job's store cannot be reached.
        """
        self._require_same_world()
        if self._watch is None:
            return
        self._begin(self._watch)
        try:
            self._watch.poll(blocking)
        except Exception:
            self.is_under_way = False
            raise
        self.is_under_way = False

    def verdict(
        self, call: Watched, blocking: bool, no_dist: bool, await_own: Callable[[float], None]
    ) -> Verdict | None:
        """Verdict on the oldest call.

        Args:
            call: The oldest.
            blocking: Whether to wait for it.
            no_dist: Whether to ask no other rank.
            await_own: Waits for the work of this rank, since a moment by the monotonic clock.

        Returns:
            The verdict, or ``None`` while the call is not over on all ranks.
        """
        watch, start = self._watch, time.monotonic()
        if no_dist or watch is None:
            if blocking:
                await_own(start)
            return self._own_verdict(call) if call.ending.done() else None
        if not blocking:
            return watch.verdict(call.number)
        self._begin(watch)
        await_own(start)
        try:
            verdict = watch.await_verdict(call.number, start)
        except PeerLostError as error:
            verdict = Verdict(call.number, failure=Failure.of(error), is_lost=True)
        self.is_under_way = False
        return verdict

    def coming(self, call: Watched) -> Verdict | None:
        """Verdict on a call, also if it takes effect in a later poll only; asks no other rank."""
        if self._watch is not None:
            return self._watch.coming(call.number)
        return self._own_verdict(call) if call.ending.done() else None

    def begin_anew(self, number: int) -> None:
        """Forget all calls after a mismatch; see :meth:`Watch.begin_anew`."""
        assert self._watch is not None, "a rank that is alone does not differ from others"
        self._not_watched.clear()
        self._watch.begin_anew(number)

    def leave(self) -> None:
        """Let the other ranks not wait for this one any more."""
        if self._watch is not None:
            self._watch.leave(self._not_watched)

    def close(self) -> None:
        """End the thread and give back what is in the job's store."""
        if self._watch is not None:
            self._watch.close()

    def _require_same_world(self) -> None:
        assert self._ranks is not None, "a call was scheduled"
        try:
            self._ranks.require_same_world()
        except MismatchError:
            self.has_lost_ranks = True
            raise

    def _begin(self, watch: Watch) -> None:
        assert self._ranks is not None, "a watch has its ranks"
        self._ranks.prepare()
        self.is_under_way = True
        watch.step = self.step
        while self._not_watched:
            watch.follow(self._not_watched[0])
            self._not_watched.popleft()

    def _own_verdict(self, call: Watched) -> Verdict:
        assert self._ranks is not None, "a call was scheduled"
        me = self._ranks.global_ranks[self._ranks.rank]
        if self._not_watched and self._not_watched[0] is call:
            self._not_watched.popleft()
        if self._watch is not None:
            # Whoever judges needs the ends on all ranks.
            end = CallEnd.of(call.number, call.name, call.ending.error)
            return Verdict(call.number, failure=failure_of([end], [me]), is_own=True)
        failure, value = judge_ends(call, [call.end()], [me])
        return Verdict(call.number, failure=failure, value=value)
