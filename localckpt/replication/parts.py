"""Parts of tensors between ranks, in messages of bounded size that say what they hold.

A sender has messages filled as it reads, in whatever order that is, and a receiver takes each part
where it belongs. Runs of bytes are read straight into a message, which is sent once all of it was
verified. Two messages for each pair of ranks are in memory, and more only while each of the
others waits for a thread that reads into it.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import round_up
from localckpt.memory.tensor_bytes import copy_values, integer_view
from localckpt.pacing import Pacer
from localckpt.replication.connections import HostConnections
from localckpt.replication.messages import Incoming, Messages, Outgoing
from localckpt.replication.progress import Progress
from localckpt.state_dict.runs import PartReceiver, Reservation
from localckpt.state_dict.source import PIECE_NBYTES, scatter
from localckpt.storage.buffers import PrivateBuffer
from localckpt.threads import run_interruptibly

__all__ = ["MESSAGE_NBYTES", "Find", "To", "exchange_parts"]

MESSAGE_NBYTES = 2 * PIECE_NBYTES
"""Size of a message: room for a piece of an image, and for the heads of all parts in it."""

# Shorter runs are copied: else a piece might have more of them than there is room for heads.
_DIRECT_NBYTES = 4096
_IN_FLIGHT = 2
_ALIGN = 16
# Length of the message that follows; 0 says that none does.
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<IIIIQ")
_OFFSET = struct.Struct("<Q")
_CUT, _RUN = 0, 1
_LENGTHS, _PARTS = 0, 1
# Answers are empty messages; so many may be under way.
_ANSWERS = 8

To = Callable[[int, int, int], PartReceiver]
"""``to(rank, item, index)``: receiver of another rank's part."""

Find = Callable[[int, int, int], PartReceiver]
"""``find(peer, item, index)``: receiver of this rank's part that a peer has sent something of.

An item is what a rank takes of one shard, by its number; the index is that of a part of it."""


def exchange_parts(
    connections: HostConnections | None,
    receivers: Mapping[int, int],
    senders: Mapping[int, int],
    send: Callable[[To], None],
    find: Find,
    timeout_s: float,
) -> None:
    """Send parts to ranks, and take those that ranks send here, at once.

    Args:
        connections: To all of these ranks; ``None`` if there are none.
        receivers, senders: Ranks that this one sends to, and gets parts from, with the bytes of
            the parts.
        send: Sends all parts to the receivers that it is given; it may use several threads.
        find: Finds who takes a part that came; called by a thread for each sender.
        timeout_s: Deadline of it all, in seconds.

    Raises:
        PeerLostError: A rank did not send or take all in time, or its connection broke.
        CheckpointingException: ``send`` failed; the peers see this rank as lost.
    """
    if connections is None:
        send(_to_nobody)
        return
    exchange = _Exchange(connections, receivers, senders, find, timeout_s)
    run_interruptibly(lambda: exchange.run(send), exchange.abort)


def _to_nobody(rank: int, item: int, index: int) -> PartReceiver:
    raise AssertionError(f"rank {rank} takes nothing from this one")


class _Exchange:
    def __init__(
        self,
        connections: HostConnections,
        receivers: Mapping[int, int],
        senders: Mapping[int, int],
        find: Find,
        timeout_s: float,
    ) -> None:
        self._connections = connections
        self._progress = Progress(connections.rank, timeout_s)
        self._pacer = Pacer()
        self._messages = Messages(connections, self._progress, self._pacer)
        self._senders = senders
        self._find = find
        self._failures: list[BaseException] = []
        for peer, sent in receivers.items():
            self._progress.expect(peer, sent=sent)
        for peer, received in senders.items():
            self._progress.expect(peer, received=received)
        self._outlets = {peer: _Outlet(peer, self._messages) for peer in receivers}

    def run(self, send: Callable[[To], None]) -> None:
        threads = [
            threading.Thread(
                target=self._receive, args=(peer,), name=f"localckpt-parts-{peer}", daemon=True
            )
            for peer in self._senders
        ]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            send(lambda rank, item, index: _SentPart(self._outlets[rank], item, index))
            for outlet in self._outlets.values():
                outlet.end()
            for outlet in self._outlets.values():
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
        self._connections.disconnect()

    def _receive(self, peer: int) -> None:
        try:
            _Inlet(peer, self._messages, self._progress, self._find).run()
        except Exception as failure:  # noqa: BLE001 - raised by the thread that waits for this one
            self._failures.append(failure)
            self.abort()


@dataclass(frozen=True, slots=True)
class _SentPart:
    """Part of a tensor of another rank; a :class:`PartReceiver`."""

    channel: _Outlet
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
        nbytes = values.numel() * values.itemsize
        if nbytes > PIECE_NBYTES:
            # One row of a tensor with gaps between its items may be larger than any message.
            dim = max(range(values.dim()), key=sizes.__getitem__)
            half = sizes[dim] // 2
            for begin, size in ((0, half), (half, sizes[dim] - half)):
                starts = (*first[:dim], first[dim] + begin, *first[dim + 1 :])
                lengths = (*sizes[:dim], size, *sizes[dim + 1 :])
                self.take_cut(starts, lengths, values.narrow(dim, begin, size))
            return
        head = _HEAD.pack(self.item, self.index, len(sizes), _CUT, nbytes)
        head += struct.pack(f"<{2 * len(sizes)}Q", *first, *sizes)
        (memory,), done = self.channel.reserve_behind([(head, nbytes)])
        if nbytes:
            flat = integer_view(torch.frombuffer(memory, dtype=torch.uint8), values.itemsize)
            copy_values(flat.view(tuple(sizes)).view(values.dtype), values)
        done()


class _Message:
    """Message that is being filled, by several threads."""

    def __init__(self) -> None:
        self.memory = PrivateBuffer(MESSAGE_NBYTES).view
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.at = 0
        # What is reserved and not filled yet.
        self.lacking = 0
        self.is_closed = False


class _Outlet:
    """Messages to one rank: some are filled while others are sent; a :class:`Channel`."""

    def __init__(self, peer: int, messages: Messages) -> None:
        self.rank = peer
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
            assert isinstance(part, _SentPart), "it is another rank's"
            head = _HEAD.pack(part.item, part.index, 0, _RUN, nbytes) + _OFFSET.pack(offset)
            parts.append((head, nbytes))
        return self.reserve_behind(parts)

    def reserve_behind(self, parts: Sequence[tuple[bytes, int]]) -> Reservation:
        """Reserve memory in one message for parts, each behind its head."""
        needed = sum(_start_of(head) + round_up(nbytes, _ALIGN) for head, nbytes in parts)
        assert needed <= MESSAGE_NBYTES, "a piece of an image fits"
        memory = []
        with self._reserving:
            message = self._message_for(needed)
            with self._lock:
                message.lacking += 1
            for head, nbytes in parts:
                message.memory[message.at : message.at + len(head)] = head
                message.at += _start_of(head)
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
        if self._open is not None and self._open.at + needed > MESSAGE_NBYTES:
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


def _start_of(head: bytes) -> int:
    return round_up(len(head), _ALIGN)


class _Inlet:
    """Messages of one rank: one is asked for while another is taken apart."""

    def __init__(self, peer: int, messages: Messages, progress: Progress, find: Find) -> None:
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
                    buffers.append(PrivateBuffer(MESSAGE_NBYTES).view)
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
        if nbytes > MESSAGE_NBYTES:
            raise CorruptShardError(f"rank {self._peer} announced a message of {nbytes} bytes")
        return int(nbytes)

    def _take_apart(self, message: memoryview) -> None:
        at = 0
        while at < len(message):
            item, index, dims, kind, nbytes = _HEAD.unpack_from(message, at)
            head = _HEAD.size + (_OFFSET.size if kind == _RUN else 16 * dims)
            begin = at + round_up(head, _ALIGN)
            if head > len(message) - at or nbytes > len(message) - begin:
                raise CorruptShardError(f"rank {self._peer} sent a message that is cut short")
            part, data = self._find(self._peer, item, index), message[begin : begin + nbytes]
            if kind == _RUN:
                (offset,) = _OFFSET.unpack_from(message, at + _HEAD.size)
                part.take_run(offset, data)
            else:
                numbers = struct.unpack_from(f"<{2 * dims}Q", message, at + _HEAD.size)
                self._take_cut(part, numbers[:dims], numbers[dims:], data)
            at = begin + round_up(nbytes, _ALIGN)

    def _take_cut(
        self, part: PartReceiver, first: Sequence[int], sizes: Sequence[int], data: memoryview
    ) -> None:
        if math.prod(sizes) and len(data) % math.prod(sizes):
            raise CorruptShardError(f"rank {self._peer} sent a part of another size")
        values = torch.empty(0, dtype=torch.uint8)
        if len(data):
            values = torch.frombuffer(data, dtype=torch.uint8)
        part.take_cut(first, sizes, values)
