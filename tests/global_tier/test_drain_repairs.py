"""Shards that a drain refuses, and shards that a load repairs for it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from localckpt import (
    AsyncCallsQueue,
    CliqueReplicationStrategy,
    GlobalCheckpointManager,
    LocalCheckpointManager,
    MismatchError,
    NoReplicasAvailableError,
    ParityReplicationStrategy,
    RestoreError,
)
from localckpt.state_dict import image
from localckpt.state_dict.boxes import Box, RankSet, render_boxes
from tests.global_tier.models import (
    MISDESCRIBED,
    checkpoints_in,
    kept_in_image,
    misdescribed,
    run_sharded,
)
from tests.managers.jobs import MAX_S, assert_same, error_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

_WAIT_S = 60.0


class _Job:
    """Managers of both tiers of one rank, each on a node of its own; copies on two nodes."""

    def __init__(
        self, root: Path, strategy: Any = None, node: str | None = None, **options: Any
    ) -> None:
        self._open = ExitStack()
        strategy = strategy or CliqueReplicationStrategy.from_replication_params(
            1, 2, timeout_s=MAX_S
        )
        self._open.enter_context(strategy)
        self.nodes: LocalCheckpointManager = self._open.enter_context(
            LocalCheckpointManager(
                *(root / (node or f"node{dist.get_rank()}"), "", strategy),
                timeout=MAX_S,
                keep_last=3,
                **options,
            )
        )
        self.shared: GlobalCheckpointManager = self._open.enter_context(
            GlobalCheckpointManager(root / "shared", timeout=_WAIT_S, local=self.nodes)
        )
        self.queue = self._open.enter_context(AsyncCallsQueue(timeout_s=_WAIT_S))

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def promote(self, iteration: int, **options: Any) -> None:
        request = self.nodes.promote(iteration, to=self.shared, **options)
        self.queue.schedule_async_request(request)
        self.queue.wait_until_finished()


def _state_of(rank: int, iteration: int, numel: int = 300_000) -> dict[str, Any]:
    random = torch.Generator().manual_seed(100 * iteration + rank)
    return {
        f"of {rank}": torch.randn(numel, generator=random),
        "rng": torch.full((3 + rank,), rank, dtype=torch.uint8),
        "loader": {"position": 10 * rank, "iteration": iteration},
        "all": torch.full((1000,), float(iteration)),
    }


def _assert_drained(root: Path, iteration: int, world_size: int, numel: int = 300_000) -> None:
    """What plain ``dcp.load`` reads is what all ranks had saved."""
    (folder,) = (root / name for name in checkpoints_in(root) if f"{iteration:08d}" in name)
    for rank in range(world_size):
        state = _state_of(rank, iteration, numel)
        found = {
            f"of {rank}": torch.zeros(numel),
            "loader": {"iteration": -1},
            "all": torch.zeros(1000),
        }
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        assert_same(found[f"of {rank}"], state[f"of {rank}"])
        assert found["loader"]["iteration"] == iteration
        assert_same(found["all"], state["all"])
        assert_same(kept_in_image(folder, rank), state)


def _shards(node: Path, iteration: int, rank: int) -> list[Path]:
    return list(node.rglob(f"{iteration:012d}.{rank}.*.safetensors"))


# Tensors of meshes.


def _save_sharded(rank: int, world_size: int, root: Path) -> None:
    with _Job(root) as job:
        job.nodes.save(_sharded(), 5)


def _sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (3,))
    wholes = {"rows": torch.arange(40.0).reshape(8, 5), "short": torch.arange(2.0)}
    state: dict[str, Any] = {
        key: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        for key, whole in wholes.items()
    }
    state["same"] = distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None)
    torch.manual_seed(5)
    fsdp1 = FullyShardedDataParallel(torch.nn.Linear(6, 10), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(fsdp1, StateDictType.SHARDED_STATE_DICT):
        state["fsdp1"] = fsdp1.state_dict()
    return state


def _drain_sharded(rank: int, world_size: int, root: Path) -> None:
    with _Job(root) as job:
        job.promote(5)


# What cannot be had.


def _save_misdescribed(rank: int, world_size: int, root: Path, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with _Job(root) as job:
        job.nodes.save({"model": {"w": misdescribed(kind, mesh)}}, 5)


def _save_forged(rank: int, world_size: int, root: Path) -> None:
    """Rank 1's image says that its tensor has a dimension more than it has."""
    if rank == 1:
        box = Box("rows", (1, 8, 5), (((0, 1),), ((3, 3),), ((0, 5),)), RankSet.of([1]))
        image.render_boxes = lambda _: render_boxes({0: box})  # type: ignore[assignment]
    _save_sharded(rank, world_size, root)


def _drain_forged(rank: int, world_size: int, root: Path) -> str:
    with _Job(root) as job:
        return error_of(lambda: job.promote(5), RestoreError)


@pytest.mark.fault("hostile-file")
def test_a_table_that_contradicts_the_state_is_refused_by_a_drain(tmp_path: Path) -> None:
    run_sharded(_save_forged, 3, tmp_path)

    for text in run_sharded(_drain_forged, 3, tmp_path):
        assert "rows of rank 1 is a DTensor of shape [8, 5]" in text
        assert "table of boxes says [1, 8, 5]" in text
    assert not (tmp_path / "shared").exists()


def _refused(rank: int, world_size: int, root: Path) -> str:
    with _Job(root) as job:
        text = error_of(lambda: job.promote(5), MismatchError)
        assert job.shared.find_latest() == -1
        assert not list((root / "shared").rglob("*.partial"))
    return text


# Several runs have chunks of their own in a drain.
@pytest.mark.parametrize("kind", sorted(MISDESCRIBED.keys() - {"runs"}))
def test_a_dtensor_that_torch_would_describe_as_another_part_is_refused(
    kind: str, tmp_path: Path
) -> None:
    run_sharded(_save_misdescribed, 4, tmp_path, kind)

    for text in run_sharded(_refused, 4, tmp_path):
        assert "model.w of rank " in text
        assert MISDESCRIBED[kind] in text
        assert "full_tensor() gives. Nothing was drained" in text


def _drain_of_parity(rank: int, world_size: int, root: Path) -> str:
    with _Job(root, ParityReplicationStrategy(1, 3)) as job:
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


def test_a_shard_that_its_node_lacks_is_named_and_a_load_computes_it_for_the_next_drain(
    tmp_path: Path,
) -> None:
    first, *others = run_ranks(_drain_of_parity, 3, tmp_path, timeout_s=120.0)

    assert others == [first] * 2
    assert "rank 1: this node cannot give the shard of rank 1 (" in first
    assert "load() this checkpoint first" in first
    _assert_drained(tmp_path / "shared", 5, 3)
