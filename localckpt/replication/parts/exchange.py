"""Exchange of parts of tensors between ranks: over links within a node, else over gloo.

A sender sends parts as it reads them, in whatever order that is, and a receiver takes each where it
belongs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from localckpt.pacing import Pacer
from localckpt.replication.connections import HostConnections
from localckpt.replication.links import Links
from localckpt.replication.messages import Messages
from localckpt.replication.parts.linked import LinkedPart, LinkOutlet, take_all
from localckpt.replication.parts.messages import Inlet, Outlet, SentPart
from localckpt.replication.progress import Progress
from localckpt.state_dict.runs import PartReceiver
from localckpt.threads import run_interruptibly

__all__ = ["Find", "To", "exchange_parts"]

To = Callable[[int, int, int], PartReceiver]
"""``to(rank, item, index)``: receiver of another rank's part."""

Find = Callable[[int, int, int], PartReceiver]
"""``find(peer, item, index)``: receiver of this rank's part that a peer has sent something of.

An item is what a rank takes of one shard, by its number; the index is that of a part of it."""


def exchange_parts(
    rank: int,
    links: Links,
    connections: HostConnections | None,
    receivers: Mapping[int, int],
    senders: Mapping[int, int],
    send: Callable[[To], None],
    find: Find,
    timeout_s: float,
) -> None:
    """Send parts to ranks, and take those that ranks send here, at once.

    Args:
        rank: This rank.
        links: Links to ranks of this node.
        connections: Connections to all other ranks; ``None`` if there are none.
        receivers, senders: Ranks that this one sends to, and gets parts from, with the bytes of
            the parts.
        send: Sends all parts to the receivers that it is given; it may use several threads.
        find: Finds who takes a part that came; called by a thread for each sender.
        timeout_s: Deadline of it all, in seconds.

    Raises:
        PeerLostError: A rank did not send or take all in time, or its connection broke.
        CheckpointingException: ``send`` failed; the peers see this rank as lost.
    """
    progress = Progress(rank, timeout_s)
    for peer, nbytes in receivers.items():
        progress.expect(peer, sent=nbytes)
    for peer, nbytes in senders.items():
        progress.expect(peer, received=nbytes)
    exchange = _Exchange(links, connections, progress, find)
    run_interruptibly(lambda: exchange.run(receivers, senders, send), exchange.abort)


class _Exchange:
    def __init__(
        self, links: Links, connections: HostConnections | None, progress: Progress, find: Find
    ) -> None:
        self._links = links
        self._connections = connections
        self._progress = progress
        self._find = find
        self._pacer = Pacer()
        self._messages: Messages | None = None
        if connections is not None:
            self._messages = Messages(connections, progress, self._pacer)
        self._failures: list[BaseException] = []

    def run(
        self,
        receivers: Mapping[int, int],
        senders: Mapping[int, int],
        send: Callable[[To], None],
    ) -> None:
        threads = [
            threading.Thread(
                target=self._receive, args=(peer,), name=f"localckpt-parts-{peer}", daemon=True
            )
            for peer in senders
        ]
        started = []
        outlets = {peer: self._outlet(peer) for peer in receivers}

        def to(rank: int, item: int, index: int) -> PartReceiver:
            outlet = outlets[rank]
            if isinstance(outlet, LinkOutlet):
                return LinkedPart(outlet, item, index)
            return SentPart(outlet, item, index)

        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            send(to)
            for outlet in outlets.values():
                outlet.end()
            for outlet in outlets.values():
                outlet.await_taken()
        except BaseException as error:  # noqa: BLE001 - raised once no thread uses the memory
            self._failures.append(error)
            self.abort()
        # Each of their waits has the deadline, and aborting ends them all.
        for thread in started:
            thread.join()
        if self._failures:
            self._progress.raise_first(self._failures)

    def abort(self) -> None:
        """End the exchange, with an error in every thread that takes part."""
        self._pacer.stop()
        self._links.cut()
        if self._connections is not None:
            self._connections.disconnect()

    def _outlet(self, peer: int) -> Outlet | LinkOutlet:
        if (link := self._links.outgoing.get(peer)) is not None:
            return LinkOutlet(peer, link, self._progress)
        assert self._messages is not None, "who has no link is connected"
        return Outlet(peer, self._messages)

    def _receive(self, peer: int) -> None:
        try:
            if (link := self._links.incoming.get(peer)) is not None:
                take_all(peer, link, self._progress, self._find)
            else:
                assert self._messages is not None, "who has no link is connected"
                Inlet(peer, self._messages, self._progress, self._find).run()
        except Exception as failure:  # noqa: BLE001 - raised by the thread that waits for this one
            self._failures.append(failure)
            self.abort()
