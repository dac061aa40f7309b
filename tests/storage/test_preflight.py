"""What a node cannot do is an error when the manager is made, at the latest at the first save."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.errors import SaveFailedError, StorageError
from localckpt.storage.preflight import file_system
from tests.managers.jobs import assert_same, files, iterations_on
from tests.ranks import node_store, run_ranks

MIB = 1 << 20


def state(nbytes: int = MIB) -> dict[str, torch.Tensor]:
    return {"weight": torch.rand(nbytes // 4)}


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc"])
def test_the_kind_of_file_system_is_the_one_that_is_mounted(path: str) -> None:
    told = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", path],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert file_system(Path(path)) == told.stdout.split()[-1]


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("options", ["ro", "size=4k", "nr_inodes=7"])
def test_a_store_that_cannot_be_written_is_an_error_when_the_manager_is_made(
    options: str, small_disk: Callable[[str], Path]
) -> None:
    root = small_disk(options)
    if options != "ro":
        (root / "filler").write_bytes(bytes(4096))

    with pytest.raises(StorageError, match=str(root)) as raised:
        localckpt.LocalCheckpointManager(root)

    assert ("read-only" if options == "ro" else "it is full: free space") in str(raised.value)


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("root_option", ["disk", "memory"])
@pytest.mark.parametrize(
    "kept",
    [
        {"keep_last": 4},
        {"retention": localckpt.Retention(last=1, best=localckpt.Best("loss", count=3))},
    ],
    ids=["last", "best"],
)
def test_checkpoints_that_will_not_fit_are_an_error_at_the_first_save(
    root_option: str, kept: dict[str, Any], small_disk: Callable[[str], Path]
) -> None:
    root, given = small_disk("size=12m"), state(3 * MIB)

    def manager(**options: Any) -> localckpt.BaseCheckpointManager:
        if root_option == "disk":
            return localckpt.LocalCheckpointManager(root, **options)
        return localckpt.InMemoryCheckpointManager(root=root, **options)

    with manager(**kept) as greedy:
        for iteration in (1, 2):
            with pytest.raises(SaveFailedError, match=r"5 checkpoints of 3\.\d MB.*keep fewer of"):
                greedy.save(given, iteration)
        assert greedy.find_latest() == -1
    assert files(root) == []
    with manager(keep_last=1) as modest:
        for iteration in range(5):
            modest.save(given, iteration)
        assert modest.find_latest() == 4
        assert_same(modest.load()[0], given)


@pytest.mark.fault("unusable-store")
def test_too_few_inodes_are_an_error_at_the_first_save(small_disk: Callable[[str], Path]) -> None:
    root = small_disk("size=64m,nr_inodes=16")

    with (
        localckpt.LocalCheckpointManager(root, keep_last=20) as manager,
        pytest.raises(SaveFailedError, match=r"more files, and 21 checkpoints of 1 shards"),
    ):
        manager.save(state(), 1)


def test_a_disk_that_is_memory_is_logged(
    small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    root = small_disk("size=64m")

    with caplog.at_level(logging.WARNING), localckpt.LocalCheckpointManager(root) as manager:
        manager.save(state(), 1)

    assert f"{root} is on tmpfs: checkpoints there outlive processes, but not" in caplog.text


def test_memory_that_is_a_disk_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("temporary files are in memory here")

    with caplog.at_level(logging.WARNING), localckpt.InMemoryCheckpointManager(root=tmp_path):
        pass

    assert "which is not memory" in caplog.text


def _save_some(rank: int, world_size: int, iterations: list[int]) -> None:
    with localckpt.LocalCheckpointManager(node_store(), keep_last=2) as manager:
        manager.find_latest()
        for iteration in iterations:
            manager.save(state(3 * MIB), iteration)


@pytest.mark.fault("moved-ranks")
def test_what_a_rank_left_that_runs_elsewhere_now_is_not_counted_as_taken(
    small_disk: Callable[[str], Path],
) -> None:
    nodes = [small_disk("size=14m") for _ in range(2)]
    run_ranks(_save_some, 2, [1, 2], store_per_node=nodes)

    # Two old checkpoints of the other rank are there, which make room as saves complete.
    run_ranks(_save_some, 2, [3, 4, 5], store_per_node=nodes[::-1])

    assert iterations_on(*nodes) == {4, 5}
