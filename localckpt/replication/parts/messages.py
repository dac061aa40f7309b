"""Parts of tensors over gloo, in messages of bounded size.

Runs of bytes are read straight into a message, which is sent once all of it was verified. Two
messages for each pair of ranks are in memory, and more only while each of the others waits for a
thread that reads into it.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import round_up
from localckpt.memory.tensor_bytes import copy_values, integer_view
from localckpt.replication.messages import Incoming, Messages, Outgoing
from localckpt.replication.parts.wire import (
    HEAD_NBYTES,
    Head,
    cut_head,
    run_head,
    small_cuts,
    take,
)
from localckpt.replication.progress import Progress
from localckpt.state_dict.runs import PartReceiver, Reservation
from localckpt.state_dict.source import PIECE_NBYTES, scatter
from localckpt.storage.buffers import PrivateBuffer

__all__ = ["Inlet", "Outlet", "SentPart"]

# Room for a piece of an image, and for the heads of all parts in it.
_MESSAGE_NBYTES = 2 * PIECE_NBYTES
# Shorter runs are copied: else a piece might have more of them than there is room for heads.
_DIRECT_NBYTES = 4096
_IN_FLIGHT = 2
_ALIGN = 16
# Length of the message that follows; 0 says that none does.
_LENGTH = struct.Struct("<Q")
_LENGTHS, _PARTS = 0, 1
# Answers are empty messages; so many may be under way.
_ANSWERS = 8


@dataclass(frozen=True, slots=True)
class SentPart:
    """Part of a tensor of another rank; a :class:`PartReceiver`.

    Attributes:
        channel: Messages to the rank.
        item, index: Numbers by which the rank finds the part.
    """

    channel: Outlet
    item: int
    index: int

    def takes_direct(self, nbytes: int) -> bool:
        return nbytes >= _DIRECT_NBYTES

    def take_run(self, offset: int, data: memoryview) -> None:
        for begin in range(0, len(data), PIECE_NBYTES):
            some = data[begin : begin + PIECE_NBYTES]
            memory, done = self.channel.reserve([(self, offset + begin, len(some))])
            scatter(some, list(memory))
            done()

    def take_cut(self, first: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        for start, lengths, some in small_cuts(first, sizes, values):
            nbytes = some.numel() * some.itemsize
            head = cut_head(self.item, self.index, start, lengths, nbytes)
            (memory,), done = self.channel.reserve_behind([(head, nbytes)])
            if nbytes:
                flat = integer_view(torch.frombuffer(memory, dtype=torch.uint8), some.itemsize)
                copy_values(flat.view(tuple(lengths)).view(some.dtype), some)
            done()


class _Message:
    """Message that is being filled, by several threads."""

    def __init__(self) -> None:
        self.memory = PrivateBuffer(_MESSAGE_NBYTES).view
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.at = 0
        # What is reserved and not filled yet.
        self.lacking = 0
        self.is_closed = False


class Outlet:
    """Messages to one rank: some are filled while others are sent; a :class:`Channel`.

    Args:
        rank: The rank.
        messages: Messages of the exchange.
    """

    def __init__(self, rank: int, messages: Messages) -> None:
        self.rank = rank
        self._messages = messages
        # A thread that waits until the peer has taken a message holds the first lock only.
        self._reserving = threading.Lock()
        self._lock = threading.Lock()
        self._open: _Message | None = None
        self._free: list[_Message] = []
        self._made = 0
        self._under_way: deque[tuple[Outgoing, Outgoing, _Message]] = deque()

    def reserve(self, runs: Sequence[tuple[PartReceiver, int, int]]) -> Reservation:
        """Reserve memory for runs of one piece of an image, in one message."""
        parts = []
        for part, offset, nbytes in runs:
            assert isinstance(part, SentPart), "it is another rank's"
            parts.append((run_head(part.item, part.index, offset, nbytes), nbytes))
        return self.reserve_behind(parts)

    def reserve_behind(self, parts: Sequence[tuple[bytes, int]]) -> Reservation:
        """Reserve memory in one message for parts, each behind its head."""
        needed = sum(len(head) + round_up(nbytes, _ALIGN) for head, nbytes in parts)
        assert needed <= _MESSAGE_NBYTES, "a piece of an image fits"
        memory = []
        with self._reserving:
            message = self._message_for(needed)
            with self._lock:
                message.lacking += 1
            for head, nbytes in parts:
                message.memory[message.at : message.at + len(head)] = head
                message.at += len(head)
                memory.append(message.memory[message.at : message.at + nbytes])
                message.at += round_up(nbytes, _ALIGN)
        return Reservation(memory, lambda: self._filled(message))

    def end(self) -> None:
        """Send what is left, and that nothing follows."""
        with self._reserving:
            if self._open is not None:
                self._close()
            with self._lock:
                nothing = memoryview(bytearray(_LENGTH.pack(0)))
                self._ended = self._messages.send(self.rank, _LENGTHS, nothing)

    def await_taken(self) -> None:
        """Wait until the rank has all messages."""
        with self._reserving:
            while self._under_way:
                self._await_oldest()
            self._messages.await_taken(self._ended)

    def _message_for(self, needed: int) -> _Message:
        """Return the message that is filled now, with room for so many bytes."""
        if self._open is not None and self._open.at + needed > _MESSAGE_NBYTES:
            self._close()
        if self._open is None:
            if not self._free and self._made >= _IN_FLIGHT and self._under_way:
                self._await_oldest()
            if not self._free:
                # Of all messages other threads have yet to fill some part: they are soon sent.
                self._made += 1
                self._free.append(_Message())
            self._open = self._free.pop()
        return self._open

    def _close(self) -> None:
        message, self._open = self._open, None
        assert message is not None, "there is one"
        with self._lock:
            message.is_closed = True
            if not message.lacking:
                self._send(message)

    def _filled(self, message: _Message) -> None:
        with self._lock:
            message.lacking -= 1
            if message.is_closed and not message.lacking:
                self._send(message)

    def _send(self, message: _Message) -> None:
        length = memoryview(bytearray(_LENGTH.pack(message.at)))
        self._under_way.append(
            (
                self._messages.send(self.rank, _LENGTHS, length),
                self._messages.send(self.rank, _PARTS, message.memory[: message.at]),
                message,
            )
        )

    def _await_oldest(self) -> None:
        length, parts, message = self._under_way.popleft()
        self._messages.await_taken(length)
        self._messages.await_taken(parts)
        message.clear()
        self._free.append(message)


class Inlet:
    """Messages of one rank: one is asked for while another is taken apart.

    Args:
        peer: The rank.
        messages: Messages of the exchange.
        progress: Progress of the exchange.
        find: Finds who takes a part.
    """

    def __init__(
        self,
        peer: int,
        messages: Messages,
        progress: Progress,
        find: Callable[[int, int, int], PartReceiver],
    ) -> None:
        self._peer = peer
        self._messages = messages
        self._progress = progress
        self._find = find
        self._answers: deque[dist.Work] = deque()

    def run(self) -> None:
        """Take all messages."""
        buffers: list[memoryview] = []
        expected = self._next_length()
        turn = 0
        asked = None
        while expected or asked is not None:
            following = None
            if expected:
                if len(buffers) < _IN_FLIGHT:
                    buffers.append(PrivateBuffer(_MESSAGE_NBYTES).view)
                memory = buffers[turn][:expected]
                following = self._messages.ask(self._peer, _PARTS, memory), memory
                turn = (turn + 1) % _IN_FLIGHT
            if asked is not None:
                self._take_apart(asked[1])
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
        if nbytes > _MESSAGE_NBYTES:
            raise CorruptShardError(f"rank {self._peer} announced a message of {nbytes} bytes")
        return int(nbytes)

    def _take_apart(self, message: memoryview) -> None:
        at = 0
        while at < len(message):
            head = Head.unpack(message, at)
            begin = at + HEAD_NBYTES + head.numbers_nbytes
            if begin + head.nbytes > len(message):
                raise CorruptShardError(f"rank {self._peer} sent a message that is cut short")
            numbers = message[at + HEAD_NBYTES : begin]
            data = message[begin : begin + head.nbytes]
            take(self._find(self._peer, head.item, head.part), head, numbers, data)
            at = begin + round_up(head.nbytes, _ALIGN)
