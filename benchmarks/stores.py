"""Stores for simulated ranks: a server that does not look up names, and a client that counts."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    from localckpt.ranks.ranks import Ranks

__all__ = ["CountingStore", "serve_store"]

# Methods of a store that send no message, and those that send two: a get first waits for the key.
_WITHOUT_MESSAGE = ("has_extended_api", "set_timeout")
_WITH_TWO = ("get", "multi_get")


def serve_store() -> TCPStore:
    """Serve a store for IPv4 clients alone.

    torch's server looks up the name of each client, in the one thread that serves all. The socket
    that it would open itself takes IPv4 clients at IPv6 addresses that no hosts file names, so each
    look-up would go to the name server, which may take seconds to answer.
    """
    listening = socket.create_server(("", 0), backlog=4096)
    port = listening.getsockname()[1]
    return TCPStore(
        *("127.0.0.1", port, None, True),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class CountingStore:
    """A store, and the number of its operations."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.operations = 0

    @classmethod
    def count(cls, ranks: Ranks) -> list[CountingStore]:
        """Put counting stores in the place of all clients of ``ranks``, which is open."""
        part: Any = ranks._part
        part._store = cls(part._store)
        counts = [part._store]
        if part.is_large:
            # Made now; else each would be made, uncounted, by the first thread that waits.
            part._clients = [cls(part._own_client())]
            counts += part._clients
        return counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            if name not in _WITHOUT_MESSAGE:
                self.operations += 2 if name in _WITH_TWO else 1
            return method(*args)

        return counted
