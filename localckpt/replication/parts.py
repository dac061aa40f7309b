"""Parts of tensors between ranks, in messages of bounded size that say what they hold.

A sender fills messages as it reads, in whatever order that is; a receiver takes each part where it
belongs. Two messages for each pair of ranks are all that is in memory.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import round_up
from localckpt.memory.tensor_bytes import copy_values
from localckpt.pacing import Pacer
from localckpt.replication.connections import HostConnections
from localckpt.replication.messages import Incoming, Messages, Outgoing
from localckpt.replication.progress import Progress
from localckpt.state_dict.saved_shard import integer_view
from localckpt.state_dict.source import PIECE_NBYTES
from localckpt.threads import run_interruptibly

__all__ = ["MESSAGE_NBYTES", "Accept", "Put", "exchange_parts"]

MESSAGE_NBYTES = 16 << 20
"""Size of a message, where few ranks exchange parts."""

# All messages of a rank together, and the smallest that hold a part of a piece.
_MOST_NBYTES, _LEAST_NBYTES = 1 << 30, 2 * PIECE_NBYTES
_IN_FLIGHT = 2
_ALIGN = 16
# Length of the message that follows; 0 says that none does.
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<IIIIQ")
_LENGTHS, _PARTS = 0, 1
# Answers are empty messages; so many may be under way.
_ANSWERS = 8


class Put(Protocol):
    """Sends a part of a tensor to a rank; may be called by several threads."""

    def __call__(
        self, peer: int, item: int, index: int, first: Sequence[int], values: torch.Tensor
    ) -> None:
        """Send a part.

        Args:
            peer: The rank.
            item: Number of what the rank takes.
            index: Number of the tensor among those of the item.
            first: Index of its first element in each dimension of the global tensor.
            values: The part, not changed until the call returns.
        """


class Accept(Protocol):
    """Takes a part that came."""

    def __call__(
        self,
        peer: int,
        item: int,
        index: int,
        first: Sequence[int],
        sizes: Sequence[int],
        values: torch.Tensor,
    ) -> None:
        """Take a part; arguments as for :class:`Put`, from a rank, and the values as bytes."""


def exchange_parts(
    connections: HostConnections | None,
    receivers: Mapping[int, int],
    senders: Mapping[int, int],
    send: Callable[[Put], None],
    accept: Accept,
    timeout_s: float,
) -> None:
    """Send parts to ranks, and take those that ranks send here, at once.

    Args:
        connections: To all of these ranks; ``None`` if there are none.
        receivers, senders: Ranks that this one sends to, and gets parts from, with the bytes of
            the parts.
        send: Sends all parts with the function that it is given.
        accept: Takes each part; called by a thread for each sender. The values are valid until it
            returns.
        timeout_s: Deadline of it all, in seconds.

    Raises:
        PeerLostError: A rank did not send or take all in time, or its connection broke.
        CheckpointingException: ``send`` failed; the peers see this rank as lost.
    """
    if connections is None:
        send(_to_nobody)
        return
    exchange = _Exchange(connections, receivers, senders, accept, timeout_s)
    run_interruptibly(lambda: exchange.run(send), exchange.abort)


def _to_nobody(
    peer: int, item: int, index: int, first: Sequence[int], values: torch.Tensor
) -> None:
    raise AssertionError(f"rank {peer} takes nothing from this one")


class _Exchange:
    def __init__(
        self,
        connections: HostConnections,
        receivers: Mapping[int, int],
        senders: Mapping[int, int],
        accept: Accept,
        timeout_s: float,
    ) -> None:
        self._connections = connections
        self._progress = Progress(connections.rank, timeout_s)
        self._pacer = Pacer()
        self._messages = Messages(connections, self._progress, self._pacer)
        self._senders = senders
        self._accept = accept
        self._failures: list[BaseException] = []
        share = _MOST_NBYTES // (_IN_FLIGHT * max(1, len(receivers)))
        nbytes = max(_LEAST_NBYTES, min(MESSAGE_NBYTES, share))
        for peer, sent in receivers.items():
            self._progress.expect(peer, sent=sent)
        for peer, received in senders.items():
            self._progress.expect(peer, received=received)
        self._outlets = {
            peer: _Outlet(peer, self._messages, self._progress, nbytes) for peer in receivers
        }

    def run(self, send: Callable[[Put], None]) -> None:
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
            send(self._put)
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

    def _put(
        self, peer: int, item: int, index: int, first: Sequence[int], values: torch.Tensor
    ) -> None:
        self._outlets[peer].put(item, index, first, values)

    def _receive(self, peer: int) -> None:
        try:
            _Inlet(peer, self._messages, self._progress, self._accept).run()
        except Exception as failure:  # noqa: BLE001 - raised by the thread that waits for this one
            self._failures.append(failure)
            self.abort()


class _Outlet:
    """Messages to one rank: one is filled while another is sent."""

    def __init__(self, peer: int, messages: Messages, progress: Progress, nbytes: int) -> None:
        self._peer = peer
        self._messages = messages
        self._progress = progress
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._buffers: list[memoryview] = []
        self._used = 0
        self._at = 0
        self._under_way: deque[tuple[Outgoing, Outgoing, memoryview]] = deque()

    def put(self, item: int, index: int, first: Sequence[int], values: torch.Tensor) -> None:
        """Add a part, and send the message when it is full."""
        sizes, nbytes = tuple(values.shape), values.numel() * values.itemsize
        head = _HEAD.pack(item, index, values.dim(), 0, nbytes)
        head += struct.pack(f"<{2 * len(sizes)}Q", *first, *sizes)
        start = round_up(len(head), _ALIGN)
        needed = start + round_up(nbytes, _ALIGN)
        if needed > self._nbytes:
            # One row of a tensor with gaps between its items may be larger than any message.
            dim = max(range(values.dim()), key=sizes.__getitem__)
            half = sizes[dim] // 2
            second = (*first[:dim], first[dim] + half, *first[dim + 1 :])
            self.put(item, index, first, values.narrow(dim, 0, half))
            self.put(item, index, second, values.narrow(dim, half, sizes[dim] - half))
            return
        with self._lock:
            if self._buffers and self._at + needed > self._nbytes:
                self._send()
            if not self._buffers:
                self._take_buffer()
            buffer = self._buffers[0]
            buffer[self._at : self._at + len(head)] = head
            begin = self._at + start
            flat = torch.frombuffer(buffer[begin : begin + nbytes], dtype=torch.uint8)
            copy_values(integer_view(flat, values.itemsize, sizes).view(values.dtype), values)
            self._at += needed

    def end(self) -> None:
        """Send what is left, and that nothing follows."""
        with self._lock:
            if self._buffers:
                self._send()
            nothing = memoryview(bytearray(_LENGTH.pack(0)))
            ended = self._messages.send(self._peer, _LENGTHS, nothing)
            self._under_way.append((ended, ended, nothing))

    def await_taken(self) -> None:
        """Wait until the rank has all messages."""
        with self._lock:
            while self._under_way:
                self._await_oldest()

    def _take_buffer(self) -> None:
        self._at = 0
        if self._used < _IN_FLIGHT:
            self._used += 1
            self._buffers = [memoryview(bytearray(self._nbytes))]
        else:
            self._buffers = [self._await_oldest()]

    def _send(self) -> None:
        (buffer,) = self._buffers
        self._buffers = []
        length = memoryview(bytearray(_LENGTH.pack(self._at)))
        self._under_way.append(
            (
                self._messages.send(self._peer, _LENGTHS, length),
                self._messages.send(self._peer, _PARTS, buffer[: self._at]),
                buffer,
            )
        )

    def _await_oldest(self) -> memoryview:
        length, parts, buffer = self._under_way.popleft()
        self._messages.await_taken(length)
        if parts is not length:
            self._messages.await_taken(parts)
        return buffer


class _Inlet:
    """Messages of one rank: one is asked for while another is taken apart."""

    def __init__(self, peer: int, messages: Messages, progress: Progress, accept: Accept) -> None:
        self._peer = peer
        self._messages = messages
        self._progress = progress
        self._accept = accept
        self._answers: deque[dist.Work] = deque()

    def run(self) -> None:
        """Take all messages."""
        buffers = [memoryview(b""), memoryview(b"")]
        expected = self._next_length()
        turn = 0
        asked = None
        while expected or asked is not None:
            following = None
            if expected:
                if len(buffers[turn]) < expected:
                    buffers[turn] = memoryview(bytearray(expected))
                memory = buffers[turn][:expected]
                following = self._messages.ask(self._peer, _PARTS, memory), memory
                turn = 1 - turn
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
            item, index, dims, _, nbytes = _HEAD.unpack_from(message, at)
            head = _HEAD.size + 16 * dims
            begin = at + round_up(head, _ALIGN)
            if head > len(message) - at or nbytes > len(message) - begin:
                raise CorruptShardError(f"rank {self._peer} sent a message that is cut short")
            numbers = struct.unpack_from(f"<{2 * dims}Q", message, at + _HEAD.size)
            values = (
                torch.frombuffer(message[begin : begin + nbytes], dtype=torch.uint8)
                if nbytes
                else torch.empty(0, dtype=torch.uint8)
            )
            first, sizes = numbers[:dims], numbers[dims:]
            if math.prod(sizes) and nbytes % math.prod(sizes):
                raise CorruptShardError(f"rank {self._peer} sent a part of another size")
            self._accept(self._peer, item, index, first, sizes, values)
            at = begin + round_up(nbytes, _ALIGN)
