"""Exchange of parts of tensors between ranks: in shared memory within a node, else over gloo.

A sender sends parts as it reads them, in whatever order that is, and a receiver takes each where it
belongs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

from localckpt.pacing import Pacer
from localckpt.replication.connections import HostConnections
from localckpt.replication.links import Links
from localckpt.replication.messages import Messages
from localckpt.replication.parts.messages import MessageSender, Outlet, SentPart, take_apart
from localckpt.replication.parts.over_gloo import GlooInlet, GlooSender
from localckpt.replication.parts.over_links import LinkSender, link_messages
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
    with progress.watched():
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
        with ExitStack() as opened:
            outlets = {peer: Outlet(peer, self._sender(peer, opened)) for peer in receivers}

            def to(rank: int, item: int, index: int) -> PartReceiver:
                return SentPart(outlets[rank], item, index)

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

    def _sender(self, peer: int, opened: ExitStack) -> MessageSender:
        if (link := self._links.outgoing.get(peer)) is not None:
            sender = LinkSender(peer, link, self._progress)
            opened.callback(sender.close)
            return sender
        assert self._messages is not None, "who has no link is connected"
        return GlooSender(peer, self._messages)

    def _messages_of(self, peer: int) -> Iterator[memoryview]:
        if (link := self._links.incoming.get(peer)) is not None:
            return link_messages(peer, link, self._progress)
        assert self._messages is not None, "who has no link is connected"
        return GlooInlet(peer, self._messages, self._progress).run()

    def _receive(self, peer: int) -> None:
        try:
            for message in self._messages_of(peer):
                take_apart(peer, message, self._find)
        except Exception as failure:  # noqa: BLE001 - raised by the thread that waits for this one
            self._failures.append(failure)
            self.abort()
