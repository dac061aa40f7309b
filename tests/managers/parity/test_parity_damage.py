"""Damaged files of parity groups are computed again from the others, and told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.errors import CorruptShardError
from localckpt.managers.load import Load
from localckpt.memory.digests import BLOCK_NBYTES
from tests.faults.lives import Lives
from tests.managers.jobs import Dirs, assert_same, error_of, files
from tests.ranks import run_ranks
from tests.scenarios import Begin

_BLOCKS = 6


def _state(rank: int, iteration: int, blocks: int = _BLOCKS) -> dict[str, Any]:
    """A state of several blocks, the same number on each rank."""
    random = torch.Generator().manual_seed(1000 * iteration + rank)
    numel = blocks * BLOCK_NBYTES // 4 - 8192
    return {"weight": torch.randn(numel, generator=random), "rank": rank, "of": iteration}


def _own(root: Path, rank: int, kind: str = "[0-9]") -> Path:
    (path,) = root.rglob(f"000000000003.{rank}.*{kind}.safetensors")
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
    base: Path,
    parity: int,
    bad: Mapping[int, tuple[list[int], list[int]]],
    lost: tuple[int, ...],
) -> list[str]:
    """Load with bad blocks in images and parities, and nodes lost; then once more."""
    strategy = localckpt.ParityReplicationStrategy(parity, world_size)
    lives = Lives("disk", base, rank, None, strategy=strategy)
    with lives.life(None) as manager:
        manager.save(_state(rank, 3), 3)
    lives.keep("saved")

    def change(root: Path) -> None:
        image, kept = bad.get(rank, ([], []))
        if image:
            _flip(_own(root, rank), image)
        if kept:
            _flip(_own(root, rank, ".parity"), kept)

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
@pytest.mark.parametrize("rank", [0, 2])
def test_a_flipped_bit_is_mended(rank: int, node_dirs: Dirs) -> None:
    told = run_ranks(_mend, 4, node_dirs(1)[0], 1, {rank: ([1, 4], [])}, ())

    for number, (source, *aside) in enumerate(told):
        assert source == ("parity" if number == rank else "own node")
        assert all(name.startswith(f"000000000003.{rank}.") for name in aside)
        assert len(aside) == (number == rank)


@pytest.mark.fault("flipped-bit", "lost-nodes")
def test_a_damaged_image_beside_a_lost_node_is_mended_with_two_parities(node_dirs: Dirs) -> None:
    told = run_ranks(_mend, 4, node_dirs(1)[0], 2, {1: ([2, 4], [])}, (0,))

    assert [source for source, *_ in told] == ["parity", "parity", "own node", "own node"]
    assert [len(aside) for _, *aside in told] == [0, 1, 0, 0]


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
    job: Begin,
) -> None:
    saved = job(nodes=3, redundancy="parity 1 of 3").save(3)

    # Ranks 0 and 1 come back on each other's nodes, so each is sent its shard.
    saved.restart(on=[1, 0, 2]).call(_load_with_bad_memory)

    assert not [name for name in saved.files() if ".corrupt" in name]
    saved.restart(redundancy=None).expect(3).run()
