"""Cliques that a job gives, one of them of a single rank, which has no replica."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt.errors import NoReplicasAvailableError
from tests.managers.jobs import KINDS, MAX_S, error_of, make_manager, resume, save, state_of
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

_CLIQUES = [[2], [0, 3], [1, 4]]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("localckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _strategy() -> Any:
    groups = {rank: dist.new_group(ranks) for ranks in _CLIQUES for rank in ranks[:1]}
    mine = next(ranks for ranks in _CLIQUES if dist.get_rank() in ranks)
    return localckpt.CliqueReplicationStrategy(groups[mine[0]], timeout_s=MAX_S)


def _save_and_lose(rank: int, world_size: int, kind: str, lost: tuple[int, ...]) -> dict[str, Any]:
    warnings = _Warnings()
    with (
        _strategy() as repl,
        make_manager(kind, node_store(), "job", repl, keep_last=1) as manager,
        localckpt.AsyncCallsQueue() as queue,
    ):
        save(manager, state_of(rank, 1), 1)
        save(manager, state_of(rank, 2), 2, queue)
        told: dict[str, Any] = {
            "status": str(manager.status()[0]),
            "survives": manager.status()[0].survives_node_loss,
            "degraded": (manager.degraded, manager.degraded_saves),
            "breaking": manager.explain().breaking,
            "warnings": list(warnings.texts),
        }
    dist.barrier()
    if rank in lost:
        shutil.rmtree(node_store())
        node_store().mkdir()
    dist.barrier()
    with _strategy() as repl, make_manager(kind, node_store(), "job", repl) as manager:
        if 2 in lost:
            assert manager.find_latest() == -1
            told["loaded"] = error_of(manager.load, NoReplicasAvailableError)
        else:
            told["loaded"] = resume(manager, rank, 2)
            manager.save(state_of(rank, 3), 3)
            assert manager.status()[0].lacking == 0
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_replicas_saves_and_all_that_is_said_of_losses_knows_it(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(5)

    told = run_ranks(_save_and_lose, 5, kind, (0, 4), store_per_node=nodes)

    for rank, of_rank in enumerate(told):
        assert of_rank["status"] == "iteration 2 is local"
        assert not of_rank["survives"]
        assert of_rank["degraded"] == (0, 0)
        # One node of five is enough, and of pairs those with it and the two cliques.
        assert ("the node of rank 2",) in of_rank["breaking"]
        assert len(of_rank["breaking"]) == 3
        warned = [text for text in of_rank["warnings"] if "has no other member" in text]
        assert len(warned) == (rank == 2)
        assert of_rank["loaded"] == {0: "peer rank 3", 4: "peer rank 1"}.get(rank, "own node")


def test_the_loss_of_the_node_of_a_rank_without_replicas_loses_the_checkpoint(
    node_dirs: Dirs,
) -> None:
    told = run_ranks(_save_and_lose, 5, "disk", (2,), store_per_node=node_dirs(5))

    for of_rank in told:
        assert "rank 2" in of_rank["loaded"]


def _keep_apart(rank: int, world_size: int) -> str:
    groups = [dist.new_group([member]) for member in range(world_size)]
    with (
        localckpt.CliqueReplicationStrategy(groups[rank], timeout_s=MAX_S) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
    ):
        manager.save(state_of(rank, 1), 1)
        return f"{manager.status()[0]}, {resume(manager, rank, 1)}"


def test_cliques_of_one_rank_each_are_a_job_without_replicas(node_dirs: Dirs) -> None:
    told = run_ranks(_keep_apart, 2, store_per_node=node_dirs(2))

    assert told == ["iteration 1 is local, own node"] * 2
