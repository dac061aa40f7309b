"""gloo connections between ranks, for host memory: made, used and cut here only.

They belong to no group that torch.distributed knows of, or to a group of the caller's. What is sent
over them, and in which order, is for others to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.coordination import default_store
from localckpt.deadline import within
from localckpt.errors import MismatchError, PeerLostError
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.ledger import first_line
from localckpt.state_dict.source import MemorySource, ShardSource

__all__ = ["NEVER", "HostConnections", "as_tensor", "nothing", "views_last"]

NEVER = 3
"""A tag that no message may have."""

# gloo waits as long as it is told for other ranks, and without end for the store.
_CONNECTING_TIMES = 2


class HostConnections:
    """Each of some ranks, connected to each other one.

    Args:
        group: What sends and receives: a process group of torch's.
        ranks: The ranks of the job that are connected, in the group's order.
        rank: This rank of the job.
        store: A part of the job's key-value store that nobody else uses, if there is one.
    """

    def __init__(
        self, group: Any, ranks: Sequence[int], rank: int, store: Store | None = None
    ) -> None:
        self._group = group
        self.ranks = list(ranks)
        self.rank = rank
        self.store = store

    @classmethod
    def of(cls, group: GroupWrapper | dist.ProcessGroup | None) -> HostConnections:
        """The connections of a group that is the caller's."""
        members = GroupWrapper.wrap(group)
        return cls(members.group, members.ranks, members.my_global_rank)

    @classmethod
    def connect(
        cls, name: str, ranks: Sequence[int], rank: int, timeout_s: float
    ) -> HostConnections:
        """New connections, whose failure touches no group; see :meth:`HostTransport.connect`."""

        def make() -> tuple[Any, Store]:
            # A client of its own: it waits for other ranks, and nobody else could ask meanwhile.
            client = default_store().clone()  # type: ignore[attr-defined]
            store = PrefixStore(f"localckpt/transport/{name}", client)
            deadline = timedelta(seconds=timeout_s)
            return dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), deadline), store

        try:
            # The store's client, which it uses, waits for ever for a host that cannot be reached.
            gloo, store = within(_CONNECTING_TIMES * timeout_s, make)
        except (RuntimeError, TimeoutError) as error:
            raise PeerLostError(
                f"rank {rank} could not connect to ranks {list(ranks)} within {timeout_s:g} s "
                f"({first_line(error) or 'no answer'}). Shards kept on this node are untouched; "
                f"restart the job if one of these ranks has died."
            ) from error
        return cls(gloo, ranks, rank, store)

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
        self._group = None

    def _place(self, peer: int) -> int:
        if peer not in self.ranks:
            raise MismatchError(f"rank {peer} is not among the ranks {self.ranks} that exchange")
        return self.ranks.index(peer)


def as_tensor(view: memoryview) -> torch.Tensor:
    """The memory of a writable view, which must stay alive while the tensor is used."""
    return torch.frombuffer(view, dtype=torch.uint8)


def nothing() -> torch.Tensor:
    """An empty message, which cannot arrive in part."""
    return torch.empty(0, dtype=torch.uint8)


def views_last(source: ShardSource) -> bool:
    """Whether what a source has read stays valid when it reads on."""
    return isinstance(source, MemorySource) or getattr(source, "views_last", False)
