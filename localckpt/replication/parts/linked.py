"""Parts of tensors over a link between two ranks of one node.

A part is sent from where it was read and verified, and received where it belongs. The kernel holds
what is under way, so neither rank keeps messages.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import memory_at
from localckpt.replication.parts.wire import (
    END,
    HEAD_NBYTES,
    RUN,
    Head,
    cut_head,
    run_head,
    small_cuts,
    take,
)
from localckpt.replication.progress import Progress
from localckpt.state_dict.runs import PartReceiver, Reservation
from localckpt.state_dict.source import PIECE_NBYTES

__all__ = ["LinkOutlet", "LinkedPart", "take_all"]

# What the receiver answers once it has all.
_TAKEN = b"\1"


class LinkOutlet:
    """Link to one rank, over which several threads send parts.

    Args:
        rank: The rank.
        link: The link.
        progress: Progress of the exchange.
    """

    def __init__(self, rank: int, link: socket.socket, progress: Progress) -> None:
        self.rank = rank
        self._link = link
        self._progress = progress
        self._sending = threading.Lock()

    def send(self, head: bytes, data: memoryview) -> None:
        """Send a part; its bytes may change once the call returns."""
        with self._sending, self._progress.blaming(self.rank):
            self._link.settimeout(self._progress.left().total_seconds())
            self._link.sendall(head)
            self._link.sendall(data)
            self._progress.count(self.rank, sent=len(data))

    def reserve(self, runs: Sequence[tuple[PartReceiver, int, int]]) -> Reservation:
        raise AssertionError("no part of a link takes bytes in place")

    def end(self) -> None:
        """Send that nothing follows."""
        self.send(Head(0, 0, END).pack(), memoryview(b""))

    def await_taken(self) -> None:
        """Wait until the rank has all parts."""
        with self._progress.blaming(self.rank):
            self._link.settimeout(self._progress.left().total_seconds())
            if self._link.recv(len(_TAKEN)) != _TAKEN:
                raise ConnectionError("the connection was closed")


@dataclass(frozen=True, slots=True)
class LinkedPart:
    """Part of a tensor of another rank; a :class:`PartReceiver`.

    Attributes:
        channel: Link to the rank.
        item, index: Numbers by which the rank finds the part.
    """

    channel: LinkOutlet
    item: int
    index: int

    def takes_direct(self, nbytes: int) -> bool:
        return False

    def take_run(self, offset: int, data: memoryview) -> None:
        self.channel.send(run_head(self.item, self.index, offset, len(data)), data)

    def take_cut(self, first: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        for start, lengths, some in small_cuts(first, sizes, values):
            dense = some.contiguous()
            nbytes = dense.numel() * dense.itemsize
            head = cut_head(self.item, self.index, start, lengths, nbytes)
            self.channel.send(head, memory_at(dense.data_ptr(), nbytes))


def take_all(
    peer: int,
    link: socket.socket,
    progress: Progress,
    find: Callable[[int, int, int], PartReceiver],
) -> None:
    """Take all parts that a rank sends over a link.

    Args:
        peer: The rank.
        link: The link.
        progress: Progress of the exchange.
        find: Finds who takes a part.

    Raises:
        CorruptShardError: A part contradicts itself, or what is taken.
    """
    scratch = memoryview(bytearray(HEAD_NBYTES))
    while True:
        _receive(peer, link, progress, scratch[:HEAD_NBYTES])
        head = Head.unpack(scratch)
        if head.kind == END:
            break
        if max(head.nbytes, head.numbers_nbytes) > PIECE_NBYTES:
            raise CorruptShardError(f"rank {peer} announced a part of {head.nbytes} bytes")
        receiver = find(peer, head.item, head.part)
        if head.kind == RUN and receiver.takes_direct(head.nbytes):
            (memory,), done = receiver.channel.reserve([(receiver, head.offset, head.nbytes)])
            if len(memory) != head.nbytes:
                raise CorruptShardError(f"rank {peer} sent more of a part than it has")
            _receive(peer, link, progress, memory)
            done()
        else:
            if len(scratch) < head.numbers_nbytes + head.nbytes:
                scratch = memoryview(bytearray(head.numbers_nbytes + head.nbytes))
            numbers = scratch[: head.numbers_nbytes]
            data = scratch[head.numbers_nbytes :][: head.nbytes]
            _receive(peer, link, progress, scratch[: len(numbers) + len(data)])
            take(receiver, head, numbers, data)
        progress.count(peer, received=head.nbytes)
    with progress.blaming(peer):
        link.sendall(_TAKEN)


def _receive(peer: int, link: socket.socket, progress: Progress, memory: memoryview) -> None:
    done = 0
    with progress.blaming(peer):
        while done < len(memory):
            link.settimeout(progress.left().total_seconds())
            count = link.recv_into(memory[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the connection was closed")
            done += count
