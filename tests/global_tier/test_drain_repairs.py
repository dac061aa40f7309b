"""A shard that its own node lacks is drained from a copy that another node holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from localckpt import (
    CliqueReplicationStrategy,
    MismatchError,
    NoReplicasAvailableError,
    ParityReplicationStrategy,
)
from tests.global_tier.models import (
    MISDESCRIBED,
    WAIT_S,
    Job,
    await_files,
    checkpoints_in,
    kept_in_image,
    leftovers_in,
    misdescribed,
    run_sharded,
    small_files,
)
from tests.global_tier.states import blank
from tests.managers.jobs import MAX_S, assert_same, damage, error_of
from tests.ranks import announce, await_announced, run_ranks, start_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _job(root: Path, strategy: Any = None) -> Job:
    """Managers of a rank on a node of its own, whose shards have copies on two nodes."""
    strategy = strategy or CliqueReplicationStrategy.from_replication_params(1, 2, timeout_s=MAX_S)
    return Job(root, {"timeout": WAIT_S}, repl_strategy=strategy, keep_last=3)


def _state_of(rank: int, iteration: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(100 * iteration + rank)
    own = {f"{n} of {rank}": torch.randn(250_000, generator=random) for n in range(6)}
    return own | {
        "rng": torch.full((3 + rank,), rank, dtype=torch.uint8),
        "loader": {"position": 10 * rank, "iteration": iteration},
        "all": torch.full((1000,), float(iteration)),
    }


def _assert_drained(root: Path, iteration: int, world_size: int) -> None:
    """What plain ``dcp.load`` reads is what all ranks had saved."""
    (folder,) = (root / name for name in checkpoints_in(root) if f"{iteration:08d}" in name)
    for rank in range(world_size):
        state = _state_of(rank, iteration)
        wanted = {k: v for k, v in state.items() if k == "all" or k.endswith(f"of {rank}")}
        wanted["loader"] = {"iteration": iteration}
        found: Any = blank(wanted)
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        assert_same(found, wanted)
        assert_same(kept_in_image(folder, rank), state)


def _shards(node: Path, iteration: int, rank: int) -> list[Path]:
    return list(node.rglob(f"{iteration:012d}.{rank}.*.safetensors"))


def _save_five(rank: int, world_size: int, root: Path) -> None:
    with _job(root) as job:
        job.nodes.save(_state_of(rank, 5), 5)


def _drain_until_killed(rank: int, world_size: int, root: Path) -> None:
    with small_files(), _job(root) as job:
        job.begin(5, rate_limit=1e6)
        announce(f"begun {rank}")
        await_announced("never", WAIT_S)


def _drain_again(rank: int, world_size: int, root: Path) -> None:
    with small_files(), _job(root) as job:
        job.promote(5)
        assert job.shared.find_latest() == 5


@pytest.mark.fault("kill-save")
def test_a_killed_drain_of_copies_goes_on_whichever_nodes_have_them_then(tmp_path: Path) -> None:
    run_ranks(_save_five, 3, tmp_path)
    lost = tmp_path / "lost"
    (tmp_path / "node1").rename(lost)
    with start_ranks(_drain_until_killed, 3, tmp_path) as group:
        # Of the shard that its own node lacks, too.
        await_files(tmp_path / "shared", 2, of_rank="1_")
        for rank in range(3):
            group.kill(rank)
        group.join(WAIT_S, expect_dead=range(3))
    (half,) = leftovers_in(tmp_path / "shared")
    first = tmp_path / "shared" / half / "__1_0.distcp"
    stamp = first.stat().st_ino
    # The node comes back, and its rank goes on with what a peer has written.
    shutil.rmtree(tmp_path / "node1")
    lost.rename(tmp_path / "node1")

    run_ranks(_drain_again, 3, tmp_path)

    (folder,) = checkpoints_in(tmp_path / "shared")
    assert (tmp_path / "shared" / folder / first.name).stat().st_ino == stamp
    _assert_drained(tmp_path / "shared", 5, 3)


def _damage_own(rank: int, world_size: int, root: Path, at: float) -> None:
    with _job(root) as job:
        job.nodes.save(_state_of(rank, 5), 5)
        if rank == 1:
            (path,) = _shards(root / "node1", 5, 1)
            damage(path, at)
        dist.barrier()
        job.promote(5)
        assert job.shared.find_latest() == 5


# In the header, and in a tensor, which is read for the plan.
@pytest.mark.parametrize("at", [0.0001, 0.3])
def test_a_damaged_image_is_drained_from_a_copy_on_another_node(at: float, tmp_path: Path) -> None:
    run_ranks(_damage_own, 3, tmp_path, at)

    _assert_drained(tmp_path / "shared", 5, 3)
    (bad,) = tmp_path.rglob("*.corrupt")
    assert bad.is_relative_to(tmp_path / "node1")


def _save_misdescribed(rank: int, world_size: int, root: Path, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with _job(root) as job:
        job.nodes.save({"model": {"w": misdescribed(kind, mesh)}}, 5)


def _refused(rank: int, world_size: int, root: Path) -> list[str]:
    with _job(root) as job:
        texts = [error_of(lambda: job.promote(5), MismatchError)]
        # Once it is on its own node.
        job.nodes.load()
        texts.append(error_of(lambda: job.promote(5), MismatchError))
        assert job.shared.find_latest() == -1
        assert not list((root / "shared").rglob("*.partial"))
    return texts


# Several runs have chunks of their own in a drain.
@pytest.mark.rows(1)
@pytest.mark.parametrize("kind", sorted(MISDESCRIBED.keys() - {"runs"}))
def test_a_dtensor_that_torch_would_describe_as_another_part_is_refused_whoever_reads_it(
    kind: str, tmp_path: Path
) -> None:
    run_sharded(_save_misdescribed, 4, tmp_path, kind)
    shutil.rmtree(tmp_path / "node1")

    for texts in run_sharded(_refused, 4, tmp_path):
        for text in texts:
            assert "model.w of rank " in text
            assert MISDESCRIBED[kind] in text
            assert "full_tensor() gives. Nothing was drained" in text


def _drain_of_parity(rank: int, world_size: int, root: Path) -> str:
    with _job(root, ParityReplicationStrategy(1, 3)) as job:
        job.nodes.save(_state_of(rank, 5), 5)
        if rank == 1:
            for path in _shards(root / "node1", 5, 1):
                path.unlink()
        dist.barrier()

        text = error_of(lambda: job.promote(5), NoReplicasAvailableError)
        assert job.shared.find_latest() == -1
        assert not list((root / "shared").rglob("*.partial"))

        assert job.nodes.load()[1].iteration == 5
        job.promote(5)
        job.nodes.save(_state_of(rank, 6), 6)
        job.promote(6)
        assert job.shared.find_latest() == 6
    return text


def test_a_shard_that_no_node_holds_is_named_and_a_load_computes_it_for_the_next_drain(
    tmp_path: Path,
) -> None:
    first, *others = run_ranks(_drain_of_parity, 3, tmp_path, timeout_s=120.0)

    assert others == [first] * 2
    assert "no node can give the shards of rank 1 (rank 1: " in first
    assert "load() this checkpoint first" in first
    _assert_drained(tmp_path / "shared", 5, 3)
