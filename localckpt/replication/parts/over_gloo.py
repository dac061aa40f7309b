"""Messages of parts over gloo, between nodes: a length, and the message.

One message is asked for while another is taken apart.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

import torch.distributed as dist

from localckpt.errors import CorruptShardError
from localckpt.replication.messages import Incoming, Messages, Outgoing
from localckpt.replication.parts.messages import IN_FLIGHT, MESSAGE_NBYTES
from localckpt.replication.progress import Progress
from localckpt.storage.buffers import PrivateBuffer

__all__ = ["GlooInlet", "GlooSender"]

# Length of the message that follows; 0 says that none does.
_LENGTH = struct.Struct("<Q")
_LENGTHS, _PARTS = 0, 1
# Answers are empty messages; so many may be under way.
_ANSWERS = 8


class GlooSender:
    """Messages to one rank; a :class:`~localckpt.replication.parts.messages.MessageSender`.

    Args:
        rank: The rank.
        messages: Messages of the exchange.
    """

    def __init__(self, rank: int, messages: Messages) -> None:
        self._rank = rank
        self._messages = messages
        self._memories: list[memoryview] = []
        self._under_way: deque[tuple[Outgoing, Outgoing]] = deque()

    def make(self) -> memoryview:
        self._memories.append(PrivateBuffer(MESSAGE_NBYTES).view)
        return self._memories[-1]

    def send(self, number: int, nbytes: int) -> None:
        length = self._send_length(nbytes)
        message = self._messages.send(self._rank, _PARTS, self._memories[number][:nbytes])
        self._under_way.append((length, message))

    def await_oldest(self) -> None:
        for message in self._under_way.popleft():
            self._messages.await_taken(message)

    def end(self) -> None:
        self._ended = self._send_length(0)

    def await_end(self) -> None:
        self._messages.await_taken(self._ended)

    def _send_length(self, nbytes: int) -> Outgoing:
        length = memoryview(bytearray(_LENGTH.pack(nbytes)))
        return self._messages.send(self._rank, _LENGTHS, length)


class GlooInlet:
    """Messages of one rank.

    Args:
        peer: The rank.
        messages: Messages of the exchange.
        progress: Progress of the exchange.
    """

    def __init__(self, peer: int, messages: Messages, progress: Progress) -> None:
        self._peer = peer
        self._messages = messages
        self._progress = progress
        self._answers: deque[dist.Work] = deque()

    def run(self) -> Iterator[memoryview]:
        """Yield each message; it is valid until the next one is asked for.

        Raises:
            CorruptShardError: The rank has announced a message that is too long.
        """
        buffers: list[memoryview] = []
        expected = self._next_length()
        turn = 0
        asked = None
        while expected or asked is not None:
            following = None
            if expected:
                if len(buffers) < IN_FLIGHT:
                    buffers.append(PrivateBuffer(MESSAGE_NBYTES).view)
                memory = buffers[turn][:expected]
                following = self._messages.ask(self._peer, _PARTS, memory), memory
                turn = (turn + 1) % IN_FLIGHT
            if asked is not None:
                yield asked[1]
            asked = following
            if asked is not None:
                self._answer(asked[0])
                expected = self._next_length()
        while self._answers:
            self._progress.wait(self._peer, self._answers.popleft())

    def _answer(self, message: Incoming) -> None:
        """Wait for a message, and answer it."""
        self._answers.append(self._messages.take(message))
        if len(self._answers) > _ANSWERS:
            self._progress.wait(self._peer, self._answers.popleft())

    def _next_length(self) -> int:
        memory = memoryview(bytearray(_LENGTH.size))
        self._answer(self._messages.ask(self._peer, _LENGTHS, memory))
        (nbytes,) = _LENGTH.unpack(memory)
        if nbytes > MESSAGE_NBYTES:
            raise CorruptShardError(f"rank {self._peer} announced a message of {nbytes} bytes")
        return int(nbytes)
