"""Exchange of parts of tensors between ranks over gloo, in messages that several threads fill.

A sender sends parts as it reads them, in whatever order that is, and a receiver takes each where it
belongs. Runs of bytes are read straight into a message, which is sent once all of it was verified.
Two messages for each pair of ranks are in memory, and more only while each of the others waits for
a thread that reads into it. The length of each message is sent before it.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import round_up
from localckpt.pacing import Pacer
from localckpt.ranks.deadline import interruptible
from localckpt.replication.connections import HostConnections
from localckpt.replication.messages import Incoming, Messages, Outgoing
from localckpt.replication.progress import Progress
from localckpt.state_dict.runs import Reserved, Sink, copy_reserved
from localckpt.state_dict.source import PIECE_NBYTES
from localckpt.storage.buffers import PrivateBuffer

__all__ = ["HEAD", "MESSAGE_NBYTES", "Find", "Outlet", "SentPart", "exchange_parts", "take_apart"]

MESSAGE_NBYTES = 2 * PIECE_NBYTES
"""Size of a message: room for a piece of an image, and for the heads of all parts in it."""
# Messages of a pair of ranks: one is sent while another is filled or taken apart.
_IN_FLIGHT = 2
# Shorter runs are copied, which costs less than to read them to places of their own.
_DIRECT_NBYTES = 4096
_ALIGN = 16
HEAD = struct.Struct("<IIQQ8x")
"""Head of consecutive bytes of a part, which follow it: numbers of the item and of the part in it,
offset in the part, and number of bytes."""
# Length of the message that follows; 0 says that none does.
_LENGTH = struct.Struct("<Q")
_LENGTHS, _PARTS = 0, 1
# Answers are empty messages; so many may be under way.
_ANSWERS = 8


Find = Callable[[int, int, int], Sink]
"""``find(peer, item, index)``: receiver of this rank's part that a peer has sent something of.

An item is what a rank takes of one shard, by its number; the index is that of a part of it."""


def exchange_parts(
    connections: HostConnections,
    receivers: Mapping[int, int],
    senders: Mapping[int, int],
    send: Callable[[Mapping[int, Outlet]], None],
    find: Find,
    timeout_s: float,
) -> None:
    """Send parts to ranks, and take those that ranks send here, at once.

    Receivers and senders come with the bytes of their parts. ``send`` sends all parts by the
    outlets of their receivers, maybe in several threads; ``find`` finds who takes a part that came,
    and is called by a thread for each sender. If ``send`` fails, the peers see this rank as lost.
    """
    progress = Progress(connections.rank, timeout_s)
    for peer, nbytes in receivers.items():
        progress.expect(peer, sent=nbytes)
    for peer, nbytes in senders.items():
        progress.expect(peer, received=nbytes)
    pacer, failures = Pacer(), list[BaseException]()
    messages = Messages(connections, progress, pacer)

    def abort() -> None:
        """End the exchange, with an error in every thread that takes part."""
        pacer.stop()
        connections.disconnect()

    def receive(peer: int) -> None:
        try:
            for message in _messages_from(peer, messages, progress):
                take_apart(peer, message, find)
        except Exception as failure:  # noqa: BLE001 - raised by the thread that waits for this one
            failures.append(failure)
            abort()

    def run() -> None:
        threads = [
            threading.Thread(
                target=receive, args=(peer,), name=f"localckpt-parts-{peer}", daemon=True
            )
            for peer in senders
        ]
        started = []
        outlets = {peer: Outlet(peer, messages) for peer in receivers}
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            send(outlets)
            for outlet in outlets.values():
                outlet.end()
            for outlet in outlets.values():
                outlet.await_taken()
        except BaseException as error:  # noqa: BLE001 - raised once no thread uses the memory
            failures.append(error)
            abort()
        # Each of their waits has the deadline, and aborting ends them all.
        for thread in started:
            thread.join()
        if failures:
            progress.raise_first(failures)

    with progress.watched():
        interruptible(run, abort)


@dataclass(frozen=True, slots=True)
class SentPart:
    """Part of a tensor of another rank; a :class:`Sink`.

    Attributes:
        item, index: Numbers by which the rank finds the part.
    """

    outlet: Outlet
    item: int
    index: int

    def reserve(self, offset: int, nbytes: int) -> Reserved | None:
        if nbytes < _DIRECT_NBYTES:
            return None
        return self.outlet.reserve(HEAD.pack(self.item, self.index, offset, nbytes), nbytes)

    def take(self, offset: int, values: torch.Tensor) -> None:
        if values.nbytes > PIECE_NBYTES:
            # Halves along the first dimension follow each other.
            dim = next(dim for dim, size in enumerate(values.shape) if size > 1)
            for half in values.tensor_split(2, dim):
                self.take(offset, half)
                offset += half.nbytes
            return
        head = HEAD.pack(self.item, self.index, offset, values.nbytes)
        copy_reserved(self.outlet.reserve(head, values.nbytes), values)


class _Message:
    """Message that is being filled, by several threads."""

    def __init__(self) -> None:
        self.memory = PrivateBuffer(MESSAGE_NBYTES).view
        self.at = 0
        # What is reserved and not filled yet.
        self.lacking = 0
        self.is_closed = False


class Outlet:
    """Messages to one rank: some are filled while others are sent."""

    def __init__(self, rank: int, messages: Messages) -> None:
        self._rank = rank
        self._messages = messages
        # A thread that waits until the peer has taken a message holds the first lock only.
        self._reserving = threading.Lock()
        self._lock = threading.Lock()
        self._open: _Message | None = None
        self._free: list[_Message] = []
        self._made = 0
        self._under_way: deque[tuple[_Message, Outgoing, Outgoing]] = deque()
        self._failure: BaseException | None = None

    def reserve(self, head: bytes, nbytes: int) -> Reserved:
        """Reserve memory in a message, behind a head."""
        with self._reserving:
            message = self._message_for(len(head) + round_up(nbytes, _ALIGN))
            with self._lock:
                message.lacking += 1
            begin = message.at + len(head)
            message.memory[message.at : begin] = head
            message.at = begin + round_up(nbytes, _ALIGN)
        return message.memory[begin : begin + nbytes], lambda: self._filled(message)

    def end(self) -> None:
        """Send what is left, and that nothing follows."""
        with self._reserving:
            if self._open is not None:
                self._close()
            with self._lock:
                self._ended = self._send_length(0)

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
                self._free.append(_Message())
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
        length = self._send_length(message.at)
        sent = self._messages.send(self._rank, _PARTS, message.memory[: message.at])
        self._under_way.append((message, length, sent))

    def _send_length(self, nbytes: int) -> Outgoing:
        length = memoryview(bytearray(_LENGTH.pack(nbytes)))
        return self._messages.send(self._rank, _LENGTHS, length)

    def _await_oldest(self) -> None:
        # Each message is waited for once: what failed for one thread has failed for all.
        if self._failure is not None:
            raise self._failure
        message, *sent = self._under_way[0]
        try:
            for one in sent:
                self._messages.await_taken(one)
        except BaseException as error:
            self._failure = error
            raise
        self._under_way.popleft()
        message.at, message.is_closed = 0, False
        self._free.append(message)


def _messages_from(peer: int, messages: Messages, progress: Progress) -> Iterator[memoryview]:
    """Yield each message of a rank; it is valid until the next one is asked for.

    One message is asked for while another is taken apart.
    """
    buffers: list[memoryview] = []
    answers: deque[dist.Work] = deque()

    def answer(message: Incoming) -> None:
        answers.append(messages.take(message))
        if len(answers) > _ANSWERS:
            progress.wait(peer, answers.popleft())

    def next_length() -> int:
        memory = memoryview(bytearray(_LENGTH.size))
        answer(messages.ask(peer, _LENGTHS, memory))
        (nbytes,) = _LENGTH.unpack(memory)
        if nbytes > MESSAGE_NBYTES:
            raise CorruptShardError(f"rank {peer} announced a message of {nbytes} bytes")
        return int(nbytes)

    asked, turn = None, 0
    expected = next_length()
    while expected or asked is not None:
        following = None
        if expected:
            if len(buffers) < _IN_FLIGHT:
                buffers.append(PrivateBuffer(MESSAGE_NBYTES).view)
            memory = buffers[turn][:expected]
            following = messages.ask(peer, _PARTS, memory), memory
            turn = (turn + 1) % _IN_FLIGHT
        if asked is not None:
            yield asked[1]
        asked = following
        if asked is not None:
            answer(asked[0])
            expected = next_length()
    while answers:
        progress.wait(peer, answers.popleft())


def take_apart(peer: int, message: memoryview, find: Find) -> None:
    """Have the parts of a message taken."""
    at = 0
    while at < len(message):
        item, part, offset, nbytes = HEAD.unpack_from(message, at)
        begin = at + HEAD.size
        if begin + nbytes > len(message):
            raise CorruptShardError(f"rank {peer} sent a message that is cut short")
        values = torch.frombuffer(message[begin : begin + nbytes], dtype=torch.uint8)
        try:
            find(peer, item, part).take(offset, values)
        except ValueError as error:
            raise CorruptShardError(f"rank {peer} sent no part of a tensor: {error}") from error
        at = begin + round_up(nbytes, _ALIGN)
