"""Saves in less memory than their images take: these go to the disk piece by piece."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from localckpt import (
    CheckpointingException,
    CorruptShardError,
    InMemoryCheckpointManager,
    LocalCheckpointManager,
    SaveFailedError,
    StorageError,
)
from localckpt.storage.write import StagedImage
from tests.managers.jobs import assert_same, make_manager, state_of
from tests.ranks import run_ranks
from tests.scenarios import Begin
from tests.state_dict.zoo import assert_same_state

_MIB = 1 << 20
# Of two images a rank, with the replica, neither fits. Rank 1 saves twice as much as rank 0.
_LIMIT, _NBYTES = 140 * _MIB, 90 * _MIB


def _state(rank: int, iteration: int) -> dict[str, Any]:
    return state_of(rank, iteration, _NBYTES * (1 + rank))


def test_images_staged_in_pieces_survive_the_loss_of_nodes(job: Begin) -> None:
    saved = job(2, redundancy=(1, 2), state=_state, staging_limit=_LIMIT).save(1, 2, 3)
    lost = saved.restart().expect(3).save(4, 5).lose(1)

    again = lost.restart().expect(5, {1: "peer rank 0"}).repaired().save(6).lose(0)
    again.restart().expect(6, {0: "peer rank 1"}).run()


def _awkward(mib: int) -> dict[str, Any]:
    """Tensors that begin and end anywhere in pieces, and two that are no runs of bytes."""
    numbers = torch.arange(mib * _MIB // 8, dtype=torch.float32)
    rows = numbers[: len(numbers) // 1000 * 1000].view(-1, 1000)
    return {
        "odd": torch.arange(_MIB + 3, dtype=torch.uint8),
        "columns": rows.t(),
        "conj": torch.complex(numbers[: 2 * _MIB], numbers[: 2 * _MIB]).conj(),
        "small": [torch.full((n,), n, dtype=torch.int16) for n in range(300)],
        "run": numbers + 1,
    }


def _save_in(rank: int, world_size: int, root: Path, limit: int) -> tuple[int, int]:
    """Save three times; the memory that it took at most, and the size of an image."""
    process, state = psutil.Process(), _awkward(160)
    with make_manager("disk", root, staging_limit=limit) as manager:
        before = process.memory_info().rss
        manager.warm_up(state)
        # The peak is counted from now on.
        Path("/proc/self/clear_refs").write_text("5")
        for iteration in (1, 2, 3):
            state["run"] += 1
            manager.save(state, iteration)
            assert manager.last_save.written_nbytes == manager.last_save.nbytes
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert peak is not None
        nbytes = manager.last_save.nbytes
        assert_same_state(manager.load()[0], state)
    return int(peak[1]) * 1024 - before, nbytes


def test_a_save_takes_no_more_memory_than_its_limit(tmp_path: Path) -> None:
    # And the largest tensor that is no run of bytes, the conjugated one.
    limit, apart = 80 * _MIB, 16 * _MIB

    ((taken, nbytes),) = run_ranks(_save_in, 1, tmp_path, limit, init_group=False)

    assert nbytes > 160 * _MIB
    assert taken < limit + apart + 20 * _MIB


def test_what_cannot_be_staged_in_pieces_is_refused_with_the_number(tmp_path: Path) -> None:
    state = {"w": torch.zeros(50 * _MIB)}
    checked: dict[str, Any] = {"staging_limit": 150 * _MIB, "check": lambda tensors: None}
    small = {"staging_limit": 60 * _MIB}
    for options, needed in ((small, "69.2 MB and not 62.9"), (checked, "0.0 MB")):
        with LocalCheckpointManager(tmp_path / needed, **options) as manager:
            with pytest.raises(StorageError, match=f"staging_limit.*in pieces.*{needed}"):
                manager.save(state, 1)
            assert manager.find_latest() == -1
            manager.save({"w": torch.zeros(1000)}, 1)
    with pytest.raises(CheckpointingException, match="it is for checkpoints on disk"):
        InMemoryCheckpointManager(root=tmp_path, staging_limit=_LIMIT)
    with pytest.raises(CheckpointingException, match="staging_limit is 0"):
        LocalCheckpointManager(tmp_path, staging_limit=0)


def _damage_on_the_way(manager: Any) -> None:
    state = {"w": torch.full((25 * _MIB,), 1.0)}
    manager.save(state, 1)
    write_piece = StagedImage._write_piece

    def damaged(staged: StagedImage, start: int, nbytes: int, piece: memoryview) -> None:
        if staged._hasher is not None and start:
            piece[77] ^= 1
        write_piece(staged, start, nbytes, piece)

    StagedImage._write_piece = damaged  # type: ignore[method-assign]
    with pytest.raises(CorruptShardError, match=f"bytes from {32 * _MIB} on do not match"):
        manager.save(state, 2)
    StagedImage._write_piece = write_piece  # type: ignore[method-assign]
    assert manager.find_latest() == 1
    manager.save(state, 3)


@pytest.mark.fault("flipped-bit")
def test_a_piece_that_comes_damaged_is_never_committed(job: Begin) -> None:
    job(2, redundancy=(1, 2), staging_limit=_LIMIT).call(_damage_on_the_way).find(3).run()


@pytest.mark.fault("refused-io")
def test_a_disk_that_fills_up_while_an_image_is_staged_fails_that_save_alone(
    tmp_path: Path, small_disk: Any
) -> None:
    root = small_disk("size=260m")
    with make_manager("disk", root, keep_last=1, staging_limit=80 * _MIB) as manager:
        manager.store.piece_nbytes = 8 * _MIB
        manager.save({"w": torch.ones(25 * _MIB)}, 1)
        filler = root / "filler"
        filler.write_bytes(bytes(120 * _MIB))

        with pytest.raises(SaveFailedError, match="it is full"):
            manager.save({"w": torch.ones(25 * _MIB)}, 2)

        assert manager.find_latest() == 1
        os.unlink(filler)
        manager.save({"w": torch.full((25 * _MIB,), 3.0)}, 3)
        assert_same(manager.load()[0], {"w": torch.full((25 * _MIB,), 3.0)})
