"""A shard that its node lacks cannot be drained; a load puts it there again, and then it can."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    AsyncCallsQueue,
    CheckpointingException,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
    ParityReplicationStrategy,
)
from tests.global_tier.models import manager_on
from tests.managers.jobs import MAX_S, damage, error_of
from tests.ranks import run_ranks

Redundancy = Literal["copies", "parity"]


def _state_of(rank: int, iteration: int) -> dict[str, torch.Tensor]:
    return {f"of {rank}": torch.full((300_000,), float(10 * iteration + rank))}


def _strategy(kind: Redundancy) -> CliqueReplicationStrategy | ParityReplicationStrategy:
    if kind == "parity":
        return ParityReplicationStrategy(1, 3)
    return CliqueReplicationStrategy.from_replication_params(1, 2, timeout_s=MAX_S)


def _spoil(node: Path, what: str) -> None:
    # The second rank's own shard, by its iteration and rank.
    (path,) = (p for p in node.rglob("*5.1.*.safetensors") if "parity" not in p.name)
    if what == "damaged":
        damage(path, 0.3)
    else:
        path.unlink()


def _drain(rank: int, world_size: int, root: Path, kind: Redundancy, what: str) -> str:
    node = root / f"node{rank}"
    with (
        _strategy(kind) as strategy,
        LocalCheckpointManager(node, "", strategy, timeout=MAX_S, keep_last=2) as nodes,
        manager_on(root / "shared", local=nodes) as shared,
        AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):

        def promote(iteration: int) -> None:
            queue.schedule_async_request(nodes.promote(iteration, to=shared))
            queue.wait_until_finished()

        nodes.save(_state_of(rank, 5), 5)
        if rank == 1:
            _spoil(node, what)
        dist.barrier()

        text = error_of(lambda: promote(5), CheckpointingException)
        assert shared.find_latest() == -1
        assert not list((root / "shared").rglob("*.partial"))

        state, ckpt_id = nodes.load()
        assert ckpt_id.iteration == 5
        promote(5)
        blank = _state_of(rank, 0)
        assert shared.load(into=blank, iteration=5)[1].iteration == 5
        assert torch.equal(blank[f"of {rank}"], state[f"of {rank}"])
        assert torch.equal(state[f"of {rank}"], _state_of(rank, 5)[f"of {rank}"])

        nodes.save(_state_of(rank, 6), 6)
        promote(6)
        assert shared.find_latest() == 6
    return text


@pytest.mark.parametrize(("kind", "what"), [("copies", "damaged"), ("parity", "missing")])
def test_a_shard_that_is_lost_on_its_node_is_drained_once_a_load_has_repaired_it(
    kind: Redundancy, what: str, tmp_path: Path
) -> None:
    world_size = 3 if kind == "parity" else 2
    first, *others = run_ranks(_drain, world_size, tmp_path, kind, what, timeout_s=120.0)

    assert others == [first] * (world_size - 1)
    assert "rank 1" in first
    assert ("was put in quarantine" in first) == (what == "damaged")
    assert "load() this one first" in first
