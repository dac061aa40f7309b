"""Decisions of a job's ranks: each reports, one of them judges, and all get the verdict.

Reports and verdicts are sent over the key-value store that the process group was made with, never
over a device, so deciding costs no GPU synchronisation and needs no gloo group. This is not a
transport for shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.ranks.asking import store_errors
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.deciding import Deciding
from localckpt.ranks.failure import Attempt, Failure
from localckpt.ranks.hearing import Hearing
from localckpt.ranks.job_store import Group, StorePart
from localckpt.ranks.patience import Patience
from localckpt.ranks.round import HAND, remove_rounds
from localckpt.ranks.verdict import Call, PerRank, Verdict, shaped
from localckpt.threads import Latch

__all__ = ["GRACE_S", "PerRank", "Ranks", "shaped"]

T = TypeVar("T")
V = TypeVar("V")

# Once a rank has failed, the others get so long to report why they did, too.
GRACE_S = 10.0


def _nothing(_: list[Any]) -> None:
    return None


def _all(results: list[Any]) -> list[Any]:
    return results


def _not_empty(results: list[Any]) -> list[Any]:
    return [[rank, result] for rank, result in enumerate(results) if result]


class Ranks:
    """Decisions of the ranks of one process group.

    All ranks of the group call the same methods in the same order, also over all objects of one
    name. The first call, whichever it is, waits until all ranks have come to theirs;
    :attr:`is_open` tells whether it would. Without torch.distributed it is a world of one.

    Args:
        name: Keeps these messages apart from those of others.
        process_group: The ranks that take part; ``None`` for all.
        timeout_s: Time for the other ranks in each call that is given no deadline, and for the
            job's store, in seconds. The former is an attribute, too.
        ranks: Those that take part, where they have no process group.
        group: The ranks and the store, where they are known already.
        root: The rank of the group that judges.
        hint: Returns the end of the error message for ranks that do not come: a likely cause.

    Attributes:
        rank: This process's rank in the group.
        global_ranks: The ranks of the group, as ranks of the job.
        rounds: Number of the next decision. Where an interrupt may keep a rank from one, all get
            its number by a decision of other ``Ranks``.
        under_way: What the ranks decide together at the moment, for messages of other threads;
            ``None`` if nothing.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        *,
        ranks: Sequence[int] | None = None,
        group: Group | None = None,
        root: int = 0,
        hint: Callable[[], str] = str,
    ) -> None:
        group = group or Group.of(process_group, ranks)
        self.rank, self.global_ranks = group.rank, list(group.ranks)
        self.world_size = len(group.ranks)
        self.root = root
        self.timeout_s = timeout_s
        self.rounds = 0
        self.under_way: str | None = None
        self._part = StorePart(name, group, timeout_s, remove_keys=self._remove_keys, hint=hint)
        self._deciding = Deciding(self._part, group, root, timeout_s, hint)

    @property
    def is_root(self) -> bool:
        """True if this rank is the one that judges."""
        return self._deciding.is_root

    @property
    def is_open(self) -> bool:
        """True if a call need not wait until all ranks have created their ``Ranks``."""
        return self._part.is_open

    def require_same_world(self) -> None:
        """Check that the job's process group and its members are those that this was made for.

        It compares a few numbers, and asks no other rank.

        Raises:
            MismatchError: They are not.
        """
        self._part.require_same_world()

    def prepare(self) -> None:
        """Begin to open the connection of the ranks in the background.

        Whoever calls from a thread first has the trainer prepare this, so that all ranks open what
        has one name in the same order.
        """
        self._part.prepare()

    def close(self) -> None:
        """Let what is left in the job's store be removed; no call may follow, on any rank."""
        if self.in_a_hurry:
            self._part.hang_up()
        else:
            self._part.close()
        self._deciding.close()

    def abandon(self) -> None:
        """Close without a word to the other ranks, which may never come; no call may follow."""
        self.stop_waiting()
        self.close()

    @property
    def in_a_hurry(self) -> bool:
        """True if no call waits; see :meth:`stop_waiting`."""
        return self._deciding.stopped.is_set()

    def stop_waiting(self) -> None:
        """From now on no call waits, nor one that is under way in another thread."""
        self._deciding.stopped.set()

    def wait_again(self) -> None:
        """Undo :meth:`stop_waiting`."""
        if self.in_a_hurry:
            self._deciding.stopped = Latch()

    def decide(
        self,
        what: str,
        work: Callable[[], T],
        judge: Callable[[list[T]], V],
        *,
        deadline: Deadline | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> V:
        """Do a part on each rank, and have one verdict on all parts on every rank.

        Args:
            what: What the ranks do together, as an infinitive, for messages.
            work: This rank's part; its result, anything that JSON can carry, or a
                :class:`Message`, goes to the root.
            judge: A pure function, called on the root with the results in rank order. What it
                returns is JSON, or :class:`PerRank`.
            deadline: Deadline of the wait for other ranks; by default :attr:`timeout_s` from the
                end of the work on.
            read: Makes what is returned of what ``judge`` returned, such as :func:`shaped`. What it
                cannot read is no verdict of this program's: a MismatchError.

        Returns:
            What ``judge`` returned. Of a :class:`PerRank` it is a list of two: what is common to
            all ranks, and this rank's part, which is ``None`` if it has none.

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
        verdict: V = self.agree(what, attempt, result, judge, deadline=deadline, read=read)
        return verdict

    def agree(
        self,
        what: str,
        attempt: Attempt,
        result: Any = None,
        judge: Callable[[list[Any]], Any] = _nothing,
        *,
        deadline: Deadline | None = None,
        grace_s: float = GRACE_S,
        kind: str = "",
        order: int | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Decide as in :meth:`decide`, about work that is done.

        Args:
            what, deadline, read: As for :meth:`decide`.
            grace_s: The longest wait for other ranks once some rank has failed, in seconds.
            judge: As for :meth:`decide`; by default there is nothing to judge.
            attempt: End of this rank's work.
            result: Result of this rank's work, if it succeeded.
            kind: What all ranks must do alike, where that is less than ``what``.
            order: Iteration of the call, where there is one. Calls of one kind for another fail on
                the ranks that are behind, which made theirs alone; the others wait for them, if
                they are at least half of all.
        """
        verdict = self._agree(
            *(what, attempt, result, judge, deadline, grace_s), kind=kind, order=order
        )
        return _readable(what, verdict, read)

    def merge(
        self,
        what: str,
        attempt: Attempt,
        report: Any,
        *,
        deadline: Deadline | None = None,
        grace_s: float = GRACE_S,
        read: Callable[[Any], Any] = lambda report: report,
    ) -> dict[int, Any]:
        """Give the reports that are not empty to every rank, by rank.

        For what few ranks have to report, such as what went wrong; ``read`` reads one of them.
        """
        merged: dict[int, Any] = self.agree(
            *(what, attempt, report, _not_empty),
            deadline=deadline,
            grace_s=grace_s,
            read=lambda reports: {rank: read(report) for rank, report in reports},
        )
        return merged

    def gather(
        self, what: str, record: Any, *, deadline: Deadline | None = None, kind: str = ""
    ) -> list[Any]:
        """Give every rank's record to every rank: for few ranks, or short records.

        Args:
            what: What is being done, for the error message of whoever waits in vain.
            record: Anything that JSON can carry.
            deadline: As for :meth:`decide`.
            kind: As for :meth:`agree`.

        Returns:
            The records in rank order.

        Raises:
            PeerLostError, MismatchError: As :meth:`decide`.
        """
        records: list[Any] = self.agree(
            *(what, Attempt(), record, _all), deadline=deadline, kind=kind, read=shaped(list)
        )
        return records

    def act(
        self,
        what: str,
        work: Callable[[], T],
        act: Callable[[list[T]], V],
        *,
        kind: str = "",
        order: int | None = None,
        timeout_s: float | None = None,
        in_vain: Callable[[], None] | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> V:
        """Do a part on each rank, and then one thing on the root for all, such as a commit.

        As :meth:`decide`, for work that may take long: a rank is seen to be in the call from its
        beginning, and the first failure is raised on all ranks at once, whatever the root is doing.
        Once all have reported, only the root knows whether it has acted, so no rank gives the call
        up for the others; each one raises for itself that it knows no verdict.

        Args:
            what, work, read: As for :meth:`decide`.
            act: Called on the root with the results in rank order, once all are there. What it
                returns is JSON, or :class:`PerRank`.
            kind, order: As for :meth:`agree`.
            timeout_s: Time that the other ranks get once this one has done its part, in seconds;
                ``None`` for :attr:`timeout_s`.
            in_vain: For work that waits long: called in another thread once some rank has failed,
                or the job's store cannot be reached. It makes ``work`` raise anything; this rank
                raises what the others do.
        """
        self._part.require_same_world()
        if not self._part.is_alone:
            # Else it would hear at once that its part is in vain.
            while in_vain is not None and self._deciding.is_over(self.rounds, what):
                self.rounds += 1
            self._deciding.note(self.rounds, what)
        result: T | None = None
        hearing: Hearing | None = None
        try:
            with Attempt() as attempt:
                if in_vain is not None and not self._part.is_alone:
                    hearing = Hearing(self._deciding, self.rounds, what, in_vain)
                result = work()
        except BaseException as error:
            # Others need not wait for a rank that was interrupted. A fork that ends has not failed.
            if not self._part.is_fork:
                with suppress(PeerLostError):
                    self.post_failure(what, error)
            raise
        finally:
            if hearing is not None:
                hearing.end()
        if hearing is not None and not attempt.succeeded:
            # With a verdict there is nothing to report.
            attempt.failure = None if hearing.has_verdict else hearing.error or attempt.failure
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        verdict = self._agree(
            *(what, attempt, result, act, deadline, 0.0), acts=True, kind=kind, order=order
        )
        told: V = _readable(what, verdict, read)
        return told

    def see_off(self) -> None:
        """On the root, after :meth:`act` or a failure: return once all have read it, or soon.

        The job's store may live in this process, and end with it.
        """
        alone = self._part.is_alone or self._part.is_fork
        if self.is_root and self.rounds and not alone:
            self._deciding.see_off(self.rounds - 1)

    def post_failure(self, what: str, failure: BaseException) -> None:
        """Report a failure of this rank's part of a decision, without waiting for the verdict."""
        if self._part.is_alone:
            return
        call = Call(what, Failure.of(failure), None, _nothing, Deadline.after(self.timeout_s))
        self._deciding.post(self._next_round(call.deadline), call)

    def attend(
        self, what: str, result: Any, judge: Callable[[list[Any]], Any], *, kind: str = ""
    ) -> Any:
        """Decide as in :meth:`agree`, in a thread of its own and with no deadline.

        It waits on a connection of its own, until all ranks have reported, or another thread, of
        whichever rank, calls :meth:`give_up` or :meth:`leave`.
        """
        self._part.require_same_world()
        call = Call(what, None, result, judge, Deadline(inf, inf), kind=kind)
        verdict = self._deciding.attend(self._next_round(call.deadline), call)
        while self._deciding.is_for_others(what, verdict):
            verdict = self._deciding.attend(self._next_round(call.deadline), call)
        self._raise_failure(what, verdict, None)
        return verdict.value

    def give_up(self, waited_s: float) -> None:
        """End an :meth:`attend` in another thread: ranks that have not reported are lost, for all.

        Raises:
            PeerLostError: The store cannot be reached.
        """
        self._deciding.give_up(waited_s)

    def raise_hand(self) -> None:
        """Have :meth:`is_hand_raised` be true on all ranks from now on; waits for none of them.

        Raises:
            PeerLostError: The store cannot be reached.
        """
        if not self._part.is_alone:
            self._deciding.ask("raise a hand", lambda store: store.set(HAND, "1"))

    def is_hand_raised(self) -> bool:
        """Return whether some rank has raised its hand, as the job's store says. May be polled.

        Raises:
            PeerLostError: The store cannot be reached.
        """
        if self._part.is_alone:
            return False
        return self._deciding.ask("look for a hand", lambda store: bool(store.check([HAND])))

    def patience(self, what: str) -> Patience:
        """Begin a wait of this rank for others; ``what`` is as for :class:`Patience`."""
        return Patience(self.global_ranks[self.rank], what)

    def awaits(self) -> str:
        """Return in words which ranks a call in another thread waits for; empty for none."""
        return self._deciding.awaits()

    def leave(self, what: str) -> None:
        """Take part in nothing any more; an :meth:`attend` in another thread ends, on all ranks.

        Args:
            what: What this rank would attend next: other ranks that do are told at once.
        """
        self._deciding.leave(self.rounds, what)

    def _agree(
        self,
        what: str,
        attempt: Attempt,
        result: Any,
        judge: Callable[[list[Any]], Any],
        deadline: Deadline | None,
        grace_s: float,
        *,
        acts: bool = False,
        kind: str = "",
        order: int | None = None,
    ) -> Any:
        failure, attempt.failure = attempt.failure, None
        mine = None if failure is None else Failure.of(failure)
        self.under_way = what
        try:
            self._part.require_same_world()
            deadline = deadline or Deadline.after(self.timeout_s)
            return self._meet(Call(what, mine, result, judge, deadline, grace_s, acts, kind, order))
        except CheckpointingException as error:
            if failure is None or mine is None:
                raise
            if isinstance(error, PeerLostError) and mine.text not in str(error):
                raise PeerLostError(f"could not {what}: {mine.text} Also: {error}") from failure
            raise error from failure
        finally:
            self.under_way = None
            # Else the errors would keep themselves by these variables.
            del failure, attempt

    def _meet(self, call: Call) -> Any:
        verdict, cause = self._deciding.meet(self._next_round(call.deadline), call)
        while self._deciding.is_for_others(call.what, verdict):
            verdict, cause = self._deciding.meet(self._next_round(call.deadline), call)
        if verdict.failure is not None and not verdict.late:
            # An error may end this process, and with it the store.
            self.see_off()
        try:
            self._raise_failure(call.what, verdict, cause)
        finally:
            # Else it would keep itself by this variable, and what its callers work on.
            del cause
        return verdict.value

    def _raise_failure(self, what: str, verdict: Verdict, cause: BaseException | None) -> None:
        failure = self._deciding.too_late(what, verdict)
        if failure is not None:
            raise failure.error() from cause

    def _next_round(self, deadline: Deadline) -> int:
        if not self._part.is_alone:
            # Before it counts: a round that no rank could begin has no number.
            self._deciding.open(deadline)
        number = self.rounds
        self.rounds += 1
        return number

    def _remove_keys(self, store: Store, rank: int) -> None:
        """Delete what a rank has left in a part of the store."""
        remove_rounds(store, rank, self.world_size)


def _readable(what: str, value: Any, read: Callable[[Any], Any] | None) -> Any:
    if read is None:
        return value
    with store_errors(what):
        return read(value)
