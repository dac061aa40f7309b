"""Meetings of all ranks in the job's store: each says something, the first one answers.

Any thread can take part, whatever the others are doing: no collective is used, so training may be
in the middle of its own. What goes wrong on one rank is known to all at once, not at the deadline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt import errors
from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.failure_texts import described
from localckpt.ranks.job_store import Group, StorePart, ask_store, back_off
from localckpt.ranks.values import delete, if_there, look, put

__all__ = ["Meeting"]

T = TypeVar("T")

_LEAVING_S = 2.0
_NAMED = 16
# A round waits for others, then for the answer; and for the store not much longer.
_STORE_TIMES = 3

# All that can happen to a round is one number in the store: an answer adds 1, a failure 2.
_ANSWERED, _FAILED = 1, 2
_COMPLETE = "complete"


class Meeting:
    """Where the ranks of a process group hold their rounds.

    All ranks make it with the same name, in the same order; the first round waits until all have.
    Without torch.distributed it is a world of one.

    Args:
        name: Keeps its messages apart from those of others.
        process_group: The ranks that take part; ``None`` for all.
        coordinator: The rank of the group that answers.
        timeout_s: How long a round waits for the others, in seconds.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None = None,
        coordinator: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        self.timeout_s = timeout_s
        self.coordinator = coordinator
        self._rounds = 0
        self._last: _Round | None = None
        group = Group.of(process_group)
        self._part = StorePart(name, group, timeout_s, remove_keys=_remove_keys)
        self.rank, self.global_ranks = group.rank, list(group.ranks)
        self.world_size = len(self.global_ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the one that answers."""
        return self.rank == self.coordinator

    def hold(
        self,
        phase: str,
        say: Callable[[], bytes],
        answer: Callable[[list[bytes]], Sequence[bytes]],
        name: str | None = None,
    ) -> bytes:
        """Hold one round; all ranks call it.

        Args:
            phase: What the ranks do together, as in "could not <phase>".
            say: This rank's part; its result goes to the coordinator.
            answer: Called on the coordinator with what each rank said. It gives each rank its
                answer, or a single one that is for all.
            name: Tells the round from all others of this meeting, on all ranks alike; by default
                rounds are numbered as they are called.

        Returns:
            The answer for this rank.

        Raises:
            CheckpointingException: ``say`` failed on some rank, or ``answer``: the same error on
                every rank, of the type that was raised there if it is one of ours.
            PeerLostError: Some rank did not come in time.
            MismatchError: The job's process group is another one than when this was made.
        """
        self._part.require_same_world()
        # Before it counts: a round that no rank could begin has no number.
        part = None if self._part.is_alone else self._part.open()
        numbered = name is None
        if name is None:
            name = f"round {self._rounds}"
            self._rounds += 1
        if part is None:
            try:
                return answer([say()])[0]
            except Exception as error:
                raise _Failure.of(error, self.global_ranks[0], phase).error() from error
        told, own = _Round(self, part, name, phase), None
        if numbered:
            self._last = told
        try:
            told.begin()
            told.post(say())
            if self.is_coordinator:
                told.answer(answer(told.collect()))
        except _GivenUp:
            pass
        except Exception as error:  # noqa: BLE001 - raised on every rank, here by what follows
            told.fail(error)
            own = error
        except BaseException as error:
            # A fork that ends in the middle of a round has failed nothing.
            if not self._part.is_fork:
                told.fail(error)
            raise
        outcome = told.hear()
        if self.is_coordinator and not numbered:
            told.see_off()
        if isinstance(outcome, _Failure):
            raise outcome.error() from own
        return outcome

    def leave(self) -> None:
        """Before this process ends: let the others hear the last answer, if it is told here.

        No round may follow, on any rank.
        """
        if self._last is not None and self.is_coordinator:
            self._last.see_off()
        self._part.close()


@dataclass(frozen=True, slots=True)
class _Failure:
    """What ended a round, as every rank is told."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int, phase: str) -> _Failure:
        kinds = (c.__name__ for c in type(error).__mro__ if c.__name__ in errors.__all__)
        kind = next(kinds, CheckpointingException.__name__)
        return cls(kind, f"could not {phase}: rank {rank}: {described(error)}")

    def error(self) -> CheckpointingException:
        raised: CheckpointingException = getattr(errors, self.kind)(self.text)
        return raised


class _GivenUp(Exception):
    """Some rank has ended the round before all had come; the round knows why."""


class _Round:
    def __init__(self, meeting: Meeting, part: Store, name: str, phase: str) -> None:
        self._meeting = meeting
        self._part = part
        self._name = name
        self._store = PrefixStore(name, part)
        self._phase = phase
        self._deadline = time.monotonic() + meeting.timeout_s

    def begin(self) -> None:
        """Say which round this rank has come to, for those that may wait for it in vain."""
        key, word = f"last/{self._meeting.rank}", json.dumps([self._name, self._phase])
        self._ask(lambda: self._part.set(key, word))

    def post(self, said: bytes) -> None:
        rank = self._meeting.rank

        def post() -> None:
            put(self._store, f"said/{rank}", said)
            self._store.add("came", 1)

        self._ask(post)
        # Whoever has done its own part waits for the others from then on.
        self._deadline = time.monotonic() + self._meeting.timeout_s

    def collect(self) -> list[bytes]:
        """On the coordinator: what each rank has said."""
        world = self._meeting.world_size

        def collect() -> list[bytes]:
            naps = back_off()
            while self._store.add("came", 0) < world:
                if self._store.add("state", 0) >= _FAILED:
                    raise _GivenUp
                if time.monotonic() > self._deadline:
                    self._settle(_Failure.of(self._lost(), self._my_name(), self._phase))
                    raise _GivenUp
                time.sleep(next(naps))
            # From here on nobody can give it up: whoever is tired of waiting asks first.
            if self._store.compare_set("verdict", "", _COMPLETE).decode() != _COMPLETE:
                raise _GivenUp
            keys = [f"said/{rank}" for rank in range(world)]
            said = [look(self._store, key) for key in keys]
            for key in keys:
                delete(self._store, key)
            self._store.delete_key("came")
            return said

        return self._ask(collect)

    def answer(self, answers: Sequence[bytes]) -> None:
        """On the coordinator: tell all ranks."""

        def tell() -> None:
            for i, text in enumerate(answers):
                put(self._store, f"answer/{i}", text)
            self._store.set("outcome", json.dumps(len(answers)))
            self._store.add("state", _ANSWERED)

        self._ask(tell)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks what went wrong on this one, unless another was faster."""
        failure = _Failure.of(error, self._my_name(), self._phase)

        def tell() -> None:
            if self._settle(failure) == _COMPLETE and self._meeting.is_coordinator:
                # All have come, and wait for its word.
                self._store.set("outcome", json.dumps([failure.kind, failure.text]))
                self._store.add("state", _ANSWERED)

        self._ask(tell)

    def hear(self) -> bytes | _Failure:
        """The answer, or what ended the round."""
        return self._ask(self._hear)

    def see_off(self) -> None:
        """On the coordinator: give the others time to hear, since the store may live with it."""

        def see_off() -> None:
            naps, until = back_off(), time.monotonic() + _LEAVING_S
            # The last to hear takes the count away with all else.
            while self._store.check(["state"]) and time.monotonic() < until:
                time.sleep(next(naps))

        self._ask(see_off)

    def _hear(self) -> bytes | _Failure:
        deadline, naps, given_time = self._deadline, back_off(), False
        while not (state := self._store.add("state", 0)):
            if time.monotonic() > deadline:
                lost = _Failure.of(self._lost(), self._my_name(), self._phase)
                verdict = self._settle(lost)
                if verdict == _COMPLETE and given_time:
                    return self._unknown()
                if verdict == _COMPLETE:
                    # All came, and the coordinator is about to answer.
                    deadline, given_time = time.monotonic() + self._meeting.timeout_s, True
                    continue
            time.sleep(next(naps))
        # A word that was said twice counts once.
        if state >= _FAILED and self._store.get("verdict").decode() != _COMPLETE:
            failure = self._verdict()
            self._leave(None)
            return failure
        outcome = json.loads(self._store.get("outcome"))
        if isinstance(outcome, list):
            answer: bytes | _Failure = _Failure(*outcome)
        else:
            mine = self._meeting.rank if outcome > 1 else 0
            answer = look(self._store, f"answer/{mine}")
            if outcome > 1:
                delete(self._store, f"answer/{mine}")
        self._leave(outcome)
        return answer

    def _leave(self, outcome: object) -> None:
        """Whoever leaves last takes what is left of the round out of the store."""
        if self._store.add("heard", 1) < self._meeting.world_size:
            return
        if outcome == 1:
            delete(self._store, "answer/0")
        left = [f"said/{rank}" for rank in range(self._meeting.world_size)] if not outcome else []
        for key in left:
            delete(self._store, key)
        for key in ("verdict", "outcome", "came", "state", "heard"):
            self._store.delete_key(key)

    def _settle(self, failure: _Failure) -> str:
        """Give the round up, unless somebody has, or all have come; what holds now."""
        mine = json.dumps([failure.kind, failure.text])
        verdict = self._store.compare_set("verdict", "", mine).decode()
        if verdict == mine:
            self._store.add("state", _FAILED)
        return verdict

    def _verdict(self) -> _Failure:
        kind, text = json.loads(self._store.get("verdict"))
        return _Failure(kind, text)

    def _unknown(self) -> _Failure:
        meeting = self._meeting
        first = meeting.global_ranks[meeting.coordinator]
        text = (
            f"could not {self._phase}: all ranks had done their part, and rank {first} has not "
            f"said after {meeting.timeout_s:g} s what came of it. Whether it was done is not "
            f"known; what was saved before stands. find_latest() will tell"
        )
        return _Failure(PeerLostError.__name__, text)

    def _lost(self) -> PeerLostError:
        ranks = self._meeting.global_ranks
        late = [i for i in range(len(ranks)) if not self._store.check([f"said/{i}"])]
        told = [f"rank {ranks[i]} (last seen: {self._last_seen(i)})" for i in late[:_NAMED]]
        named = ", ".join(told) + f" and {len(late) - _NAMED} more" * (len(late) > _NAMED)
        return PeerLostError(
            f"waited {self._meeting.timeout_s:g} s, and {named} did not come. What was saved "
            f"before stands. If the ranks are alive but slow, give a longer timeout; else "
            f"restart the job"
        )

    def _last_seen(self, rank: int) -> str:
        last = if_there(self._part, f"last/{rank}")
        return json.loads(last)[1] if last else "not seen yet"

    def _my_name(self) -> int:
        return self._meeting.global_ranks[self._meeting.rank]

    def _ask(self, call: Callable[[], T]) -> T:
        return ask_store(self._phase, _STORE_TIMES * self._meeting.timeout_s, call)


def _remove_keys(part: Store, rank: int) -> None:
    """Delete what a rank has left in a meeting's part of the store."""
    last = if_there(part, f"last/{rank}")
    if last:
        store = PrefixStore(json.loads(last)[0], part)
        for key in (f"said/{rank}", f"answer/{rank}"):
            delete(store, key)
        for key in ("verdict", "outcome", "came", "state", "heard"):
            store.delete_key(key)
    part.delete_key(f"last/{rank}")
