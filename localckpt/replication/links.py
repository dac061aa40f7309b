"""Sockets between the ranks of one node, over which they tell each other of memory that they share.

They end at once when a rank does. Where there are none, as between the network namespaces of two
containers, gloo's connections serve.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Collection, Mapping

from localckpt.errors import PeerLostError
from localckpt.ranks.deadline import Deadline

__all__ = ["Links"]

logger = logging.getLogger(__name__)

_TOKEN_NBYTES = 12
_HELLO = struct.Struct(f"<Q{_TOKEN_NBYTES}s")
# Process, user and group of the other end, as the kernel noted them when the two connected.
_CREDENTIALS = struct.Struct("3i")
# What a rank says of itself is there when it is accepted; a stranger may say nothing.
_HELLO_S = 1.0
# The kernel's own limit, net.core.somaxconn.
_MOST_WAITING = 4096


class Links:
    """Links of this rank to others of its node, each for one direction.

    Args:
        rank: This rank.

    Attributes:
        address: What other ranks need to send to this one; empty if they cannot.
        outgoing: By rank the sockets that this one sends over.
        incoming: By rank the sockets that this one receives from.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}
        self.address = ""
        self._listening: socket.socket | None = None
        name = secrets.token_hex(_TOKEN_NBYTES)
        # Every user of the host can see the name, and every process of this user may connect. A
        # rank knows the token, too.
        self._token = secrets.token_bytes(_TOKEN_NBYTES)
        try:
            # The kernel may forbid the memory that is shared over links.
            os.close(os.memfd_create("localckpt", os.MFD_CLOEXEC))
            self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # A name that begins with 0 is in no file system, and ends with its last socket.
            self._listening.bind(_path(name))
            # Ranks connect before this one accepts any of them.
            self._listening.listen(_MOST_WAITING)
        except OSError as error:
            logger.info("ranks of this node have no links: %s", error)
        else:
            self.address = f"{name}.{self._token.hex()}"

    def connect(self, addresses: Mapping[int, str], deadline: Deadline) -> bool:
        """Connect to ranks that are listening.

        Args:
            addresses: Their addresses.
            deadline: End of the wait.

        Returns:
            Whether all of them can be reached.
        """
        for peer, address in addresses.items():
            name, _, token = address.partition(".")
            try:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.outgoing[peer] = link
                link.settimeout(deadline.left_s)
                link.connect(_path(name))
                if not _is_this_users(link):
                    raise PermissionError("it listens as another user")
                link.sendall(_HELLO.pack(self._rank, bytes.fromhex(token)))
            except OSError as error:
                logger.info("rank %d has no link to rank %d: %s", self._rank, peer, error)
                return False
        return True

    def accept(self, peers: Collection[int], deadline: Deadline) -> None:
        """Accept the links of ranks, all of which have connected.

        Raises:
            PeerLostError: One of them has ended.
        """
        assert self._listening is not None, "they have its address"
        while lacking := set(peers) - self.incoming.keys():
            try:
                self._listening.settimeout(deadline.left_s)
                link, _ = self._listening.accept()
            except OSError as error:
                raise PeerLostError(
                    f"rank {self._rank} has no link from rank {min(lacking)} any more ({error}). "
                    f"Shards kept on this node are untouched; restart the job if that rank has "
                    f"died"
                ) from error
            rank = self._identify(link)
            if rank in lacking:
                self.incoming[rank] = link
            else:
                logger.warning("rank %d turned a stranger away from its links", self._rank)
                link.close()

    def _identify(self, link: socket.socket) -> int:
        """Return the rank that has connected; -1 for a stranger."""
        if not _is_this_users(link):
            return -1
        link.settimeout(_HELLO_S)
        try:
            hello = link.recv(_HELLO.size)
        except OSError:
            return -1
        rank, token = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
        return rank if secrets.compare_digest(token, self._token) else -1

    def cut(self) -> None:
        """End all links, from another thread too; who uses one has an error."""
        for link in (*self.outgoing.values(), *self.incoming.values()):
            # One that has ended, or was never connected, refuses.
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close the links, of which some rank lacks one."""
        for link in (*self.outgoing.values(), *self.incoming.values()):
            link.close()
        self.outgoing, self.incoming = {}, {}

    def close(self) -> None:
        """Close all sockets. May be called twice."""
        self.drop()
        if self._listening is not None:
            self._listening.close()


def _is_this_users(link: socket.socket) -> bool:
    """Return whether the process at the other end runs as the user of this one."""
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    return bool(uid == os.geteuid())


def _path(name: str) -> str:
    return f"\0localckpt-{name}"
