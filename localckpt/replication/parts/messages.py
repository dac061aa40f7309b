"""Messages of parts of tensors: filled by several threads, sent, and taken apart.

Runs of bytes are read straight into a message, which is sent once all of it was verified. Two
messages for each pair of ranks are in memory, and more only while each of the others waits for a
thread that reads into it. How messages travel is in ``over_links.py`` and ``over_gloo.py``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import round_up
from localckpt.memory.tensor_bytes import copy_values, integer_view
from localckpt.replication.parts.wire import (
    HEAD_NBYTES,
    Head,
    cut_head,
    run_head,
    small_cuts,
    take,
)
from localckpt.state_dict.runs import PartReceiver, Reservation
from localckpt.state_dict.source import PIECE_NBYTES, scatter

__all__ = ["IN_FLIGHT", "MESSAGE_NBYTES", "MessageSender", "Outlet", "SentPart", "take_apart"]

MESSAGE_NBYTES = 2 * PIECE_NBYTES
"""Size of a message: room for a piece of an image, and for the heads of all parts in it."""
IN_FLIGHT = 2
"""Number of messages of a pair of ranks: one is sent while another is filled or taken apart."""
# Shorter runs are copied: else a piece might have more of them than there is room for heads.
_DIRECT_NBYTES = 4096
_ALIGN = 16


class MessageSender(Protocol):
    """Way of messages to one rank.

    One thread at a time calls :meth:`send` and :meth:`end`, and one the other methods.
    """

    def make(self) -> memoryview:
        """Make memory of :data:`MESSAGE_NBYTES` bytes for one more message."""

    def send(self, number: int, nbytes: int) -> None:
        """Start to send the first bytes of the n-th memory that was made."""

    def await_oldest(self) -> None:
        """Wait until the rank has the oldest message that is under way."""

    def end(self) -> None:
        """Send that no message follows."""

    def await_end(self) -> None:
        """Wait until the rank knows that; it has all messages then."""


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

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.memory = memory
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
        sender: Sends the messages.
    """

    def __init__(self, rank: int, sender: MessageSender) -> None:
        self.rank = rank
        self._sender = sender
        # A thread that waits until the peer has taken a message holds the first lock only.
        self._reserving = threading.Lock()
        self._lock = threading.Lock()
        self._open: _Message | None = None
        self._free: list[_Message] = []
        self._made = 0
        self._under_way: deque[_Message] = deque()
        self._failure: BaseException | None = None

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
        assert needed <= MESSAGE_NBYTES, "a piece of an image fits"
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
                self._sender.end()

    def await_taken(self) -> None:
        """Wait until the rank has all messages."""
        with self._reserving:
            while self._under_way:
                self._await_oldest()
            self._sender.await_end()

    def _message_for(self, needed: int) -> _Message:
        """Return the message that is filled now, with room for so many bytes."""
        if self._open is not None and self._open.at + needed > MESSAGE_NBYTES:
            self._close()
        if self._open is None:
            if not self._free and self._made >= IN_FLIGHT and self._under_way:
                self._await_oldest()
            if not self._free:
                # Of all messages other threads have yet to fill some part: they are soon sent.
                self._free.append(_Message(self._made, self._sender.make()))
                self._made += 1
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
        self._sender.send(message.number, message.at)
        self._under_way.append(message)

    def _await_oldest(self) -> None:
        # Each message is waited for once: what failed for one thread has failed for all.
        if self._failure is not None:
            raise self._failure
        try:
            self._sender.await_oldest()
        except BaseException as error:
            self._failure = error
            raise
        message = self._under_way.popleft()
        message.clear()
        self._free.append(message)


def take_apart(
    peer: int, message: memoryview, find: Callable[[int, int, int], PartReceiver]
) -> None:
    """Have the parts of a message taken.

    Args:
        peer: The rank that has sent it.
        message: The message.
        find: Finds who takes a part; see :data:`~localckpt.replication.parts.exchange.Find`.

    Raises:
        CorruptShardError: The message is cut short, or contradicts itself or what is taken.
    """
    at = 0
    while at < len(message):
        head = Head.unpack(message, at)
        begin = at + HEAD_NBYTES + head.numbers_nbytes
        if begin + head.nbytes > len(message):
            raise CorruptShardError(f"rank {peer} sent a message that is cut short")
        numbers = message[at + HEAD_NBYTES : begin]
        data = message[begin : begin + head.nbytes]
        try:
            take(find(peer, head.item, head.part), head, numbers, data)
        except ValueError as error:
            raise CorruptShardError(f"rank {peer} sent no part of a tensor: {error}") from error
        at = begin + round_up(head.nbytes, _ALIGN)
