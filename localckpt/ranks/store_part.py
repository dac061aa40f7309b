"""A part of the job's store that nobody has used, found by a nonce that the first rank draws.

A store may outlive an attempt of the job: torchrun can keep one over its restarts, and so do the
keys of ranks that died at any point. No launcher's count of restarts names an attempt: torchrun's
differs between nodes. So the first rank publishes a nonce, and withdraws it before it says that all
have come: a nonce that is found published is new, or of an attempt in which nothing was said.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.errors import AbortedError, CheckpointingException, MismatchError
from localckpt.ranks.deadline import Deadline, Patience, StoreWait, begin, store_errors
from localckpt.ranks.failure import Failure, Place, named
from localckpt.ranks.job_store import Members, Standing, default_store
from localckpt.ranks.round import remove_rounds
from localckpt.ranks.values import if_there
from localckpt.ranks.verdict import Verdict
from localckpt.threads import Latch, Shielded, Task
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

# More ranks than that ask less often, so that the store has no more to answer.
_LONGEST_PAUSE_S, _MANY = 0.25, 1024
_ALIKE = " All ranks make the same calls in the same order."
_PUBLISHED = "opening"
# Keys under a nonce: how many ranks have come, and the verdict on that.
_COUNT, _OPEN = "count", "open"

_NAMES = re.compile("[0-9a-f]{16}")

# Time for the store itself, beyond the wait for other ranks.
_STORE_TIMES = 2
# Of one message; without a deadline another one follows.
_LONGEST_WAIT_S = 86400.0
_LEAVING_S = 1.0
# Up to so many ranks, asking again and again is cheaper than a connection to wait on.
_FEW_RANKS = 16
_LONGEST_PAUSE_OF_FEW_S = 0.02


class AbandonedError(Exception):
    """Ends a thread for which nobody waits any more."""


class StorePart:
    """A fresh part of the job's store for some ranks, opened when all of them use it first.

    All use their parts of one name first in the same order. A world of one has no store.
    """

    def __init__(
        self, name: str, group: Members, timeout_s: float, hint: Callable[[], str]
    ) -> None:
        self._process = os.getpid()
        self._group = group
        self._store: Store | None = None
        self._part = ""
        # Whether ranks wait on connections kept for that, and do not poll the store.
        self.is_large = len(group.ranks) > _FEW_RANKS
        # Connections for waiting that are free.
        self._clients: list[Store] = []
        self._opening: Task[Store] | None = None
        self._closed = self._is_cut_off = False
        self._hint = hint
        self._name = name
        self._timeout_s = timeout_s
        self._limit_s = _STORE_TIMES * timeout_s
        if group.store is None or self.is_alone:
            return
        members = hashlib.sha256(repr(list(group.ranks)).encode()).hexdigest()[:16]
        self._prefix = f"localckpt/{members}/{name}"
        self._shared = PrefixStore(self._prefix, group.store)
        self._openings = _openings_in(group)
        self._given_up = Latch()
        self._deadline = Deadline.after(timeout_s)
        self._what = f"open {name!r}"
        me = group.ranks[group.rank]
        self._place = Place(group.rank, group.ranks, hint=lambda: f"{_ALIKE}{hint()}")
        self._patience = Patience(me, self._what, logging.WARNING)

    @property
    def is_alone(self) -> bool:
        return len(self._group.ranks) == 1

    @property
    def is_fork(self) -> bool:
        return os.getpid() != self._process

    def open(self, stopped: Latch, deadline: Deadline | None = None) -> Store:
        """Return the part once all ranks have come to it. After an error a new call tries again."""
        if self.is_fork:
            raise CheckpointingException(
                f"process {self._process} is a rank of the job, and this one is a fork of it: "
                f"save and load there"
            )
        if self._store is not None:
            return self._store
        self.prepare()
        opening = self._opening
        assert opening is not None, "prepare() has begun it"
        if deadline is not None and deadline.at < self._deadline.at:
            self._deadline = deadline
        try:
            opening.over.wait(self._limit_s, stopped)
            with store_errors(self._what, self._limit_s):
                self._store = opening.take_result(0)
        except AbortedError:
            # Before this rank does anything else: others may come to what it has published.
            with Shielded():
                self.cut_off()
            raise
        finally:
            if opening.done():
                self._opening = None
        return self._store

    def prepare(self) -> None:
        """Begin to open the part in the background, after those of its name that came before."""
        if self._opening is None and self._store is None and not self.is_alone:
            self._deadline = Deadline.after(self._timeout_s)
            before = self._openings.last.get(self._prefix)
            self._opening = begin(partial(self._agree_after, before))
            self._openings.last[self._prefix] = self._opening.over

    def require_same_world(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        if self._group.store is None and dist.get_world_size() > 1:
            raise MismatchError(
                f"{self._name!r} was made before torch.distributed.init_process_group(), as if "
                f"this process were alone, and the job has {dist.get_world_size()} ranks: make the "
                f"Checkpointer or the manager after the process group. Nothing was saved or read "
                f"by this call"
            )
        group = self._group
        if group.store is None or group.made_for is None:
            return
        if default_store() is not group.store:
            what = f"torch.distributed was initialised anew after {self._name!r} was made"
        elif (Standing.of(), Standing.of(group.process_group)) != group.made_for:
            what = f"the members of the process group were changed after {self._name!r} was made"
        else:
            return
        raise MismatchError(
            f"{what}: it was made by {group.made_for[0]}, and this process is {Standing.of()} now. "
            f"Close the manager (or checkpointer, queue, strategy), and make another. Nothing was "
            f"saved or read by this call"
        )

    def cut_off(self) -> None:
        """Open the part no more."""
        self._is_cut_off = True
        self.give_up()

    def give_up(self) -> bool:
        """End an opening that is under way; return whether the part is open."""
        if self._group.store is None or self.is_alone or self.is_fork:
            return False
        opening = self._opening
        if self._store is None:
            # Its thread is not to outlive this only because nothing was decided. Nor is it to come
            # to an opening that the others begin later.
            self._given_up.set()
            return opening is not None and opening.wait(_LEAVING_S) and bool(self._part)
        return True

    def close(self) -> None:
        """Let the next opening remove the keys, which other ranks may still read."""
        if self._closed or not self.give_up():
            return
        self._closed = True
        self.close_clients()
        store = PrefixStore(self._part, self._shared)
        closed = _ClosedPart(store, self._group.rank, self._is_cut_off)
        is_left = dist.is_initialized() and default_store() is not self._group.store
        now = _OPENINGS.get(default_store()) if is_left else None
        (self._closed_parts if now is None else now.before).append(closed)

    def _agree_after(self, before: Latch | None) -> Store:
        if before is not None:
            before.wait(self._deadline.left_s, self._given_up, self._openings.are_over)
        self._part = self._agreed_name()
        # All ranks have come here, so none of them is in the last call on a part before.
        while self._closed_parts:
            self._closed_parts.popleft().remove()
        if self._openings.before:
            begin(self._remove_before)
        return PrefixStore(self._part, self._shared)

    def _remove_before(self) -> None:
        """Remove what is left of the groups that the job had before, whose store may be gone."""
        before = self._openings.before
        try:
            while before:
                before.popleft().remove()
        except (dist.DistError, IndexError) as error:
            before.clear()
            logger.debug("keys of a process group before are left: %s", error)

    def fetch(self, key: str, until: float, wait: StoreWait) -> bytes | None:
        """Wait for a value of the part; ``None`` if it is not there in time."""
        wait.begun.set()
        client = self._take_client() if self.is_large else None
        if client is None:
            value = self._poll(key, until, wait)
        else:
            value = _get_in_time(client, key, until, wait.abandoned)
        if wait.abandoned.is_set():
            raise AbandonedError
        if client is not None:
            self._clients.append(client)
        return value

    def _poll(self, key: str, until: float, wait: StoreWait) -> bytes | None:
        value: bytes | None = None

        def is_over() -> bool:
            nonlocal value
            assert self._store is not None
            value = if_there(self._store, key)
            return value is not None or wait.abandoned.is_set()

        wait_until(is_over, until - time.monotonic(), longest_s=_LONGEST_PAUSE_OF_FEW_S)
        return value

    def close_clients(self) -> None:
        self._clients.clear()

    def _take_client(self) -> Store | None:
        """A connection that nobody else waits on; it is given back once it is free again."""
        with suppress(IndexError):
            return self._clients.pop()
        return self._own_client()

    def _own_client(self) -> Store | None:
        """Another connection to the store; ``None`` where the store has none to give."""
        assert self._group.store is not None
        clone = getattr(self._group.store, "clone", None)
        if clone is None:
            return None
        return PrefixStore(self._part, PrefixStore(self._prefix, clone()))

    def _agreed_name(self) -> str:
        """Wait until all ranks have come to the nonce that is published."""
        size, is_first, name, tried = len(self._group.ranks), self._group.rank == 0, "", {""}
        part: Store | None = None
        ended: bytes | None = None

        def is_over() -> bool:
            nonlocal part, name, ended
            if self._is_given_up:
                return True
            # Before the look at the verdict: who publishes another has decided this one.
            published = self._published()
            if part is not None:
                if is_first and int(part.add(_COUNT, 0)) >= size:
                    self._shared.delete_key(_PUBLISHED)
                    part.compare_set(_OPEN, "", json.dumps(Verdict().to_json()))
                ended = if_there(part, _OPEN)
            if ended is None and published not in tried:
                tried.add(published)
                name, part = published, self._come(published)
            return ended is not None or self._deadline.left_s <= 0

        def late() -> list[int]:
            if part is None:
                return [0]
            return [rank for rank in range(size) if not part.check([_came_key(rank)])] or [0]

        def whom() -> str:
            awaited = f"rank {self._group.ranks[0]}, or ranks that it names"
            if is_first:
                # No other rank looks at all of them.
                awaited = named([self._group.ranks[rank] for rank in late()], {})
            return f"{awaited}.{self._hint()}"

        if is_first:
            self._publish()
        try:
            longest_s = _LONGEST_PAUSE_S * max(1.0, size / _MANY)
            self._patience.until(is_over, self._deadline.left_s, whom, longest_s=longest_s)
            if part is None:
                raise self._failure(late()).error()
            if ended is None or self._is_given_up:
                failure = self._failure(late())
                given = json.dumps(Verdict(failure=failure).to_json())
                ended = part.compare_set(_OPEN, "", given)
            verdict = Verdict.received(json.loads(ended), bytes)
            if verdict.failure is not None:
                raise verdict.failure.error()
            tried.remove(name)
            part.delete_key(_came_key(self._group.rank))
            return name
        finally:
            rank = self._group.rank
            parts = [PrefixStore(name, self._shared) for name in tried - {""}]
            self._closed_parts.extend(_ClosedPart(part, rank) for part in parts)

    def _publish(self) -> None:
        self._shared.set(_PUBLISHED, secrets.token_hex(8))

    def _published(self) -> str:
        name = (if_there(self._shared, _PUBLISHED) or b"").decode(errors="replace")
        # It becomes a part of keys, and the store ends connections over some that others put there.
        return name if _NAMES.fullmatch(name) else ""

    def _come(self, name: str) -> Store | None:
        """Come to a nonce; ``None`` for one of an attempt that is over."""
        part = PrefixStore(name, self._shared)
        # Such a one has a verdict, or a process of this rank has come to it before.
        if if_there(part, _OPEN) is not None or int(part.add(_came_key(self._group.rank), 1)) > 1:
            return None
        part.add(_COUNT, 1)
        return part

    def _failure(self, late: Sequence[int]) -> Failure:
        """Describe this rank, which has closed the part, or those that have not come."""
        if self._is_given_up:
            return self._place.closed(self._name)
        ranks, waited_s = [self._group.ranks[rank] for rank in late], self._deadline.timeout_s
        return self._place.late(self._what, ranks, {}, waited_s)

    @property
    def _is_given_up(self) -> bool:
        return self._given_up.is_set() or self._openings.are_over.is_set()

    @property
    def _closed_parts(self) -> deque[_ClosedPart]:
        return self._openings.closed[self._prefix]


def _came_key(rank: int) -> str:
    return f"came/{rank}"


@dataclass(frozen=True, slots=True)
class _ClosedPart:
    """Part with keys of this process that nobody uses any more."""

    store: Store
    rank: int
    was_cut_off: bool = False

    def remove(self) -> None:
        remove_rounds(self.store, self.rank, was_cut_off=self.was_cut_off)
        for key in (_came_key(self.rank), *((_COUNT, _OPEN) if self.rank == 0 else ())):
            self.store.delete_key(key)


def _get_in_time(client: Store, key: str, until: float, stopped: Latch) -> bytes | None:
    """Wait for a value on a connection that nobody else uses; ``None`` if it is not in time."""
    value = b""
    # torch's server ends the waits for a key that is not there when another client compares it, as
    # :func:`if_there` does. No value that is waited for is empty.
    while not value and not stopped.is_set():
        left_s = max(0.001, until - time.monotonic())
        client.set_timeout(timedelta(seconds=min(left_s, _LONGEST_WAIT_S)))
        try:
            value = client.get(key)
        except dist.DistStoreError:
            if left_s <= _LONGEST_WAIT_S:
                return None
    return value or None


@dataclass(frozen=True, slots=True)
class _LeftKey:
    store: Store
    key: str

    def remove(self) -> None:
        self.store.delete_key(self.key)


def remove_later(store: Store, key: str) -> None:
    """Have a key removed that other ranks read now, once all have come to another part."""
    if (openings := _OPENINGS.get(default_store())) is not None:
        openings.before.append(_LeftKey(store, key))


@dataclass(slots=True)
class _Openings:
    """Openings of this process (``made_for``) in one store, for one membership of the job."""

    made_for: Standing | None
    # By prefix, set once the last opening that was begun there is over.
    last: dict[str, Latch] = field(default_factory=dict)
    # Set once the membership has changed.
    are_over: Latch = field(default_factory=Latch)
    # By prefix.
    closed: defaultdict[str, deque[_ClosedPart]] = field(default_factory=lambda: defaultdict(deque))
    # Of memberships before, and of stores of process groups before.
    before: deque[_ClosedPart | _LeftKey] = field(default_factory=deque)


# Parts of one name are opened one after another. Owners of parts know nothing of each other; what
# they share is the store, which takes no attributes. The entry goes with the store.
_OPENINGS: WeakKeyDictionary[Store, _Openings] = WeakKeyDictionary()


def _openings_in(group: Members) -> _Openings:
    assert group.store is not None, "a process that is alone opens nothing"
    made_for = group.made_for and group.made_for[0]
    openings = _OPENINGS.get(group.store)
    if openings is None or openings.made_for != made_for:
        if openings is not None:
            openings.are_over.set()
        left = list(_OPENINGS.values())
        openings = _OPENINGS[group.store] = _Openings(made_for)
        for other in left:
            openings.before.extend(other.before)
            other.before.clear()
            for parts in other.closed.values():
                openings.before.extend(parts)
                parts.clear()
    return openings
