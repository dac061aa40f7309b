"""Damaged files of parity groups are mended block by block, and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.errors import CorruptShardError, StorageError
from localckpt.managers import load
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.replication.parity import rebuilding
from tests.faults.lives import Lives
from tests.managers.jobs import assert_same, error_of, files, make_manager, resume, state_of
from tests.ranks import node_store, run_ranks

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
        manager._parts.await_reprotected()
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
def test_a_flipped_bit_on_each_of_several_ranks_is_mended(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    base = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    bad = {0: ([1], []), 1: ([2], []), 2: ([4], []), 3: ([1, 5], [])}

    told = run_ranks(_mend, 4, kind, base, 1, bad, ())

    for rank, (source, *aside) in enumerate(told):
        assert source == "parity"
        (name,) = aside
        assert name.startswith(f"000000000003.{rank}.")


@pytest.mark.fault("flipped-bit", "lost-nodes")
def test_bad_blocks_beside_a_lost_node_are_mended_with_two_parities(node_dirs: Dirs) -> None:
    bad = {1: ([2, 4], []), 2: ([], [2]), 3: ([1], [])}

    told = run_ranks(_mend, 4, "disk", node_dirs(1)[0], 2, bad, (0,))

    assert [source for source, *_ in told] == ["parity", "parity", "own node", "parity"]
    assert [len(aside) for _, *aside in told] == [0, 1, 1, 1]


def _two_in_one_stripe(rank: int, world_size: int, base: Path) -> tuple[str, str]:
    strategy = localckpt.ParityReplicationStrategy(1, world_size)
    lives = Lives("disk", base, rank, None, strategy=strategy)
    with lives.life(None) as manager:
        manager.save(_state(rank, 2), 2)
        manager.save(_state(rank, 3), 3)
    lives.keep("saved")

    def change(root: Path) -> None:
        # Of six blocks three are a chunk. Member 0's second chunk and member 1's first are in
        # stripe 2, and these blocks have the same place in it.
        if rank in (0, 1):
            _flip(_own(root, 3, rank), [3 + 1] if rank == 0 else [1])

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
def test_two_bad_blocks_in_one_place_are_too_many_for_one_parity(node_dirs: Dirs) -> None:
    told = run_ranks(_two_in_one_stripe, 3, node_dirs(1)[0])

    for older, text in told:
        assert older == "2 own node"
        assert "iteration 3" in text
        assert "lacks the shards of ranks 0, 1" in text


def _damage_beside_what_is_computed(rank: int, world_size: int, base: Path) -> tuple[str, int]:
    """Two groups of three, of ranks 0, 2, 4 and of ranks 1, 3, 5."""
    strategy = localckpt.ParityReplicationStrategy(1, 3)
    lives = Lives("disk", base, rank, None, strategy=strategy)
    with lives.life(None) as manager:
        # Of the other ranks' images five blocks are a chunk, so rank 0's is all in its first.
        manager.save(_state(rank, 3, 2 if rank == 0 else 10), 3)
    lives.keep("saved")

    def change(root: Path) -> None:
        if rank == 0:
            _own(root, 3, 0).unlink()
        if rank == 4:
            # Parity of the stripe in which rank 0 has nothing.
            _flip(_own(root, 3, 4, ".parity"), [2])
        if rank == 1:
            # This one is found bad when rank 0's has been computed, which is then done again.
            _flip(_own(root, 3, 1), [2])

    with lives.life("saved", change) as manager:
        assert manager.find_latest() == 3
        state, ckpt_id = manager.load()
        assert ckpt_id == (3, rank, "job")
        assert_same(state, _state(rank, 3, 2 if rank == 0 else 10))
        manager._parts.await_reprotected()
        assert manager.degraded == 0
    lives.close()
    aside = [name for name in files(lives.root) if ".corrupt" in name]
    return manager.last_load.source, len(aside)


@pytest.mark.fault("flipped-bit", "lost-nodes")
def test_damaged_parity_is_of_use_until_all_shards_are_loaded(node_dirs: Dirs) -> None:
    told = run_ranks(_damage_beside_what_is_computed, 6, node_dirs(1)[0])

    assert told == [
        *(("parity", 0), ("parity", 1), ("own node", 0)),
        *(("own node", 0), ("own node", 1), ("own node", 0)),
    ]


def _read_only_once(rank: int, world_size: int, base: Path) -> str:
    strategy = localckpt.ParityReplicationStrategy(1, world_size)
    lives = Lives("disk", base, rank, None, strategy=strategy)
    with lives.life(None) as manager:
        manager.save(_state(rank, 3), 3)
    lives.keep("saved")

    def refuse(self: Any, start: int, stop: int) -> memoryview:
        self.refused = StorageError("the disk has had enough")
        raise self.refused

    def change(root: Path) -> None:
        if rank == 1:
            _flip(_own(root, 3, 1), [2])
            # What was good of it when it was looked at can be read no more.
            rebuilding.WatchedSource.read = refuse

    with lives.life("saved", change) as manager:
        assert manager.find_latest() == 3
        state, _ = manager.load()
        assert_same(state, _state(rank, 3))
        manager._parts.await_reprotected()
    lives.close()
    return str(manager.last_load.source)


@pytest.mark.fault("refused-io")
def test_a_damaged_image_that_cannot_be_read_any_more_is_given_up(node_dirs: Dirs) -> None:
    told = run_ranks(_read_only_once, 3, node_dirs(1)[0])

    assert told == ["own node", "parity", "own node"]


def _save_one(rank: int, world_size: int) -> None:
    with (
        localckpt.ParityReplicationStrategy(1, world_size) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
    ):
        manager.save(state_of(rank, 3), 3)


def _load_with_bad_memory(rank: int, world_size: int) -> str:
    """Whatever comes to rank 0 is spoiled there."""
    with (
        localckpt.ParityReplicationStrategy(1, world_size) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
    ):
        if rank == 0:
            rebuilding.ImageEnvelope.matches = lambda *_: False

            def spoiled(*_: Any) -> Any:
                raise CorruptShardError("a bit has flipped")

            load.restore = spoiled
        assert manager.find_latest() == 3
        return error_of(manager.load, localckpt.NoReplicasAvailableError)


def _load_elsewhere(rank: int, world_size: int) -> str:
    with make_manager("disk", node_store(), "job") as manager:
        return resume(manager, rank, 3)


@pytest.mark.fault("bad-copies")
def test_a_rank_with_bad_memory_does_not_talk_others_out_of_good_copies(node_dirs: Dirs) -> None:
    nodes = node_dirs(3)
    run_ranks(_save_one, 3, store_per_node=nodes)
    # Ranks 0 and 1 come back on each other's nodes, so each is sent its shard.
    moved = [nodes[1], nodes[0], nodes[2]]

    told = run_ranks(_load_with_bad_memory, 3, store_per_node=moved)

    assert all("a bit has flipped" in text for text in told)
    assert not [name for name in files(*nodes) if ".corrupt" in name]
    assert run_ranks(_load_elsewhere, 3, store_per_node=nodes) == ["own node"] * 3
