"""Messages between ranks over gloo, each followed by a mark and answered.

gloo does not tell whoever waits for a message that was half sent or half received when its
connection broke: the wait lasts until the deadline. So nobody waits for such a message here. Each
is followed by an empty message, its mark, which cannot arrive in part; when the mark is there the
message is, and the receiver answers with another empty message. The answer also says that the
sender's memory may be used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist

from localckpt.replication.connections import NEVER, as_tensor, nothing
from localckpt.replication.progress import Progress
from localckpt.waiting import Pacer


class Connections(Protocol):
    """Connections to other ranks, over which messages of one tag stay in their order."""

    rank: int
    ranks: list[int]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work: ...

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work: ...

    def disconnect(self) -> None:
        """Close all connections, in any thread: peers stop waiting, and late bytes go nowhere."""

    def close(self) -> None: ...


class Messages:
    """Messages of one exchange, with the progress of each peer."""

    def __init__(self, connections: Connections, progress: Progress, pacer: Pacer) -> None:
        self._connections = connections
        self._progress = progress
        self._pacer = pacer
        # That have been asked for or sent, and of which nothing was waited for.
        self._open: set[Message] = set()

    def ask(self, peer: int, number: int, memory: memoryview) -> Message:
        """Ask for a peer's next message of a ``number``; it may come at any time from now on."""
        with self._progress.blaming(peer):
            data = self._receive(as_tensor(memory), peer, number, _Kind.DATA)
            mark = self._receive(nothing(), peer, number, _Kind.MARK)
        return self._opened(Message(peer, number, len(memory), data, mark))

    def take(self, message: Message) -> dist.Work:
        """Wait for a message, and begin to answer it; :meth:`Progress.wait` takes what returns."""
        peer = message.peer
        self._progress.wait(peer, message.mark)
        self._open.discard(message)
        self._progress.wait(peer, message.data)
        self._progress.count(peer, received=message.nbytes)
        with self._progress.blaming(peer):
            return self._send(nothing(), peer, message.number, _Kind.ANSWER)

    def send(self, peer: int, number: int, memory: memoryview) -> Message:
        """Start to send, once the pacer lets it; the memory must last until :meth:`await_taken`."""
        self._pacer.wait(len(memory))
        with self._progress.blaming(peer):
            answer = self._receive(nothing(), peer, number, _Kind.ANSWER)
            data = self._send(as_tensor(memory), peer, number, _Kind.DATA)
            mark = self._send(nothing(), peer, number, _Kind.MARK)
        return self._opened(Message(peer, number, len(memory), data, mark, answer))

    def await_taken(self, message: Message) -> None:
        assert message.answer is not None, "one that was sent is answered"
        self._open.discard(message)
        for work in (message.answer, message.data, message.mark):
            self._progress.wait(message.peer, work)
        self._progress.count(message.peer, sent=message.nbytes)

    def count_arrived(self) -> None:
        """Count the messages that arrived before the connections broke, and were not counted."""
        for message in self._open:
            if message.answer is None and _is_done(message.data):
                self._progress.count(message.peer, received=message.nbytes)
            elif message.answer is not None and _is_done(message.answer):
                self._progress.count(message.peer, sent=message.nbytes)

    def _opened(self, message: Message) -> Message:
        self._open.add(message)
        return message

    def _send(self, tensor: torch.Tensor, peer: int, number: int, kind: _Kind) -> dist.Work:
        return self._connections.send(tensor, peer, number * len(_Kind) + kind)

    def _receive(self, tensor: torch.Tensor, peer: int, number: int, kind: _Kind) -> dist.Work:
        return self._connections.receive(tensor, peer, number * len(_Kind) + kind)


class _Kind(IntEnum):
    """Messages of one number that belong together; part of their tags."""

    DATA = 0
    MARK = 1
    ANSWER = 2
    NEVER = NEVER


# gloo drops a message whose work object is dropped before it was sent.


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    peer: int
    number: int
    nbytes: int
    data: dist.Work
    mark: dist.Work
    answer: dist.Work | None = None
    """Of a message that is sent."""


def _is_done(work: dist.Work) -> bool:
    """True if a message arrived before the connections were closed."""
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True
