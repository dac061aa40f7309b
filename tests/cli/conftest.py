"""Stores to look at: of one rank, and of a job of four nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.managers.jobs import KINDS, in_job, make_manager, state_of
from tests.ranks import run_ranks

Dirs = Callable[[int], list[Path]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(kind: str, node_dirs: Dirs, shm_roots: Dirs) -> Path:
    """An empty directory on a disk, and in shared memory."""
    return (node_dirs if kind == "disk" else shm_roots)(1)[0]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The store of a job of one rank that saved iterations 1 to 4, and kept two."""
    root = tmp_path / "store"
    with make_manager("disk", root, "run", keep_last=2) as manager:
        for iteration in range(1, 5):
            manager.save(state_of(0, iteration), iteration)
    return root


def _save_twice(rank: int, world_size: int) -> None:
    with in_job(keep_last=2) as (manager, _):
        for iteration in (10, 20):
            manager.save(state_of(rank, iteration), iteration)


@pytest.fixture(scope="session")
def _nodes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("nodes")
    nodes = [base / f"node{number}" for number in range(4)]
    for node in nodes:
        node.mkdir()
    run_ranks(_save_twice, 4, store_per_node=nodes)
    return nodes


@pytest.fixture
def nodes(_nodes: list[Path], tmp_path: Path) -> list[Path]:
    """The stores of four nodes with a rank each; 0 and 1, and 2 and 3, have each other's copies.

    Iterations 10 and 20 are there.
    """
    copies = [tmp_path / node.name for node in _nodes]
    for node, copy in zip(_nodes, copies, strict=True):
        shutil.copytree(node, copy)
    return copies


@pytest.fixture
def as_root() -> None:
    """Skips where commands cannot be run as another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a command as another user")
