"""gloo connections between ranks, for host memory: made, used and cut here only.

They belong to no group that torch.distributed knows of, or to a group of the caller's. What is sent
over them, and in which order, is for others to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.errors import MismatchError, PeerLostError
from localckpt.ranks.deadline import begin
from localckpt.ranks.job_store import ask_store, default_store
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.ledger import first_line
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.threads import Task

__all__ = ["NEVER", "HostConnections", "as_tensor", "nothing", "views_last"]

logger = logging.getLogger(__name__)

NEVER = 3
"""A tag that no message may have."""

# gloo waits as long as it is told for other ranks, and without end for the store.
_CONNECTING_TIMES = 2
_LEAVING_S = 1.0
_LOOK_ROUND_S = 0.02
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.02


class HostConnections:
    """Each of some ranks, connected to each other one.

    Args:
        group: What sends and receives: a process group of torch's.
        ranks: The ranks of the job that are connected, in the group's order.
        rank: This rank of the job.
        store: A part of the job's key-value store that nobody else uses, if there is one.
        asking: What the group has of it, which is Python's to keep.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        rank: int,
        store: Store | None = None,
        asking: _AskingStore | None = None,
    ) -> None:
        self._group = group
        self._asking = asking
        self._process = os.getpid()
        self.ranks = list(ranks)
        self.rank = rank
        self.store = store
        self.given_up = False
        """Whether this rank has cut them because it does not wait for the others any more."""

    @classmethod
    def of(cls, group: GroupWrapper | dist.ProcessGroup | None) -> HostConnections:
        """The connections of a group that is the caller's."""
        members = GroupWrapper.wrap(group)
        return cls(members.group, members.ranks, members.my_global_rank)

    @classmethod
    def connect(
        cls,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> HostConnections:
        """New connections, whose failure touches no group; see :meth:`HostTransport.connect`."""

        store = PrefixStore(f"localckpt/transport/{name}", default_store())
        deadline = timedelta(seconds=timeout_s)
        asking = _AskingStore(store, deadline, is_given_up)

        def make() -> Any:
            return dist.ProcessGroupGloo(asking, ranks.index(rank), len(ranks), deadline)

        try:
            # The store's client, which it uses, waits for ever for a host that cannot be reached,
            # and gloo for a rank that has died since it told its address.
            gloo = _unless_given_up(begin(make), _CONNECTING_TIMES * timeout_s, is_given_up)
        except (RuntimeError, TimeoutError) as error:
            asking.close()
            raise PeerLostError(
                f"rank {rank} could not connect to ranks {list(ranks)} within {timeout_s:g} s "
                f"({first_line(error) or 'no answer'}). Shards kept on this node are untouched; "
                f"restart the job if one of these ranks has died."
            ) from error
        return cls(gloo, ranks, rank, store, asking)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send; gloo drops a message whose work object is dropped before it was sent."""
        work: dist.Work = self._group.send([tensor], self._place(peer), tag)
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Ask for a message; it may come at any time from now on."""
        work: dist.Work = self._group.recv([tensor], self._place(peer), tag)
        return work

    def disconnect(self) -> None:
        """Close all connections, so that peers stop waiting and late bytes go nowhere."""
        if os.getpid() != self._process:
            # A fork has the sockets, too, and must not end what the trainer sends over them.
            return
        # Once, since another thread may close these connections meanwhile.
        group = self._group
        for place, peer in enumerate(self.ranks if group is not None else ()):
            # A wait that runs out is gloo's one way to close every connection of a group; on a
            # connection that is closed already, there is no wait.
            with contextlib.suppress(RuntimeError):
                if peer != self.rank:
                    group.recv([nothing()], place, NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Connections of our own end with the last reference; a caller's group is the caller's."""
        if os.getpid() != self._process:
            return
        self._group = None
        if self._asking is not None:
            self._asking.close()

    def _place(self, peer: int) -> int:
        if peer not in self.ranks:
            raise MismatchError(f"rank {peer} is not among the ranks {self.ranks} that exchange")
        return self.ranks.index(peer)


class _AskingStore(Store):
    """What gloo finds other ranks by: a wait asks the job's store again and again.

    A wait on the store would hold up all other users of this process's client, and a client of its
    own takes a reverse look-up of the host's name to connect, which may take seconds.

    Args:
        store: A part of the job's store.
        longest: How long a wait may take that is given no deadline.
        is_given_up: Whether waits are to end now.
    """

    def __init__(self, store: Store, longest: timedelta, is_given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._longest = longest
        self._is_given_up = is_given_up
        self._keys: list[str] = []

    def close(self) -> None:
        """Remove what was set here: ranks that are connected do not look for it again."""
        keys, self._keys = self._keys, []

        def remove() -> None:
            for key in keys:
                self._store.delete_key(key)

        try:
            ask_store("remove the addresses of connections", _LEAVING_S, remove)
        except PeerLostError as error:
            # Most often the process that hosts the store has ended, and the keys with it.
            logger.debug("%s", error)

    def has_extended_api(self) -> bool:
        """Without it gloo uses what is here, and nothing else."""
        return False

    def set(self, key: str, value: str | bytes) -> None:
        self._keys.append(key)
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """What is there; gloo has waited for it."""
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        deadline = time.monotonic() + (timeout or self._longest).total_seconds()
        nap_s = _SHORTEST_NAP_S
        while not self._store.check(keys):
            if self._is_given_up():
                raise TimeoutError("it is not waited for any more")
            if time.monotonic() > deadline:
                raise TimeoutError("they did not all come")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def _unless_given_up(outcome: Task[Any], timeout_s: float, is_given_up: Callable[[], bool]) -> Any:
    """What comes of a call in another thread.

    Raises:
        TimeoutError: It is not over in time, or given up; it goes on, and its outcome is lost.
    """
    deadline = time.monotonic() + timeout_s
    while not outcome.done() and time.monotonic() < deadline and not is_given_up():
        outcome.wait(_LOOK_ROUND_S)
    try:
        return outcome.result(0)
    finally:
        # An error keeps the frames that it came through: it must not be in one of them itself.
        del outcome


def as_tensor(view: memoryview) -> torch.Tensor:
    """The memory of a writable view, which must stay alive while the tensor is used."""
    return torch.frombuffer(view, dtype=torch.uint8)


def nothing() -> torch.Tensor:
    """An empty message, which cannot arrive in part."""
    return torch.empty(0, dtype=torch.uint8)


def views_last(source: ShardSource) -> bool:
    """Whether what a source has read stays valid when it reads on."""
    return isinstance(source, MemorySource) or getattr(source, "views_last", False)
