"""Transports: images and messages sent between ranks, with a deadline.

A transport knows neither shards nor plans: it is told how many bytes go to and come from which
rank, and so are the other ranks. Cliques of states on GPUs have a :class:`DeviceTransport` beside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from torch._C._distributed_c10d import Store

from localckpt.replication.connections import HostConnections
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.messages import Messages
from localckpt.replication.progress import Progress, Receives, Sends


class Transport(Protocol):
    """Connections of this rank to others, over which images and messages are sent.

    To add one: a module beside this one, and a choice in :func:`connect`. One whose connections
    alone differ is a :class:`HostTransport` over :class:`.messages.Connections` of its own.
    """

    rank: int
    ranks: list[int]
    """The ranks that are connected, this one among them."""
    broken: bool
    """True if something failed, or was ended: a new transport is needed."""
    progress: Progress | None
    """Progress of what was begun last; ``None`` before."""

    def exchange(self, sends: Sends, receives: Receives, timeout_s: float) -> None:
        """Send images to ranks of the job, and receive others; the ranks call it together.

        Several images between the same two ranks are listed in the same order by both. When it
        raises, nothing is read from or written to the memory any more. ``timeout_s`` is the
        deadline of the whole exchange, later by :meth:`limited_s`.
        """

    def run(self, progress: Progress, work: Callable[[Messages], None]) -> None:
        """Do work that sends and takes messages, within the deadline of its progress.

        When it raises, the connections are cut, and the memory of its messages is not used any
        more. Connections that break are a PeerLostError.
        """

    def limited_s(self, nbytes: int) -> float:
        """Return the seconds that a rate limit makes so many bytes take at least."""

    def abort(self) -> None:
        """End what is under way in another thread, with an error there."""

    def close(self) -> None:
        """Give up the connections that this transport opened itself."""


def connect(
    name: str,
    ranks: Collection[int],
    rank: int,
    timeout_s: float,
    *,
    in_pairs: bool = False,
    rate_limit: float | None = None,
    is_given_up: Callable[[], bool] = lambda: False,
    store: Store | None = None,
) -> Transport:
    """Connect to other ranks, by a ``name`` that was not used before in this job.

    ``ranks`` all call it together, with the same list; ``in_pairs`` they are the peers of this rank
    only, which name this one, too. ``is_given_up`` is asked meanwhile, by another thread: whether
    to stop. A rank that does not connect is a PeerLostError. They find each other in ``store``, if
    not in that of the job.
    """
    connections = HostConnections(
        name, ranks, rank, timeout_s, is_given_up, in_pairs=in_pairs, store=store
    )
    return HostTransport(connections, rate_limit=rate_limit)
