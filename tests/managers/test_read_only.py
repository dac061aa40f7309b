"""A read-only manager loads beside a job that lives, and leaves no trace."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CheckpointingException, GlobalCheckpointManager, NoReplicasAvailableError
from localckpt.managers.load import Load
from localckpt.storage.names import DIRTY, RECYCLED
from tests.global_tier.models import manager_on
from tests.managers.jobs import assert_same, cliques, damage, error_of, make_manager, state_of
from tests.ranks import node_store, run_ranks
from tests.storage.shards import ROOT

Dirs = Callable[[int], list[Path]]


@pytest.fixture(params=["disk", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(kind: str, node_dirs: Dirs, shm_roots: Dirs) -> Path:
    return (node_dirs if kind == "disk" else shm_roots)(1)[0]


def _everything(root: Path) -> dict[Path, tuple[int, int]]:
    """All names below a directory, each with its inode and time of change."""
    return {p: (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in [root, *root.rglob("*")]}


def _kept(root: Path) -> dict[Path, tuple[int, int]]:
    """The same of files that a live job does not make ahead of time, in the background."""
    found = _everything(root).items()
    return {p: seen for p, seen in found if p.is_file() and p.suffix not in (RECYCLED, DIRTY)}


def _read(rank: int, world_size: int, kind: str, root: Path) -> None:
    before = _kept(root)
    with make_manager(kind, root, "job", read_only=True) as manager:
        assert manager.find_latest() == 3
        assert manager.all_iterations() == [3, 2]
        assert_same(manager.load()[0], state_of(0, 3))
        assert_same(manager.load(iteration=2)[0], state_of(0, 2))
        assert str(manager.explain()).startswith("A ")
        for call in (
            lambda: manager.save(state_of(0, 9), 9),
            lambda: manager.warm_up(state_of(0, 9)),
            lambda: manager.begin(1),
        ):
            assert "read_only=True" in error_of(call)
    assert _kept(root) == before


def test_it_loads_beside_a_live_job_and_changes_nothing(kind: str, root: Path) -> None:
    with make_manager(kind, root, "job", keep_last=2) as writer:
        for iteration in (1, 2, 3):
            writer.save(state_of(0, iteration), iteration)

        run_ranks(_read, 1, kind, root, init_group=False)

        writer.save(state_of(0, 4), 4)
        assert writer.find_latest() == 4


def test_a_damaged_file_is_left_out_and_keeps_its_name(kind: str, root: Path) -> None:
    with make_manager(kind, root, "job", keep_last=2) as writer:
        for iteration in (1, 2):
            writer.save(state_of(0, iteration), iteration)
    for path in root.rglob("*2.0.*.safetensors"):
        damage(path, 0.5)
    before = _everything(root)

    with make_manager(kind, root, "job", read_only=True) as manager:
        assert_same(manager.load()[0], state_of(0, 1))

    assert _everything(root) == before


def test_a_store_that_is_not_there_is_not_made(kind: str, root: Path) -> None:
    with make_manager(kind, root / "none", "job", read_only=True) as manager:
        assert manager.find_latest() == -1
        with pytest.raises(NoReplicasAvailableError):
            manager.load()

    assert not (root / "none").exists()


def _save_with_copies(rank: int, world_size: int) -> None:
    replicas = cliques(1, 2)
    with make_manager("disk", node_store(), "job", replicas) as manager:
        manager.save(state_of(rank, 5), 5)
    replicas.close()


def _save_with_parity(rank: int, world_size: int) -> None:
    parity = localckpt.ParityReplicationStrategy(1, world_size)
    with make_manager("disk", node_store(), "job", parity) as manager:
        manager.save(state_of(rank, 5), 5)
    parity.close()


def _read_what_peers_have(rank: int, world_size: int) -> str:
    before = _everything(node_store())
    with make_manager("disk", node_store(), "job", read_only=True) as manager:
        for _ in range(3):
            assert_same(manager.load()[0], state_of(rank, 5))
        came_from = str(manager.last_load.source)
    assert _everything(node_store()) == before
    return came_from


@pytest.mark.parametrize(
    ("save", "ranks", "told"),
    [(_save_with_copies, 2, "peer rank"), (_save_with_parity, 3, "parity")],
    ids=["copies", "parity"],
)
def test_what_is_on_other_nodes_is_fetched_or_computed_and_not_kept(
    save: Callable[[int, int], None], ranks: int, told: str, node_dirs: Dirs
) -> None:
    nodes = node_dirs(ranks)
    run_ranks(save, ranks, store_per_node=nodes)
    (empty,) = node_dirs(1)

    came_from = run_ranks(_read_what_peers_have, ranks, store_per_node=[empty, *nodes[1:]])

    assert told in came_from[0]
    assert came_from[1:] == ["own node"] * (ranks - 1)


def test_one_of_shared_storage_reads_while_another_job_saves(tmp_path: Path) -> None:
    with manager_on(tmp_path, "job") as writer:
        writer.save({"w": torch.ones(3)}, 1)
        before = _everything(tmp_path)
        with manager_on(tmp_path, "job", read_only=True) as manager:
            assert manager.all_iterations() == [1]
            assert_same(manager.load(into={"w": torch.zeros(3)})[0], {"w": torch.ones(3)})
            text = error_of(lambda: manager.save({"w": torch.ones(3)}, 2), CheckpointingException)
            assert "read_only=True" in text
        assert _everything(tmp_path) == before
        writer.save({"w": torch.ones(3)}, 2)


# Beside a job that prunes.


def _make(tier: str, root: Path, **options: Any) -> Any:
    if tier == "shared":
        return manager_on(root, "job", **options)
    return make_manager(tier, root, "job", **options)


def _load_what_is_pruned_meanwhile(
    rank: int, world_size: int, tier: str, root: Path | None, prunes: int, timeout: float
) -> int:
    """Load while every checkpoint that is chosen, up to a number, is pruned before it is read."""
    root = node_store() if root is None else root
    owner: Any = GlobalCheckpointManager if tier == "shared" else Load
    name = "_reader_of" if tier == "shared" else "load"
    with (
        _make(tier, root, keep_last=1) as writer,
        _make(tier, root, read_only=True, timeout=timeout) as reader,
    ):
        writer.save({"w": torch.full((1000,), 1.0)}, 1)
        assert reader.find_latest() == 1
        choose, saved = getattr(owner, name), [1]

        def prune_and_choose(self: Any, *args: Any) -> Any:
            if saved[-1] <= prunes:
                saved.append(saved[-1] + 1)
                writer.save({"w": torch.full((1000,), float(saved[-1]))}, saved[-1])
            return choose(self, *args)

        setattr(owner, name, prune_and_choose)
        try:
            loaded, ckpt_id = reader.load(into={"w": torch.zeros(1000)})
        finally:
            setattr(owner, name, choose)
    assert (loaded["w"] == ckpt_id.iteration).all()
    return ckpt_id.iteration


@pytest.mark.parametrize("tier", ["disk", "memory", "shared"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_pruned_between_find_and_load_makes_way_for_what_is_newer(
    tier: str, ranks: int, tmp_path: Path, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    # Two ranks on two nodes, or on one file system.
    stores = (shm_roots if tier == "memory" else node_dirs)(ranks)
    root = tmp_path if tier == "shared" else None

    loaded = run_ranks(
        *(_load_what_is_pruned_meanwhile, ranks, tier, root, 3, 20.0), store_per_node=stores
    )

    assert loaded == [4] * ranks


@pytest.mark.parametrize("tier", ["disk", "memory", "shared"])
def test_at_the_deadline_the_error_says_that_a_job_prunes(
    tier: str, tmp_path: Path, shm_roots: Dirs
) -> None:
    root = shm_roots(1)[0] if tier == "memory" else tmp_path

    with pytest.raises(NoReplicasAvailableError, match=r"keep more of them"):
        _load_what_is_pruned_meanwhile(0, 1, tier, root, 10**9, 0.3)


SAVE = """
import sys, torch
from pathlib import Path
from tests.managers.test_read_only import _make
state = {"w": torch.zeros(1 << 16)}
with _make(sys.argv[1], Path(sys.argv[2]), keep_last=1) as writer:
    for iteration in range(1, 10**6):
        state["w"].fill_(float(iteration))
        writer.save(state, iteration)
        if iteration == 1:
            print("saves", flush=True)
"""


@pytest.mark.rows(1)
@pytest.mark.parametrize("tier", ["disk", "memory", "shared"])
def test_no_load_fails_beside_a_job_that_saves_as_often_as_it_can(
    tier: str, tmp_path: Path, shm_roots: Dirs
) -> None:
    root = shm_roots(1)[0] if tier == "memory" else tmp_path
    with subprocess.Popen(
        [sys.executable, "-c", SAVE, tier, str(root)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "saves\n"
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                with _make(tier, root, read_only=True) as reader:
                    assert reader.find_latest() > 0
                    loaded, ckpt_id = reader.load(into={"w": torch.zeros(1 << 16)})
                assert (loaded["w"] == ckpt_id.iteration).all()
        finally:
            job.kill()
