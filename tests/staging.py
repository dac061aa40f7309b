"""Bytes of the staging memory of pools and stores, which only tests ask for."""

from __future__ import annotations

from localckpt.storage.directory import DirectoryStore
from localckpt.storage.disk import PooledStore
from localckpt.storage.memory import MemoryStore
from localckpt.storage.pool import BufferPool

__all__ = ["pool_nbytes", "staging_nbytes"]


def pool_nbytes(pool: BufferPool) -> int:
    """Bytes of all buffers of a pool together."""
    with pool._lock:
        return sum(len(b.view) for buffers in pool._buffers.values() for b in buffers)


def staging_nbytes(store: DirectoryStore) -> int:
    """Bytes of all buffers, or of all files that are mapped."""
    if isinstance(store, PooledStore):
        return pool_nbytes(store._pool)
    assert isinstance(store, MemoryStore)
    mapped = (*store._staged.values(), *store._recycled.values())
    return sum(len(buffer.view) for buffer in mapped)
