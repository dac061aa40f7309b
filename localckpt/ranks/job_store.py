"""The job's key-value store, and how a group of ranks opens a part of it that nobody has used.

A store may outlive an attempt of the job: torchrun can keep one over its restarts, and so do the
keys of ranks that died at any point. A part is therefore opened by a handshake. The first rank of
the group publishes a random name, every other rank signs the name, and the first rank confirms it
once all have signed. A rank signs a name only once, so a name that a dead first rank had published
is either signed already or never confirmed, and is left for the next one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.ranks.deadline import begin, within
from localckpt.ranks.values import if_there
from localckpt.threads import Task

__all__ = ["Group", "StorePart", "ask_store", "back_off", "default_store"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.25
# At 1,024 ranks that wait long, the store is asked 4,096 times a second.
_ASKED_AGAIN = 8
# Time for the store itself, beyond the wait for other ranks.
_STORE_TIMES = 2
_LOOK_ROUND_S = 0.02
_LEAVING_S = 1.0
_NAMED = 16
_CLOSED, _CONFIRMED = "closed ", "confirmed"
# Up to so many ranks, asking again and again is cheaper than a connection to wait on.
_FEW_RANKS = 64
_LONGEST_NAP_OF_FEW_S = 0.02


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that work together, and the job's store as this process sees it.

    Attributes:
        rank: This process's place among ``ranks``.
        ranks: The ranks of the group, as ranks of the job.
        store: The job's store; ``None`` for a process that is alone.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Store | None

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup | None = None, ranks: Sequence[int] | None = None
    ) -> Group:
        """Find the ranks of a process group; without torch.distributed a process is alone.

        Args:
            process_group: The ranks; ``None`` for all.
            ranks: The ranks, where they have no process group.

        Raises:
            MismatchError: This process is not among the ranks, or the job has more ranks than this
                process knows of.
        """
        if not (dist.is_available() and dist.is_initialized()):
            _refuse_unknown_world()
            return cls(0, (0,), None)
        members = ranks or dist.get_process_group_ranks(process_group or dist.group.WORLD)
        if dist.get_rank() not in members:
            raise MismatchError(
                f"rank {dist.get_rank()} is not among the ranks {list(members)} that are to work "
                f"together: make it on those alone"
            )
        return cls(members.index(dist.get_rank()), tuple(members), default_store())


class StorePart:
    """A fresh part of the job's store for some ranks, opened in the background.

    All ranks of the group make it with the same name in the same order; whoever uses it first waits
    until all have. Without torch.distributed it is a world of one, which has no store.

    Args:
        name: Keeps the part apart from others that the same ranks open at the same time.
        group: The ranks.
        timeout_s: How long to wait for the other ranks, in seconds.
        remove_keys: ``remove_keys(store, rank)`` deletes what a rank has written into a part. It is
            called for parts that were closed, and for those that an earlier process of this rank
            left.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        timeout_s: float,
        *,
        remove_keys: Callable[[Store, int], None],
    ) -> None:
        self._process = os.getpid()
        self._group = group
        self._store: Store | None = None
        self._waiter: Store | None = None
        self._opening: Task[Store] | None = None
        self._closed = False
        self._remove_keys = remove_keys
        self._name = name
        self._timeout_s = timeout_s
        self._limit_s = _STORE_TIMES * timeout_s
        if group.store is None or self.is_alone:
            return
        members = hashlib.sha256(repr(list(group.ranks)).encode()).hexdigest()[:16]
        self._prefix = f"localckpt/{members}/{name}"
        self._number = _next_number(group.store, self._prefix)
        self._shared = PrefixStore(self._prefix, group.store)
        self._opening = begin(self._agree)

    @property
    def is_alone(self) -> bool:
        """Whether it has no store, since there is nobody to talk to."""
        return len(self._group.ranks) == 1

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` returns, or raises, without waiting for other ranks."""
        if self.is_alone or self._store is not None:
            return True
        return self._opening is not None and self._opening.done()

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the rank, and shares its connection to the store."""
        return os.getpid() != self._process

    def open(self, in_a_hurry: Callable[[], bool] = lambda: False) -> Store:
        """Return the part, once all ranks have made it.

        Args:
            in_a_hurry: Whether to stop waiting.

        Raises:
            PeerLostError: Some rank did not come in time, or the store cannot be reached. The next
                call tries again.
            CheckpointingException: This process is a fork of the one that made the part.
        """
        if self.is_fork:
            raise CheckpointingException(
                f"process {self._process} is a rank of the job, and this one is a fork of it: "
                f"save and load there"
            )
        if self._store is not None:
            return self._store
        opening = self._opening = self._opening or begin(self._agree)
        until = time.monotonic() + self._limit_s
        try:
            while not opening.done() and time.monotonic() < until and not in_a_hurry():
                opening.wait(_LOOK_ROUND_S)
            with _store_errors(f"open {self._name!r}", self._limit_s):
                self._store = opening.result(0)
        finally:
            if opening.done():
                self._opening = None
            # An error keeps the frames that it came through: it must not be in one of them itself.
            del opening
        return self._store

    def require_same_world(self) -> None:
        """Check that the job's process group is the one in which this part was opened.

        Raises:
            MismatchError: Another one was made since.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        if self._group.store is None and dist.get_world_size() > 1:
            raise MismatchError(
                f"this manager was made before torch.distributed.init_process_group(), as if this "
                f"process were alone, and the job has {dist.get_world_size()} ranks: make the "
                f"manager after the process group. Nothing was saved or read by this call"
            )
        if self._group.store is not None and default_store() is not self._group.store:
            raise MismatchError(
                "torch.distributed was initialised anew after this manager was made: close the "
                "manager, and make another. Nothing was saved or read by this call"
            )

    def close(self) -> None:
        """Note that no rank calls anything here any more; the next opening removes the keys.

        Another rank may be reading them still. May be called twice, and in a fork.
        """
        if self._group.store is None or self.is_alone or self._closed or self.is_fork:
            return
        opening = self._opening
        if self._store is None and (opening is None or not opening.done() or opening.error):
            return
        self._closed = True
        # The connection ends with it.
        self._waiter = None
        try:
            ask_store("leave the job's store", _LEAVING_S, partial(self._note, True))
        except PeerLostError as error:
            # Most often the process that hosts the store has ended, and the keys with it.
            logger.debug("%s", error)

    def _agree(self) -> Store:
        opening = _Opening(
            PrefixStore(f"{self._number}", self._shared),
            self._name,
            self._group.rank,
            self._group.ranks,
            self._timeout_s,
        )
        self._part = f"{self._number}/{opening.agree()}"
        if len(self._group.ranks) > _FEW_RANKS:
            self._waiter = self._own_client()
        # All ranks have come here, so none of them is in the last call on the part before.
        self._remove_before()
        self._note(False)
        return PrefixStore(self._part, self._shared)

    def await_key(self, key: str, until: float, stop: Callable[[], bool]) -> bool:
        """Wait until a key of the part is there.

        Args:
            key: Which key.
            until: The deadline, by the monotonic clock.
            stop: Whether to stop waiting before that.

        Returns:
            Whether it is there.
        """
        assert self._store is not None
        if self._waiter is not None and not self._store.check([key]):
            return self._wait_blocked(key, until, stop)
        nap_s = _SHORTEST_NAP_S
        while not self._store.check([key]):
            if stop() or time.monotonic() > until:
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_OF_FEW_S)
        return True

    def _wait_blocked(self, key: str, until: float, stop: Callable[[], bool]) -> bool:
        """Wait on a connection of its own: one message, however long it takes."""
        client = self._waiter
        assert client is not None
        left = timedelta(seconds=max(0.001, until - time.monotonic()))
        waiting = begin(lambda: client.wait([key], left))
        while not waiting.wait(_LOOK_ROUND_S):
            if stop():
                # The connection stays busy until the deadline, so it is of no more use.
                self._waiter = self._own_client()
                return False
        return not isinstance(waiting.error, dist.DistStoreError) and waiting.take_result() is None

    def _own_client(self) -> Store | None:
        """Another connection to the store; ``None`` where the store has none to give."""
        assert self._group.store is not None
        clone = getattr(self._group.store, "clone", None)
        if clone is None:
            return None
        return PrefixStore(self._part, PrefixStore(self._prefix, clone()))

    def _remove_before(self) -> None:
        """Remove this rank's keys of parts that nobody uses any more."""
        for number in (self._number - 1, self._number):
            text = if_there(self._shared, f"part/{number}/{self._group.rank}")
            part, closed = json.loads(text) if text else ("", False)
            # Another part of the same number is of an earlier process, or process group.
            if part and (closed or number == self._number):
                self._remove_keys(PrefixStore(part, self._shared), self._group.rank)
                self._shared.delete_key(f"part/{number}/{self._group.rank}")

    def _note(self, closed: bool) -> None:
        """Leave word of this part for those that will open others."""
        self._shared.set(
            f"part/{self._number}/{self._group.rank}", json.dumps([self._part, closed])
        )


class _Opening:
    """One handshake: all ranks come to one name that was never used before."""

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def agree(self) -> str:
        return self._publish() if self._rank == 0 else self._sign()

    def _publish(self) -> str:
        before = (if_there(self._store, "opening") or b"").decode().removeprefix(_CLOSED)
        name, others = secrets.token_hex(8), len(self._ranks) - 1
        self._store.set("opening", name)
        if before:
            self._remove(before, range(1, others + 1))
        # Also when another rank has given up.
        self._wait(
            lambda: (
                self._store.add(f"{name}/signed", 0) >= others
                or if_there(self._store, f"{name}/outcome") is not None
            )
        )
        # No rank of a later attempt may sign a name that is confirmed already.
        self._store.set("opening", f"{_CLOSED}{name}")
        all_signed = self._store.add(f"{name}/signed", 0) >= others
        outcome = self._decide(name, _CONFIRMED if all_signed else self._describe_unsigned(name))
        if outcome != _CONFIRMED:
            raise PeerLostError(outcome)
        if self._wait(lambda: self._store.add(f"{name}/heard", 0) >= others):
            self._store.delete_key("opening")
            self._remove(name, ())
        return name

    def _sign(self) -> str:
        refused: set[str] = set()
        while self._wait(lambda: self._published() not in {"", *refused}):
            name = self._published()
            if name in {"", *refused}:
                continue
            # Once only: a name that this rank has signed before is of an attempt that is over. So
            # is one that was given up before all had signed.
            is_over = if_there(self._store, f"{name}/outcome") is not None
            if is_over or self._store.add(f"{name}/signed/{self._rank}", 1) > 1:
                refused.add(name)
                continue
            self._store.add(f"{name}/signed", 1)
            if (outcome := self._hear(name)) is None:
                refused.add(name)
                self._remove(name, [self._rank])
                continue
            self._store.delete_key(f"{name}/signed/{self._rank}")
            self._store.add(f"{name}/heard", 1)
            if outcome != _CONFIRMED:
                raise PeerLostError(outcome)
            return name
        raise PeerLostError(self._describe_lost([0]))

    def _hear(self, name: str) -> str | None:
        """The outcome of a name that was signed; ``None`` once another one is published."""
        outcome: bytes | None = None
        published = name

        def is_decided() -> bool:
            nonlocal outcome, published
            # In this order: a first rank that goes on to its next opening has decided this one.
            published = self._published(closed=True)
            outcome = if_there(self._store, f"{name}/outcome")
            return outcome is not None or published.removeprefix(_CLOSED) != name

        if not self._wait(is_decided):
            return self._decide(name, self._describe_unsigned(name))
        return None if outcome is None else outcome.decode()

    def _decide(self, name: str, outcome: str) -> str:
        """Say how an opening ends, for all ranks, unless another rank has; what holds."""
        return self._store.compare_set(f"{name}/outcome", "", outcome).decode()

    def _published(self, *, closed: bool = False) -> str:
        name = (if_there(self._store, "opening") or b"").decode()
        return "" if name.startswith(_CLOSED) and not closed else name

    def _remove(self, name: str, ranks: Sequence[int]) -> None:
        for key in ("signed", "outcome", "heard", *(f"signed/{rank}" for rank in ranks)):
            self._store.delete_key(f"{name}/{key}")

    def _wait(self, is_there: Callable[[], bool]) -> bool:
        naps = back_off()
        while not is_there():
            if time.monotonic() > self._deadline:
                return False
            time.sleep(next(naps))
        return True

    def _describe_unsigned(self, name: str) -> str:
        others = range(1, len(self._ranks))
        lost = [r for r in others if not self._store.check([f"{name}/signed/{r}"])]
        return self._describe_lost(lost or [0])

    def _describe_lost(self, lost: Sequence[int]) -> str:
        named = ", ".join(f"rank {self._ranks[rank]}" for rank in lost[:_NAMED])
        named += f" and {len(lost) - _NAMED} more" * (len(lost) > _NAMED)
        return (
            f"waited {self._timeout_s:g} s to open {self._name!r}, and {named} (last seen: not "
            f"seen yet) did not come. All ranks make their managers in the same order; what was "
            f"saved before stands. If the ranks are alive but slow, give a longer timeout; else "
            f"restart the job"
        )


def ask_store(
    phase: str, limit_s: float, call: Callable[[], T], stop: Callable[[], None] | None = None
) -> T:
    """What a call that talks to the job's store returns.

    Args:
        phase: What is being done, for the error message.
        limit_s: The longest wait for the store, in seconds.
        call: What is called, in another thread.
        stop: Makes it end sooner; called when it fails, or the wait for it is interrupted.

    Raises:
        PeerLostError: The store cannot be reached, or has not answered in time.
    """
    with _store_errors(phase, limit_s):
        return within(limit_s, call, stop)


@contextmanager
def _store_errors(phase: str, limit_s: float) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, dist.DistError) as error:
        why = str(error) or f"not for {limit_s:g} s"
        raise PeerLostError(
            f"could not {phase}: the job's key-value store does not answer ({why}). The "
            f"process that hosts it, most often on the first node, has probably died, or "
            f"cannot be reached from here; restart the job. What was saved before stands."
        ) from error


def back_off() -> Iterator[float]:
    """Seconds to sleep before the store is asked again: a share of the time waited so far."""
    start = time.monotonic()
    while True:
        waited_s = time.monotonic() - start
        yield min(max(_SHORTEST_NAP_S, waited_s / _ASKED_AGAIN), _LONGEST_NAP_S)


def default_store() -> Store:
    """The key-value store of the default process group."""
    # torch has no public accessor for it; this is the one place that asks.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


# How many parts of a name this process has made in a process group. The ranks make them in the same
# order, so the number tells parts apart that are open at once. A group has no place for it, and its
# store, which ends with it, does instead.
_MADE: WeakKeyDictionary[Store, Counter[str]] = WeakKeyDictionary()


def _next_number(store: Store, prefix: str) -> int:
    made = _MADE.setdefault(store, Counter())
    made[prefix] += 1
    return made[prefix]


def _refuse_unknown_world() -> None:
    """Refuse to work as a world of one where a launcher has started several ranks."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdecimal() and int(world) > 1:
        raise MismatchError(
            f"the launcher has started {world} ranks (WORLD_SIZE), and torch.distributed is not "
            f"initialised, so each would save as if it were alone: call "
            f"torch.distributed.init_process_group() before the manager is made. If this process "
            f"is to work alone, unset WORLD_SIZE"
        )
