"""A part of the job's store that nobody has used, found by a nonce that the root draws.

A store may outlive an attempt of the job: torchrun can keep one over its restarts, and so do the
keys of ranks that died at any point. No launcher's count of restarts names an attempt: torchrun's
differs between nodes. So the root publishes a nonce, all ranks meet under it in a round as any
other, and the root withdraws it before it gives the verdict: a nonce that is found published is
new, or of an attempt in which nothing was said, which the next root tells to who comes to it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import inf
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.errors import AbortedError, CheckpointingException, MismatchError
from localckpt.ranks.deadline import Deadline, Patience, StoreWait, begin, store_errors
from localckpt.ranks.failure import OPENING, Place
from localckpt.ranks.job_store import Members, Standing, default_store
from localckpt.ranks.round import Round, remove_rounds
from localckpt.ranks.values import if_there
from localckpt.ranks.verdict import Call, Verdict
from localckpt.threads import Latch, Shielded, Task
from localckpt.waiting import wait_until

T = TypeVar("T")

logger = logging.getLogger(__name__)

# More ranks than that ask less often, so that the store has no more to answer.
_LONGEST_PAUSE_S, _MANY = 0.25, 1024
_ALIKE = " All ranks make the same calls in the same order."
_PUBLISHED = "opening"

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

    def __init__(self, name: str, group: Members, place: Place, timeout_s: float) -> None:
        self._process = os.getpid()
        self._name, self._group, self._timeout_s = name, group, timeout_s
        self._store: Store | None = None
        # The nonce, once all ranks have come to it.
        self._part = ""
        # Whether ranks wait on connections kept for that, and do not poll the store.
        self.is_large = len(group.ranks) > _FEW_RANKS
        # Connections for waiting that are free.
        self._clients: list[Store] = []
        self._opening: Task[Store] | None = None
        self._closed = self._is_cut_off = False
        # End of the waits of an opening, if that is before its deadline.
        self._latest = inf
        if group.store is None or self.is_alone:
            return
        members = hashlib.sha256(repr(list(group.ranks)).encode()).hexdigest()[:16]
        self._prefix = f"localckpt/{members}/{name}"
        self._shared = PrefixStore(self._prefix, group.store)
        self._openings = _openings_in(group)
        self._given_up = Latch()
        self._place = replace(place, hint=lambda: f"{_ALIKE}{place.hint()}")
        self._patience = Patience(place.me, f"open {name!r}", logging.WARNING)

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
        if deadline is not None:
            self._latest = min(self._latest, deadline.at)
        limit_s = _STORE_TIMES * self._timeout_s
        try:
            opening.over.wait(limit_s, stopped)
            with store_errors(f"open {self._name!r}", limit_s):
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
            self._latest, deadline = inf, Deadline.after(self._timeout_s)
            before = self._openings.last.get(self._prefix)
            self._opening = begin(partial(self._agree_after, before, deadline))
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
        self._is_open_at_last()

    def close(self) -> None:
        """Let the next opening remove the keys, which other ranks may still read."""
        if self._closed or not self._is_open_at_last():
            return
        self._closed = True
        self.close_clients()
        is_left = dist.is_initialized() and default_store() is not self._group.store
        now = _OPENINGS.get(default_store()) if is_left else None
        of_prefix = self._openings.closed[self._prefix]
        (of_prefix if now is None else now.before).append(self._removal(self._part))

    def _is_open_at_last(self) -> bool:
        """End an opening that is under way; return whether the part is open."""
        if self._group.store is None or self.is_alone or self.is_fork:
            return False
        if self._store is not None:
            return True
        # Its thread is not to outlive this only because nothing was decided. Nor is it to come to
        # an opening that the others begin later.
        self._given_up.set()
        return (self._opening is None or self._opening.wait(_LEAVING_S)) and bool(self._part)

    # Connections for waits.

    def fetch(self, key: str, until: float, wait: StoreWait) -> bytes | None:
        """Wait for a value of the part; ``None`` if it is not there in time."""
        assert self._store is not None
        wait.begun.set()
        client: Store | None = None
        if self.is_large:
            with suppress(IndexError):
                client = self._clients.pop()
            client = client or self._own_client()
        if client is None:
            value = _poll(self._store, key, until, wait.abandoned)
        else:
            value = _get_in_time(client, key, until, wait.abandoned)
        if wait.abandoned.is_set():
            raise AbandonedError
        if client is not None:
            self._clients.append(client)
        return value

    def close_clients(self) -> None:
        self._clients.clear()

    def _own_client(self) -> Store | None:
        """Another connection to the store; ``None`` where the store has none to give."""
        clone = getattr(self._group.store, "clone", None)
        return clone and PrefixStore(self._part, PrefixStore(self._prefix, clone()))

    # What follows runs in the thread that opens the part.

    def _agree_after(self, before: Latch | None, deadline: Deadline) -> Store:
        openings = self._openings
        if before is not None:
            before.wait(deadline.left_s, self._given_up, openings.are_over)
        try:
            self._part = self._agreed_name(deadline)
        except AbandonedError:
            raise self._place.closed(self._name).error() from None
        # All ranks have come here, so none of them is in the last call on a part before.
        closed = openings.closed[self._prefix]
        while closed:
            closed.popleft()()
        if openings.before:
            begin(openings.remove_before)
        return PrefixStore(self._part, self._shared)

    def _agreed_name(self, deadline: Deadline) -> str:
        """Meet the other ranks in a round under the nonce that was published last."""
        place, tried, what = self._place, list[str](), f"open {self._name!r}"
        root, shared = place.ranks[place.root], self._shared
        call = Call(what, None, None, lambda _: shared.delete_key(_PUBLISHED) or True, deadline)
        try:
            while True:
                if place.is_root:
                    name: str | None = self._publish(tried)
                else:
                    new = partial(self._published, tried)
                    name = self._look(new, deadline.at, lambda: f"rank {root}")
                if name is None:
                    raise place.late(what, [root], {}, deadline.waited_s).error()
                tried.append(name)
                round_ = self._round(name)
                # Else it is of an attempt that is over.
                if not round_.is_known():
                    try:
                        verdict, _ = round_.take_part(call)
                    except AbandonedError:
                        verdict = round_.give(Verdict(failure=place.closed(self._name)))
                    if verdict.failure is not None:
                        raise verdict.failure.error()
                    if verdict.value is True:
                        return tried.pop()
        finally:
            self._openings.closed[self._prefix].extend(map(self._removal, tried))

    def _publish(self, tried: list[str]) -> str:
        """Draw a nonce; whoever waits under one of an attempt before is to look for this one."""
        if before := self._published():
            # What stands there in its place decides nothing here, even if it cannot be read.
            with suppress(MismatchError), store_errors(f"end the opening of {self._name!r} before"):
                self._round(before).give(Verdict(False))
            tried.append(before)
        name = secrets.token_hex(8)
        self._shared.set(_PUBLISHED, name)
        return name

    def _published(self, tried: Sequence[str] = ()) -> str | None:
        name = (if_there(self._shared, _PUBLISHED) or b"").decode(errors="replace")
        # It becomes a part of keys, and the store ends connections over some that others put there.
        return name if _NAMES.fullmatch(name) and name not in tried else None

    def _round(self, name: str) -> Round:
        store = PrefixStore(name, self._shared)

        def fetch(key: str, until: float) -> bytes | None:
            return self._look(lambda: if_there(store, key), until, round_.awaited)

        round_ = Round(store, self._place, OPENING, fetch)
        return round_

    def _look(
        self, look: Callable[[], T | None], until: float, whom: Callable[[], str]
    ) -> T | None:
        """Look again and again until there is something; ``None`` if there is not in time."""
        found: T | None = None

        def is_over() -> bool:
            nonlocal found
            if self._given_up.is_set() or self._openings.are_over.is_set():
                raise AbandonedError
            found = look()
            return found is not None or time.monotonic() >= self._latest

        longest_s = _LONGEST_PAUSE_S * max(1.0, len(self._place.ranks) / _MANY)
        self._patience.until(is_over, until - time.monotonic(), whom, longest_s=longest_s)
        return found

    def _removal(self, name: str) -> Callable[[], None]:
        store, place = PrefixStore(name, self._shared), self._place
        return partial(remove_rounds, store, place.rank, place.is_root or self._is_cut_off)


def _poll(store: Store, key: str, until: float, stopped: Latch) -> bytes | None:
    value: bytes | None = None

    def is_over() -> bool:
        nonlocal value
        value = if_there(store, key)
        return value is not None or stopped.is_set()

    wait_until(is_over, until - time.monotonic(), longest_s=_LONGEST_PAUSE_OF_FEW_S)
    return value


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


def remove_later(store: Store, key: str) -> None:
    """Have a key removed that other ranks read now, once all have come to another part."""
    if not dist.is_initialized():
        # A process beside the job has no parts: the rank that it was to connect to removes the key.
        return
    if (openings := _OPENINGS.get(default_store())) is not None:
        openings.before.append(lambda: store.delete_key(key))


@dataclass(slots=True)
class _Openings:
    """Openings of this process (``made_for``) in one store, for one membership of the job."""

    made_for: Standing | None
    # By prefix, set once the last opening that was begun there is over.
    last: dict[str, Latch] = field(default_factory=dict)
    # Set once the membership has changed.
    are_over: Latch = field(default_factory=Latch)
    # What removes the keys of parts that nobody uses any more, by prefix.
    closed: defaultdict[str, deque[Callable[[], object]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    # The same for memberships before, and for stores of process groups before.
    before: deque[Callable[[], object]] = field(default_factory=deque)

    def remove_before(self) -> None:
        """Remove what is left of the groups that the job had before, whose store may be gone."""
        try:
            while self.before:
                self.before.popleft()()
        except (dist.DistError, IndexError) as error:
            self.before.clear()
            logger.debug("keys of a process group before are left: %s", error)


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
            for removals in (other.before, *other.closed.values()):
                openings.before.extend(removals)
                removals.clear()
    return openings
