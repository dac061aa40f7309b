"""Transports: images sent between ranks, in chunks, with a deadline.

Host memory is sent over gloo, device memory over NCCL. A transport knows neither shards nor plans:
it is told how many bytes go to and come from which rank. The other ranks must be told the matching
things; sizes are agreed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from localckpt.errors import MismatchError
from localckpt.replication.device_transport import DeviceTransport
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.host_transport import HostTransport
from localckpt.state_dict.source import ShardSource

__all__ = ["DeviceTransport", "HostTransport", "Transport", "choose_transport"]


class Transport(Protocol):
    """Connections to other ranks, over which images are sent and received at once.

    To add one: a module beside this one, and a choice in :func:`choose_transport`, for the
    replication of saves, or in ``retrieval.connect_for``, for all else.
    """

    broken: bool
    """True if an exchange failed, or was ended: a new transport is needed."""

    def exchange(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        receives: Sequence[tuple[int, memoryview]],
        timeout_s: float,
    ) -> None:
        """Send images to ranks of the job, and receive others into writable memory.

        Ranks call it together. Several images between the same two ranks are listed in the same
        order by both. When it raises, nothing is read from or written to the memory any more.

        Args:
            timeout_s: Deadline of the whole exchange, in seconds.
        """
        ...

    def abort(self) -> None:
        """End an exchange that is under way in another thread, with an error there."""
        ...

    def close(self) -> None:
        """Give up the connections that this transport opened itself."""
        ...


def choose_transport(
    group: GroupWrapper | dist.ProcessGroup | None,
    tensors_on_gpu: bool,
    *,
    owns_group: bool = False,
) -> Transport:
    """Choose the transport for host or device memory; arguments as for the transports."""
    wrapped = GroupWrapper.wrap(group)
    if wrapped.supports("cuda") and (tensors_on_gpu or not wrapped.supports("cpu")):
        device = torch.device("cuda", torch.cuda.current_device())
        return DeviceTransport(wrapped, device, owns_group=owns_group)
    if wrapped.supports("cpu"):
        return HostTransport(wrapped)
    raise MismatchError(
        f"the group's backend {wrapped.backend!r} sends neither host nor CUDA memory; "
        f"make the group with gloo or NCCL"
    )
