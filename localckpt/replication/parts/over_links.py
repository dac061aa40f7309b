"""Messages of parts over links, between ranks of one node: in memory that both ranks share.

A piece of an image is read straight into a message, and the receiver copies it to where it belongs:
the bytes pass no socket. The link says which message is there, and that it was taken.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator

from localckpt.errors import CorruptShardError
from localckpt.memory.host_memory import map_memory
from localckpt.replication.parts.messages import MESSAGE_NBYTES
from localckpt.replication.progress import Progress

__all__ = ["LinkSender", "link_messages"]

# Number of the memory, and the length of the message in it; 0 says that no message follows.
_NOTE = struct.Struct("<II")
# Its receiver answers each note once it has taken the message.
_TAKEN = b"\1"


class LinkSender:
    """Messages to one rank; a :class:`~localckpt.replication.parts.messages.MessageSender`.

    Args:
        rank: The rank.
        link: Link to the rank.
        progress: Progress of the exchange.
    """

    def __init__(self, rank: int, link: socket.socket, progress: Progress) -> None:
        self._rank = rank
        self._link = link
        self._progress = progress
        self._made = 0
        # Files of memories that the rank does not have yet.
        self._files: dict[int, int] = {}
        self._under_way: deque[int] = deque()

    def make(self) -> memoryview:
        fd = os.memfd_create("localckpt-parts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files[self._made] = fd
        self._made += 1
        os.ftruncate(fd, MESSAGE_NBYTES)
        # A file that shrinks would end a process that reads its memory.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return map_memory(MESSAGE_NBYTES, fd)

    def send(self, number: int, nbytes: int) -> None:
        self._note(number, nbytes, [self._files[number]] if number in self._files else [])
        if number in self._files:
            os.close(self._files.pop(number))
        self._under_way.append(nbytes)

    def await_oldest(self) -> None:
        self._await_taken()
        self._progress.count(self._rank, sent=self._under_way.popleft())

    def end(self) -> None:
        self._note(0, 0, [])

    def await_end(self) -> None:
        self._await_taken()

    def close(self) -> None:
        """Close the files of memories that were not sent."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _note(self, number: int, nbytes: int, files: list[int]) -> None:
        with self._progress.blaming(self._rank):
            self._link.settimeout(self._progress.left().total_seconds())
            note = _NOTE.pack(number, nbytes)
            if socket.send_fds(self._link, [note], files) != len(note):
                raise ConnectionError("the connection takes no more")

    def _await_taken(self) -> None:
        with self._progress.blaming(self._rank):
            self._link.settimeout(self._progress.left().total_seconds())
            if self._link.recv(len(_TAKEN)) != _TAKEN:
                raise ConnectionError("the connection was closed")


def link_messages(peer: int, link: socket.socket, progress: Progress) -> Iterator[memoryview]:
    """Yield each message that a rank sends; it is valid until the next one is asked for.

    Args:
        peer: The rank.
        link: Link from the rank.
        progress: Progress of the exchange.

    Raises:
        CorruptShardError: The rank has announced a message that is not there.
    """
    memories: dict[int, memoryview] = {}
    nbytes = -1
    while nbytes:
        with progress.blaming(peer):
            number, nbytes, files = _next_note(link, progress)
            for fd in files:
                memories[number] = _map(fd)
        if nbytes > (len(memories[number]) if number in memories else 0):
            raise CorruptShardError(f"rank {peer} announced a message of {nbytes} bytes")
        if nbytes:
            yield memories[number][:nbytes]
        progress.count(peer, received=nbytes)
        with progress.blaming(peer):
            link.sendall(_TAKEN)


def _next_note(link: socket.socket, progress: Progress) -> tuple[int, int, list[int]]:
    link.settimeout(progress.left().total_seconds())
    # The kernel keeps the file of a note with its first byte, and a note is written at once.
    note, files, _, _ = socket.recv_fds(link, _NOTE.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(note) != _NOTE.size:
        for fd in files:
            os.close(fd)
        raise ConnectionError("the connection was closed")
    return *_NOTE.unpack(note), files


def _map(fd: int) -> memoryview:
    """Map the file of a memory, and close it."""
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ConnectionError("the memory may shrink")
        return map_memory(min(MESSAGE_NBYTES, os.fstat(fd).st_size), fd)
    finally:
        os.close(fd)
