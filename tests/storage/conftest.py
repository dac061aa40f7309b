"""Stores of each kind, closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localckpt.storage.directory import DirectoryStore, MemoryStore

KINDS = ["disk", "memory"]


class Node:
    """One node: ``node(rank, session)`` opens its store."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind, self.root = kind, root
        self.stores: list[DirectoryStore] = []

    def __call__(
        self, rank: int = 0, session: str = "run", timeout_s: float = 5.0
    ) -> DirectoryStore:
        kind = MemoryStore if self.kind == "memory" else DirectoryStore
        self.stores.append(kind(self.root, session, rank, timeout_s))
        return self.stores[-1]


@pytest.fixture(params=KINDS)
def node(
    request: pytest.FixtureRequest, tmp_path: Path, shm_roots: Callable[[int], list[Path]]
) -> Iterator[Node]:
    """A node of each kind: disk and shared memory."""
    (memory,) = shm_roots(1)
    made = Node(request.param, (memory if request.param == "memory" else tmp_path) / "node")

    yield made

    for store in made.stores:
        store.close()
