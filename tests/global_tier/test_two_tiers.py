"""The example of two tiers goes on from the newer of them, and ends as if nothing had been."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples import model, two_tiers
from localckpt.waiting import wait_until
from tests.managers.jobs import assert_same, damage
from tests.ranks import announce, await_announced, run_ranks, start_ranks

RANKS = 2
# The nodes save 2, 5, 8 and 11, and keep two; shared storage gets 3, 7 and 11.
ITERATIONS, LOCAL_EVERY, SHARED_EVERY = 12, 3, 4
KILLED_AT = 10
WAIT_S = 60.0


def test_goes_on_from_the_nodes_or_from_shared_storage_if_what_is_good_there_is_newer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed, newer = tmp_path / "undisturbed", tmp_path / "newer"
    damaged, lost = tmp_path / "damaged", tmp_path / "lost"
    _run(undisturbed)
    _run_until_killed(newer)
    for copy in (damaged, lost):
        shutil.copytree(newer, copy)
    # In a tensor: the first block is read to find the shard.
    damage(_shards(damaged, 8)[1], 0.9)
    shutil.rmtree(lost / "local")
    chosen = {newer: "8, from the nodes"}
    chosen |= dict.fromkeys((damaged, lost), "7, from shared storage")

    for folder, told in chosen.items():
        _run(folder)

        assert f"goes on after iteration {told}" in capfd.readouterr().out
        assert_same(_end_of(folder), _end_of(undisturbed))


def _run_until_killed(folder: Path) -> None:
    """Train until 8 is on the nodes and 7 on shared storage."""
    with start_ranks(_train_until_killed, RANKS, folder, **_options(folder)) as group:
        for rank in range(RANKS):
            group.await_announced(f"rank {rank} stands still", WAIT_S)
        record = folder / "shared/session-two-tiers/iteration_00000007.0001/localckpt.json"
        assert wait_until(lambda: len(_shards(folder, 8)) == RANKS and record.exists(), WAIT_S)
        for rank in range(RANKS):
            group.kill(rank)
        group.join(WAIT_S, expect_dead=range(RANKS))


def _run(folder: Path) -> None:
    run_ranks(_train, RANKS, folder, **_options(folder))


def _options(folder: Path) -> dict[str, Any]:
    # Importing FSDP makes this directory.
    return {"init_group": False, "env": {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}}


def _train(_rank: int, _world_size: int, folder: Path) -> None:
    model.WIDTH, model.LAYERS = 96, 2  # shards of two blocks
    stores = ["--local-root", str(folder / "local"), "--shared-root", str(folder / "shared")]
    often = ["--local-every", str(LOCAL_EVERY), "--shared-every", str(SHARED_EVERY)]
    two_tiers.main([*stores, *often, "--iterations", str(ITERATIONS)])


def _train_until_killed(rank: int, world_size: int, folder: Path) -> None:
    class TextThatEnds(model.Text):
        def next_batch(self) -> Any:
            if self.position == KILLED_AT * model.CONTEXT:
                announce(f"rank {rank} stands still")
                await_announced("never", 2 * WAIT_S)
            return super().next_batch()

    two_tiers.Text = TextThatEnds
    _train(rank, world_size, folder)


def _shards(folder: Path, iteration: int) -> list[Path]:
    return sorted((folder / "local").glob(f"session-*/*/{iteration:012d}.*.safetensors"))


def _end_of(folder: Path) -> Any:
    """All that the newest checkpoint on shared storage holds, by torch alone."""
    (newest,) = folder.glob(f"shared/session-*/iteration_{ITERATIONS - 1:08d}.*")
    dcp_to_torch_save(newest, folder / "end.pt")
    state = torch.load(folder / "end.pt", weights_only=True)
    (folder / "end.pt").unlink()
    return state
