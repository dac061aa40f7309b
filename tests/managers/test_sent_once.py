"""What the ranks that protect each other have equal does not travel, and survives a lost node."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from tests.managers.jobs import KINDS, MAX_S, assert_same, make_manager, save
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]
_LONG_S = 120.0


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _model(iteration: int) -> dict[str, torch.Tensor]:
    return {"weight": _normal(iteration, 700, 300), "half": _normal(-iteration, 90_000).half()}


def _state(rank: int, iteration: int, flipped: bool = False) -> dict[str, Any]:
    model = _model(iteration)
    if flipped:
        model["weight"][5, 7] += 1
    # Private tensors of unlike sizes between the others, so that these lie elsewhere on each rank.
    return {
        "first": _normal(rank, 32 + rank, 128),
        "model": localckpt.replicated(model),
        "rank": rank,
    }


def _expected(rank: int, iteration: int, flipped: bool = False) -> dict[str, Any]:
    state = _state(rank, iteration, flipped)
    return {**state, "model": state["model"].value}


def _manager(kind: str, factor: int, **options: Any) -> Any:
    strategy = localckpt.CliqueReplicationStrategy(replication_factor=factor, timeout_s=MAX_S)
    return make_manager(kind, node_store(), "once", strategy, **options)


def _saves(
    rank: int, world_size: int, kind: str, factor: int, flipped: int, options: dict[str, Any]
) -> tuple[int, int]:
    """Save at once and behind training; bytes sent by the last save, and of the image."""
    with _manager(kind, factor, **options) as manager, localckpt.AsyncCallsQueue() as queue:
        save(manager, _state(rank, 3, rank == flipped), 3)
        at_once = manager.last_save.sent_nbytes
        save(manager, _state(rank, 4, rank == flipped), 4, queue)
        assert manager.last_save.sent_nbytes == at_once
        return at_once, manager.last_save.nbytes


def _loads(rank: int, world_size: int, kind: str, factor: int, flipped: int) -> str:
    with _manager(kind, factor) as manager:
        state, _ = manager.load()
        assert_same(state, _expected(rank, 4, rank == flipped))
        return str(manager.last_load.source)


def _lose_a_node_and_load(
    nodes: list[Path], ranks: int, kind: str, factor: int, flipped: int
) -> None:
    shutil.rmtree(nodes[0])
    nodes[0].mkdir()

    sources = run_ranks(
        *(_loads, ranks, kind, factor, flipped), store_per_node=nodes, timeout_s=_LONG_S
    )

    of_node = ranks // len(nodes)
    assert all("peer" in source for source in sources[:of_node])
    assert sources[of_node:] == ["own node"] * (ranks - of_node)


_PRIVATE_NBYTES = 64_000


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes"),
    [(kind, 4, 2) for kind in KINDS] + [("disk", 2, 2), ("disk", 3, 3)],
)
def test_what_two_nodes_have_equal_is_not_sent_and_survives_either(
    node_dirs: Dirs, kind: str, ranks: int, nodes: int
) -> None:
    dirs = node_dirs(nodes)
    options = {"divide_replicated": True}

    saved = run_ranks(
        *(_saves, ranks, kind, nodes, -1, options), store_per_node=dirs, timeout_s=_LONG_S
    )

    for sent, nbytes in saved:
        assert sent < (nodes - 1) * _PRIVATE_NBYTES < nbytes
    _lose_a_node_and_load(dirs, ranks, kind, nodes, -1)


def test_what_is_called_equal_and_is_not_comes_back_as_each_rank_saved_it(node_dirs: Dirs) -> None:
    dirs = node_dirs(2)

    saved = run_ranks(*(_saves, 2, "disk", 2, 1, {}), store_per_node=dirs, timeout_s=_LONG_S)

    assert [sent == nbytes for sent, nbytes in saved] == [True, True]
    _lose_a_node_and_load(dirs, 2, "disk", 2, 1)
