"""Bytes of the staging memory of stores, which only tests ask for."""

from __future__ import annotations

from localckpt.storage.directory import DirectoryStore, MemoryStore

__all__ = ["staging_nbytes"]


def staging_nbytes(store: DirectoryStore) -> int:
    if not isinstance(store, MemoryStore):
        return store._pool.nbytes
    mapped = (*store._staged.values(), *store._recycled.values())
    return store._pool.nbytes + sum(len(buffer.view) for buffer in mapped)
