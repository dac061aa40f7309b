"""Stores of each kind, closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from localckpt.storage.disk import DiskStore
from localckpt.storage.memory import MemoryStore
from localckpt.storage.store import Store

KINDS = ["thread", "process", "memory"]


class Node(Protocol):
    """One node: ``node(rank, session)`` opens its store."""

    root: Path
    shared: Path
    kind: str

    def __call__(
        self, rank: int = 0, session: str = "run", timeout_s: float = 5.0, root: Path | None = None
    ) -> Store: ...


class _Node:
    def __init__(self, kind: str, root: Path, shared: Path) -> None:
        self.kind, self.root, self.shared = kind, root, shared
        self.stores: list[Store] = []

    def __call__(
        self, rank: int = 0, session: str = "run", timeout_s: float = 5.0, root: Path | None = None
    ) -> Store:
        store: Store
        if self.kind == "memory":
            store = MemoryStore(root or self.root, session, rank, timeout_s)
        else:
            writer = "thread" if self.kind == "thread" else "process"
            store = DiskStore(
                *(root or self.root, session, rank, timeout_s),
                writer=writer,
                shared_memory=self.shared,
            )
        self.stores.append(store)
        return store


@pytest.fixture(params=KINDS)
def node(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    shm_roots: Callable[[int], list[Path]],
) -> Iterator[Node]:
    """A node of each kind: disk written by a thread, by a process, and shared memory."""
    memory, shared = shm_roots(2)
    made = _Node(
        request.param, (memory if request.param == "memory" else tmp_path) / "node", shared
    )

    yield made

    for store in made.stores:
        store.close()
