"""Buffers that are sent to another process as copies; without torch, so that it starts quickly."""

from __future__ import annotations

from collections.abc import Callable

from localckpt.storage.buffers import PrivateBuffer


class SentBuffer(PrivateBuffer):
    """Buffer of which another process gets a copy."""

    def __reduce__(self) -> tuple[Callable[[bytes], PrivateBuffer], tuple[bytes]]:
        return _received, (bytes(self.view),)


def _received(content: bytes) -> PrivateBuffer:
    buffer = PrivateBuffer(len(content))
    buffer.view[:] = content
    buffer.take()
    return buffer
