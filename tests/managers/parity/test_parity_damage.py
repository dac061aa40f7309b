"""Damaged files of parity groups are computed again from the others, and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.errors import CorruptShardError
from localckpt.managers.load import Load
from localckpt.memory.digests import BLOCK_NBYTES
from tests.faults.lives import Lives
from tests.managers.jobs import assert_same, error_of, files
from tests.ranks import run_ranks
from tests.scenarios import Job

Dirs = Callable[[int], list[Path]]

_BLOCKS = 6


def _state(rank: int, iteration: int, blocks: int = _BLOCKS) -> dict[str, Any]:
    """A state of several blocks, the same number on each rank."""
    random = torch.Generator().manual_seed(1000 * iteration + rank)
    numel = blocks * BLOCK_NBYTES // 4 - 8192
    return {"weight": torch.randn(numel, generator=random), "rank": rank, "of": iteration}


def _own(root: Path, iteration: int, rank: int, kind: str = "") -> Path:
    (path,) = (
        root.rglob(f"{iteration:012d}.{rank}.*.*{kind}.safetensors")
        if kind
        else (
            p
            for p in root.rglob(f"{iteration:012d}.{rank}.*.safetensors")
            if ".parity." not in p.name
        )
    )
    return path


def _flip(path: Path, blocks: list[int]) -> None:
    with open(path, "r+b") as file:
        for block in blocks:
            file.seek(block * BLOCK_NBYTES + 77_777)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


def _mend(
    rank: int,
    world_size: int,
    kind: str,
    base: Path,
    parity: int,
    bad: Mapping[int, tuple[list[int], list[int]]],
    lost: tuple[int, ...],
) -> list[str]:
    """Load with bad blocks in images and parities, and nodes lost; then once more."""
    strategy = localckpt.ParityReplicationStrategy(parity, world_size)
    lives = Lives(kind, base, rank, None, strategy=strategy)
    with lives.life(None) as manager:
        manager.save(_state(rank, 3), 3)
    lives.keep("saved")

    def change(root: Path) -> None:
        image, kept = bad.get(rank, ([], []))
        if image:
            _flip(_own(root, 3, rank), image)
        if kept:
            _flip(_own(root, 3, rank, ".parity"), kept)

    told = []
    with lives.life(None if rank in lost else "saved", change) as manager:
        assert manager.find_latest() == 3
        state, ckpt_id = manager.load()
        assert ckpt_id == (3, rank, "job")
        assert_same(state, _state(rank, 3))
        told.append(manager.last_load.source)
        manager._await_reprotected()
        assert manager.degraded == 0
    told += [name.rpartition("/")[2] for name in files(lives.root) if ".corrupt" in name]
    lives.keep("mended")
    with lives.life("mended") as manager:
        assert manager.find_latest() == 3
        assert_same(manager.load()[0], _state(rank, 3))
        assert manager.last_load.source == "own node"
    lives.close()
    return told


@pytest.mark.fault("flipped-bit")
@pytest.mark.parametrize("kind", ["disk", pytest.param("memory", marks=pytest.mark.long)])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_flipped_bit_is_mended(rank: int, kind: str, node_dirs: Dirs, shm_roots: Dirs) -> None:
    base = (node_dirs if kind == "disk" else shm_roots)(1)[0]

    told = run_ranks(_mend, 4, kind, base, 1, {rank: ([1, 4], [])}, ())

    for number, (source, *aside) in enumerate(told):
        assert source == ("parity" if number == rank else "own node")
        assert all(name.startswith(f"000000000003.{rank}.") for name in aside)
        assert len(aside) == (number == rank)


@pytest.mark.fault("flipped-bit", "lost-nodes")
def test_a_damaged_image_beside_a_lost_node_is_mended_with_two_parities(node_dirs: Dirs) -> None:
    told = run_ranks(_mend, 4, "disk", node_dirs(1)[0], 2, {1: ([2, 4], [])}, (0,))

    assert [source for source, *_ in told] == ["parity", "parity", "own node", "own node"]
    assert [len(aside) for _, *aside in told] == [0, 1, 0, 0]


def _two_of_three(rank: int, world_size: int, base: Path) -> tuple[str, str]:
    strategy = localckpt.ParityReplicationStrategy(1, world_size)
    lives = Lives("disk", base, rank, None, strategy=strategy)
    with lives.life(None) as manager:
        manager.save(_state(rank, 2), 2)
        manager.save(_state(rank, 3), 3)
    lives.keep("saved")

    def change(root: Path) -> None:
        if rank in (0, 1):
            _flip(_own(root, 3, rank), [4 - 3 * rank])

    with lives.life("saved", change) as manager:
        assert manager.find_latest() == 3
        _, ckpt_id = manager.load()
        older = f"{ckpt_id.iteration} {manager.last_load.source}"
    with lives.life("saved", lambda root: (change(root), _own(root, 2, rank).unlink())) as manager:
        manager.find_latest()
        text = error_of(manager.load, localckpt.NoReplicasAvailableError)
    lives.close()
    return older, text


@pytest.mark.fault("flipped-bit")
def test_two_damaged_images_are_too_many_for_one_parity(node_dirs: Dirs) -> None:
    told = run_ranks(_two_of_three, 3, node_dirs(1)[0])

    for older, text in told:
        assert older == "2 own node"
        assert "iteration 3" in text
        assert "lacks the shards of ranks 0, 1" in text


def _load_with_bad_memory(manager: Any) -> None:
    """Whatever comes to rank 0 is spoiled there."""
    if manager.rank == 0:

        def spoiled(own: Load) -> Any:
            with own._images.noting(own._mine):
                raise CorruptShardError("a bit has flipped")

        Load._restore = spoiled  # type: ignore[method-assign]
    assert manager.find_latest() == 3
    told = error_of(manager.load, localckpt.NoReplicasAvailableError)
    assert "a bit has flipped" in told


@pytest.mark.fault("bad-copies")
def test_a_rank_with_bad_memory_does_not_talk_others_out_of_good_copies(
    job: Callable[..., Job],
) -> None:
    saved = job(nodes=3, redundancy="parity 1 of 3").save(3)

    # Ranks 0 and 1 come back on each other's nodes, so each is sent its shard.
    saved.restart(on=[1, 0, 2]).call(_load_with_bad_memory)

    assert not [name for name in saved.files() if ".corrupt" in name]
    saved.restart(redundancy=None).expect(3).run()
