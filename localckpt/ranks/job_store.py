"""The job's key-value store, and how a group of ranks opens a part of it that nobody has used.

A store may outlive an attempt of the job: torchrun can keep one over its restarts, and so do the
keys of ranks that died at any point. A part is therefore opened by a handshake (``opening.py``),
which draws its name: names never follow from what a process has made before, of which others may
have made less, or nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import median
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.ranks.asking import StoreWait, ask_store, store_errors
from localckpt.ranks.deadline import Deadline, begin
from localckpt.ranks.opening import Opening
from localckpt.ranks.values import if_there
from localckpt.threads import Latch, Task, wait_for_any
from localckpt.waiting import back_off

__all__ = ["AbandonedError", "Group", "Standing", "StorePart", "default_store", "group_ranks"]

logger = logging.getLogger(__name__)

# Time for the store itself, beyond the wait for other ranks.
_STORE_TIMES = 2
# Of one message; without a deadline another one follows.
_LONGEST_WAIT_S = 86400.0
_LEAVING_S = 1.0
# Up to so many ranks, asking again and again is cheaper than a connection to wait on.
_FEW_RANKS = 64
_LONGEST_PAUSE_OF_FEW_S = 0.02
# Fewer ranks ask as often as they like. Else so many waits say how long the next one usually takes,
# and so much of it is slept at once.
_VERY_FEW_RANKS, _WAITS, _SLEPT, _LONGEST_FIRST_PAUSE_S = 16, 5, 0.9, 0.05


@dataclass(frozen=True, slots=True)
class Standing:
    """This process in a process group, as torch tells it at the moment. Comparing sends nothing.

    Attributes:
        rank: Its rank there; -1 if it is not in the group.
        size: Number of ranks.
        version: Changes when the group's members are changed in place, where torch tells.
    """

    rank: int
    size: int
    version: str = ""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Standing:
        """Look at a process group; ``None`` for that of all ranks."""
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialised"
        version = ""
        # Other backends may draw a new handle at each look.
        if getattr(group, "supports_reconfigure", False) and group.name() == "gloo":
            version = group.get_reconfigure_handle()  # type: ignore[attr-defined]
        return cls(group.rank(), group.size(), version)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that work together, and the job's store as this process sees it.

    Attributes:
        rank: This process's place among ``ranks``.
        ranks: The ranks of the group, as ranks of the job.
        store: The job's store; ``None`` for a process that is alone.
        process_group: Their process group; ``None`` for that of all ranks.
        made_for: This process in the job and in that group when this was made; ``None`` without
            torch.distributed.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Store | None
    process_group: dist.ProcessGroup | None = None
    made_for: tuple[Standing, Standing] | None = None

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
        members = group_ranks(process_group) if ranks is None else list(ranks)
        if dist.get_rank() not in members:
            raise MismatchError(
                f"rank {dist.get_rank()} is not among the ranks {list(members)} that are to work "
                f"together: make it on those alone"
            )
        made_for = Standing.of(), Standing.of(process_group)
        rank = members.index(dist.get_rank())
        return cls(rank, tuple(members), default_store(), process_group, made_for)


class AbandonedError(Exception):
    """Ends a thread for which nobody waits any more."""


class StorePart:
    """A fresh part of the job's store for some ranks, opened when it is used first.

    All ranks of the group use their parts of one name first in the same order; whoever does waits
    until all have. One that only some ranks have made, and that none uses, is in nobody's way.
    Without torch.distributed it is a world of one, which has no store.

    Args:
        name: Keeps the part apart from others that the same ranks open at the same time.
        group: The ranks.
        timeout_s: How long to wait for the other ranks, in seconds.
        remove_keys: ``remove_keys(store, rank)`` deletes what a rank has written into a part. It is
            called for parts that were closed, and for those that an earlier process of this rank
            left.
        hint: As for :class:`Opening`.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        timeout_s: float,
        *,
        remove_keys: Callable[[Store, int], None],
        hint: Callable[[], str] = str,
    ) -> None:
        self._process = os.getpid()
        self._group = group
        self._store: Store | None = None
        # Connections for waiting: those that are free, and the one of the thread that listens.
        self._clients: list[Store] = []
        self._listener: Store | None = None
        self._opening: Task[Store] | None = None
        self._closed = False
        # The last waits that were not in vain, in seconds.
        self._waits_s: deque[float] = deque(maxlen=_WAITS)
        self._remove_keys = remove_keys
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

    @property
    def is_alone(self) -> bool:
        """True if there is no store, because the rank is alone."""
        return len(self._group.ranks) == 1

    @property
    def is_open(self) -> bool:
        """True if :meth:`open` returns, or raises, without waiting for other ranks."""
        if self.is_alone or self._store is not None:
            return True
        return self._opening is not None and self._opening.done()

    @property
    def is_fork(self) -> bool:
        """True if this process is a fork of the rank, and shares its connection to the store."""
        return os.getpid() != self._process

    def open(self, stopped: Latch, deadline: Deadline | None = None) -> Store:
        """Return the part, once all ranks have come to it.

        Args:
            stopped: Ends the wait.
            deadline: Deadline of the wait, where that is earlier than the part's own.

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
        self.prepare()
        opening = self._opening
        assert opening is not None, "prepare() has begun it"
        if deadline is not None and deadline.at < self._deadline.at:
            self._deadline = deadline
        try:
            wait_for_any([opening.over, stopped], self._limit_s)
            with store_errors(f"open {self._name!r}", self._limit_s):
                self._store = opening.result(0)
        finally:
            if opening.done():
                self._opening = None
            # An error keeps the frames that it came through: it must not be in one of them itself.
            del opening
        return self._store

    def prepare(self) -> None:
        """Begin to open the part in the background, after those of its name that came before."""
        if self._opening is None and self._store is None and not self.is_alone:
            self._deadline = Deadline.after(self._timeout_s)
            before, over = self._openings.last.get(self._prefix), Latch()
            self._opening = begin(partial(self._agree_after, before, over))
            self._openings.last[self._prefix] = over

    def require_same_world(self) -> None:
        """Check that the job's process group is the one for which this part was made.

        Raises:
            MismatchError: Another one was made since, or its members were changed.
        """
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

    def close(self) -> None:
        """Note that no rank calls anything here any more; the next opening removes the keys.

        Another rank may be reading them still. May be called twice, and in a fork.
        """
        if self._group.store is None or self.is_alone or self._closed or self.is_fork:
            return
        opening = self._opening
        if self._store is None:
            # Its thread is not to outlive this, nor its keys, only because nothing was decided.
            self._given_up.set()
            if opening is None or not opening.wait(_LEAVING_S) or opening.error:
                return
        self._closed = True
        self.hang_up()
        try:
            ask_store("leave the job's store", _LEAVING_S, self._note_closed)
        except PeerLostError as error:
            # Most often the process that hosts the store has ended, and the keys with it.
            logger.debug("%s", error)

    def _agree_after(self, before: Latch | None, over: Latch) -> Store:
        try:
            if before is not None:
                over_before = [before, self._given_up, self._openings.are_over]
                wait_for_any(over_before, self._deadline.left_s)
            opening = Opening(
                self._shared,
                self._name,
                self._group.rank,
                self._group.ranks,
                lambda: self._deadline,
                lambda: self._given_up.is_set() or self._openings.are_over.is_set(),
                self._hint,
            )
            self._part = opening.agree()
            # All ranks have come here, so none of them is in the last call on a part before.
            self._note_opened()
            return PrefixStore(self._part, self._shared)
        finally:
            over.set()

    def fetch(self, key: str, until: float, wait: StoreWait) -> bytes | None:
        """Wait for a value of the part.

        Args:
            key: Its key.
            until: The deadline, by the monotonic clock.
            wait: Told that nothing is left to do but to wait, and when the store has answered.

        Returns:
            The value; ``None`` if it is not there in time.

        Raises:
            AbandonedError: The thread that waits has been abandoned.
        """
        wait.begun.set()
        client = self._take_client() if self._is_large else None
        if client is None:
            value = self._poll(key, until, wait.abandoned, wait.expect)
        else:
            wait.expect(until)
            value = _get_in_time(client, key, until)
            wait.expect()
        if wait.abandoned.is_set():
            raise AbandonedError
        if client is not None:
            self._clients.append(client)
        return value

    def _poll(
        self,
        key: str,
        until: float,
        stopped: Latch,
        heard: Callable[[], None] | None = None,
        longest_pause_s: float = _LONGEST_PAUSE_OF_FEW_S,
    ) -> bytes | None:
        """Ask again and again; in a world of some size first when the usual wait is almost over.

        ``heard()`` is called after each answer.
        """
        assert self._store is not None
        began = time.monotonic()
        pause_s, pauses = 0.0, back_off(longest_s=longest_pause_s)
        if len(self._group.ranks) > _VERY_FEW_RANKS and self._waits_s:
            pause_s = min(_SLEPT * median(self._waits_s), _LONGEST_FIRST_PAUSE_S)
            pauses = back_off(longest_s=longest_pause_s, share=1 / 2)
        while not stopped.wait(min(pause_s, max(0.0, until - time.monotonic()))):
            value = if_there(self._store, key)
            if heard is not None:
                heard()
            if value is not None:
                self._waits_s.append(time.monotonic() - began)
                return value
            if time.monotonic() > until:
                return None
            pause_s = next(pauses)
        return None

    def listener(
        self, stopped: Latch, longest_pause_s: float = _LONGEST_PAUSE_OF_FEW_S
    ) -> tuple[Store, Callable[[str, float], bytes | None]]:
        """The part for a thread that waits without a deadline, and how that thread waits.

        Args:
            stopped: Ends the wait; in a large world it is looked at when a value is there, or a
                wait has reached its deadline.
            longest_pause_s: Longest pause before a small world asks again, in seconds.
        """
        assert self._store is not None
        if self._is_large and self._listener is None:
            self._listener = self._take_client()
        if (client := self._listener) is None:
            return self._store, lambda key, until: self._poll(
                key, until, stopped, longest_pause_s=longest_pause_s
            )

        def fetch(key: str, until: float) -> bytes | None:
            value = None
            while value is None and not stopped.is_set() and time.monotonic() < until:
                value = _get_in_time(client, key, until)
            return value

        return client, fetch

    def hang_up(self) -> None:
        """Give up the connections that were made for waiting."""
        self._listener = None
        self._clients.clear()

    @property
    def _is_large(self) -> bool:
        """True if ranks wait on connections kept for that, and do not poll the root's process."""
        return len(self._group.ranks) > _FEW_RANKS

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

    def _note_opened(self) -> None:
        """Note the part for later openings, and remove this rank's keys of those nobody uses."""
        with self._openings.noting:
            notes = self._notes()
            for part, (process, is_closed) in list(notes.items()):
                if is_closed or process != self._openings.process:
                    self._remove_keys(PrefixStore(part, self._shared), self._group.rank)
                    del notes[part]
            notes[self._part] = self._openings.process, False
            self._write(notes)

    def _note_closed(self) -> None:
        """Note that this rank's keys can be removed."""
        with self._openings.noting:
            notes = self._notes()
            # Another process may have the number of this rank now.
            if self._part in notes:
                notes[self._part] = self._openings.process, True
                self._write(notes)

    def _notes(self) -> dict[str, tuple[str, bool]]:
        """Read this rank's parts: for each its process, and whether it is closed."""
        text = if_there(self._shared, f"parts/{self._group.rank}") or b"{}"
        return {part: (process, closed) for part, (process, closed) in json.loads(text).items()}

    def _write(self, notes: dict[str, tuple[str, bool]]) -> None:
        self._shared.set(f"parts/{self._group.rank}", json.dumps(notes))


def _get_in_time(client: Store, key: str, until: float) -> bytes | None:
    """Wait for a value on a connection that nobody else uses; ``None`` if it is not in time."""
    value = b""
    # torch's server ends the waits for a key that is not there when another client compares it, as
    # :func:`if_there` does. No value that is waited for is empty.
    while not value:
        left_s = min(max(0.001, until - time.monotonic()), _LONGEST_WAIT_S)
        client.set_timeout(timedelta(seconds=left_s))
        try:
            value = client.get(key)
        except dist.DistStoreError:
            return None
    return value


def group_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """Ranks of a process group in the job; ``None`` for that of all ranks."""
    if group is None or group is dist.group.WORLD:
        # torch's list of its ranks is that of the beginning, also when they were changed.
        return list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(group)


def default_store() -> Store:
    """The key-value store of the default process group."""
    # torch has no public accessor for it; this is the one place that asks.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@dataclass(slots=True)
class _Openings:
    """Openings of this process in one store, for one membership of the job.

    Attributes:
        made_for: This process in the job.
        process: Random name of the process for notes in the store.
        last: By prefix, set once the last opening that was begun there is over.
        are_over: Set once the membership has changed.
        noting: Held while notes are changed.
    """

    made_for: Standing | None
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    last: dict[str, Latch] = field(default_factory=dict)
    are_over: Latch = field(default_factory=Latch)
    noting: threading.Lock = field(default_factory=threading.Lock)


# Parts of one name are opened one after another. Owners of parts know nothing of each other; what
# they share is the store, which takes no attributes. The entry goes with the store.
_OPENINGS: WeakKeyDictionary[Store, _Openings] = WeakKeyDictionary()


def _openings_in(group: Group) -> _Openings:
    assert group.store is not None, "a process that is alone opens nothing"
    made_for = group.made_for and group.made_for[0]
    openings = _OPENINGS.get(group.store)
    if openings is None or openings.made_for != made_for:
        if openings is not None:
            openings.are_over.set()
        openings = _OPENINGS[group.store] = _Openings(made_for)
    return openings


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
