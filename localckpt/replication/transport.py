"""Transports: images sent between ranks, in chunks, with a deadline.

Host memory is sent over gloo, device memory over NCCL. A transport knows neither shards nor plans:
it is told how many bytes go to and come from which rank. The other ranks must be told the matching
things; sizes are agreed beforehand.
"""

from __future__ import annotations

from typing import Protocol

from localckpt.replication.device_transport import DeviceTransport
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.progress import Receives, Sends

__all__ = ["DeviceTransport", "HostTransport", "Transport"]


class Transport(Protocol):
    """Connections to other ranks, over which images are sent and received at once.

    To add one: a module beside this one, and a choice in ``CliqueReplicationStrategy._exchange``,
    for saves, or in ``retrieval.connect_for``, for all else.
    """

    broken: bool
    """True if an exchange failed, or was ended: a new transport is needed."""

    def exchange(self, sends: Sends, receives: Receives, timeout_s: float) -> None:
        """Send images to ranks of the job, and receive others into writable memory.

        Ranks call it together. Several images between the same two ranks are listed in the same
        order by both. When it raises, nothing is read from or written to the memory any more.
        ``timeout_s`` is the deadline of the whole exchange.
        """
        ...

    def abort(self) -> None:
        """End an exchange that is under way in another thread, with an error there."""
        ...

    def close(self) -> None:
        """Give up the connections that this transport opened itself."""
        ...
