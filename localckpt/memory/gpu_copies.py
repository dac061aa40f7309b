"""Copies from and to GPUs on side streams, beside training.

Copies wait for the work that is queued on training's stream at the call, so the copied values are
those of the call as long as nobody changes the tensors before the copies have ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from localckpt.errors import CheckpointingException
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import copy_values
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.001


class CopiesUnderWay:
    """Copies that were queued together; keeps the sources, as torch reuses freed memory at once."""

    def __init__(
        self, tensors: list[torch.Tensor], events: dict[torch.device, Any], timeout_s: float
    ) -> None:
        self._tensors = tensors
        self._events = events
        self._timeout_s = timeout_s

    @property
    def over(self) -> bool:
        """True if all values are in host memory; does not wait."""
        return all(event.query() for event in self._events.values())

    def wait(self) -> None:
        """Wait until all values are in host memory."""
        _await(self._events.values(), self._timeout_s)
        self._tensors = []

    def hold_back_training(self) -> None:
        """Make kernels that training queues from now on run after the copies; does not wait."""
        for device, event in self._events.items():
            torch.get_device_module(device).current_stream(device).wait_event(event)


class SideStreams:
    """Side streams, one for each GPU, made at the first use."""

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._streams: dict[torch.device, Any] = {}

    def queue(self, copies: Sequence[tuple[memoryview, torch.Tensor]]) -> CopiesUnderWay:
        """Queue copies of tensors to their places in host memory, which should be page-locked."""
        events: dict[torch.device, Any] = {}
        for device in dict.fromkeys(tensor.device for _, tensor in copies):
            module = torch.get_device_module(device)
            if device not in self._streams:
                self._streams[device] = module.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(module.current_stream(device))
            with module.stream(stream):
                for place, tensor in copies:
                    if tensor.device == device:
                        copy_to_host(place, tensor)
            events[device] = module.Event()
            events[device].record(stream)
        return CopiesUnderWay([tensor for _, tensor in copies], events, self._timeout_s)

    def synchronize(self) -> None:
        _await(self._streams.values(), self._timeout_s)


class BounceBuffers:
    """Buffers of threads, page-locked, for copies to GPUs after what training has queued by now."""

    def __init__(self, devices: Iterable[torch.device], nbytes: int) -> None:
        self._nbytes = nbytes
        self._mine = threading.local()
        self._begun: dict[torch.device, Any] = {}
        for device in set(devices):
            module = torch.get_device_module(device)
            self._begun[device] = module.Event()
            self._begun[device].record(module.current_stream(device))

    def buffer(self) -> memoryview:
        """Return this thread's buffer, which may be overwritten once :meth:`finish` returns."""
        if not hasattr(self._mine, "buffer"):
            # torch caches page-locked memory, so the next load does not lock it again.
            try:
                buffer = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=bool(self._begun))
            except RuntimeError as error:
                logger.warning("no memory can be locked, so copies are slower: %s", error)
                buffer = torch.empty(self._nbytes, dtype=torch.uint8)
            self._mine.buffer = buffer
        return memory_at(self._mine.buffer.data_ptr(), self._nbytes)

    def begin(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Begin to copy bytes of this thread's buffer to a flat uint8 tensor on a GPU."""
        with torch.get_device_module(target.device).stream(self._stream(target.device)):
            target.copy_(data, non_blocking=True)

    def finish(self) -> None:
        """Wait for the copies that this thread has begun."""
        _await(getattr(self._mine, "streams", {}).values(), _TIMEOUT_S)

    def _stream(self, device: torch.device) -> Any:
        if not hasattr(self._mine, "streams"):
            self._mine.streams = {}
        if device not in self._mine.streams:
            stream = torch.get_device_module(device).Stream(device)
            stream.wait_event(self._begun[device])
            self._mine.streams[device] = stream
        return self._mine.streams[device]


def await_training(devices: Iterable[torch.device], timeout_s: float) -> None:
    """Wait until the work that training has queued on these devices by now has ended."""
    streams = [
        torch.get_device_module(device).current_stream(device)
        for device in devices
        if device.type != "cpu"
    ]
    _await(streams, timeout_s)


def _await(queues: Iterable[Any], timeout_s: float) -> None:
    """Wait until these events have happened, or these streams are empty."""
    until = time.monotonic() + timeout_s
    for queue in queues:
        left_s = until - time.monotonic()
        # Polled, since CUDA's own wait has no deadline.
        if not wait_until(
            queue.query, left_s, shortest_s=_SHORTEST_PAUSE_S, longest_s=_LONGEST_PAUSE_S
        ):
            raise CheckpointingException(
                f"a GPU has not finished copying its tensors after {timeout_s:g} s: does it "
                f"wait for a collective that a peer never joined?"
            )


def copy_to_host(place: memoryview, tensor: torch.Tensor) -> None:
    """Copy a tensor's value to host memory, contiguous, whatever its dtype, strides and device."""
    if not tensor.is_cpu:
        # copy_ would conjugate or negate on the host, before the bytes have arrived there.
        tensor = tensor.resolve_conj().resolve_neg()
    flat = torch.frombuffer(place, dtype=torch.uint8)
    target = flat.view(tensor.dtype).view(tensor.shape)
    copy_values(target, tensor, non_blocking=True)
