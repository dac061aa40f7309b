"""A load on another number of ranks that a rank does not survive, or whose files are forged."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import localckpt
from localckpt import PeerLostError
from localckpt.managers import elastic
from localckpt.replication.host_transport import HostTransport
from localckpt.state_dict import image
from localckpt.state_dict.boxes import Box, RankSet, render_boxes
from tests.managers.jobs import damage, error_of, make_manager
from tests.ranks import node_store, run_ranks

_S = 60.0
_SHORT_S = 8.0


def _state(world_size: int, *, fill: float | None = None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(3_000_000.0).reshape(3000, 1000)
    given = whole if fill is None else torch.full_like(whole, fill)
    return {"w": distribute_tensor(given, mesh, [Shard(0)], src_data_rank=None), "step": 3}


def _save(rank: int, world_size: int) -> None:
    with make_manager("disk", node_store(), timeout=_S) as manager:
        manager.save(_state(world_size), 3)


def _load(rank: int, world_size: int) -> None:
    with make_manager("disk", node_store(), timeout=_S, elastic=True) as manager:
        loaded, _ = manager.load(into=_state(world_size, fill=-1.0))
        assert torch.equal(loaded["w"].to_local(), _state(world_size)["w"].to_local())


def _load_beside_one_that_dies(rank: int, world_size: int, dying: int) -> None:
    if rank == dying:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        HostTransport.exchange = die  # type: ignore[method-assign]
    manager = make_manager("disk", node_store(), timeout=_SHORT_S, elastic=True)
    began = time.monotonic()
    text = error_of(lambda: manager.load(into=_state(world_size, fill=-1.0)), PeerLostError)
    assert f"rank {dying}" in text
    assert time.monotonic() - began < 5 * _SHORT_S
    with pytest.raises(PeerLostError), manager:
        raise PeerLostError


@pytest.mark.fault("world-size")
def test_a_rank_that_dies_within_a_load_is_named_and_the_load_can_be_made_again(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save, 4, store_per_node=nodes, timeout_s=_S)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")}

    dying = 2
    run_ranks(
        *(_load_beside_one_that_dies, 3, dying),
        store_per_node=nodes,
        timeout_s=_S,
        expect_dead=[dying],
    )

    assert {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == before
    run_ranks(_load, 3, store_per_node=nodes, timeout_s=_S)


def _save_with_copies(rank: int, world_size: int) -> None:
    with (
        localckpt.CliqueReplicationStrategy.from_replication_params(2, 2, timeout_s=_S) as copies,
        make_manager("disk", node_store(), "", copies, timeout=_S) as manager,
    ):
        manager.save(_state(world_size), 3)


def _load_and_count(rank: int, world_size: int) -> int:
    """Load, and return how many bytes of tensors this rank has sent to others."""
    sent = []
    move = elastic.move_tensors

    def noted(*args: Any) -> None:
        move(*args)
        _, rank, _, transfers, _ = args
        sent.append(sum(one.nbytes for one in transfers if one.receiver != rank))

    elastic.move_tensors = noted
    _load(rank, world_size)
    return sent[-1]


def test_parts_are_read_by_the_rank_that_wants_them_where_its_node_has_the_shard(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save_with_copies, 4, store_per_node=nodes, timeout_s=_S)

    assert run_ranks(_load_and_count, 3, store_per_node=nodes, timeout_s=_S) == [0, 0, 0]

    # The second rank reads the third shard, too, and sends what the third rank does not find.
    (copy,) = nodes[1].rglob("000000000003.2.*.safetensors")
    # What describes the tensors is at the end, before the digests.
    damage(copy, 1 - 200 / copy.stat().st_size)
    sent = run_ranks(_load_and_count, 3, store_per_node=nodes, timeout_s=_S)
    assert sent == [0, 1_000_000, 0]
    assert not copy.exists()


_FORGED = {
    "reaches out": Box("w", (10, 4), (((9, 2),), ((0, 4),)), RankSet.of([1])),
    "another size": Box("w", (10, 4), (((0, 1), (4, 2)), ((0, 4),)), RankSet.of([1])),
    "huge": Box("w", (1 << 61, 4), (((0, 2),), ((0, 4),)), RankSet.of([1])),
    "another shape": Box("w", (12, 4), (((2, 2),), ((0, 4),)), RankSet.of([1])),
    "over another part": Box("w", (10, 4), (((0, 2),), ((0, 4),)), RankSet.of([1])),
}


def _save_forged(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)])}
    for iteration, box in enumerate(_FORGED.values()):
        if rank == 1:
            image.render_boxes = lambda _, box=box: render_boxes({0: box})  # type: ignore[misc]
        with make_manager("disk", node_store(), str(iteration), timeout=_S) as manager:
            manager.save(state, 1)


def _load_forged(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for iteration, what in enumerate(_FORGED):
        given = distribute_tensor(torch.full((10, 4), -1.0), mesh, [Shard(0)])
        with make_manager(
            "disk", node_store(), str(iteration), timeout=_S, elastic=True
        ) as manager:
            text = error_of(
                lambda m=manager, g=given: m.load(into={"w": g}),  # type: ignore[misc]
                localckpt.CheckpointingException,
            )
        assert ("RestoreError" in text) == (what in ("reaches out", "another size", "huge")), text
        assert bool((given.to_local() == -1.0).all()), what


@pytest.mark.fault("hostile-file")
def test_forged_tables_are_refused_before_a_tensor_is_changed(tmp_path: Path) -> None:
    run_ranks(_save_forged, 5, store_per_node=[tmp_path], timeout_s=_S)

    run_ranks(_load_forged, 2, store_per_node=[tmp_path], timeout_s=_S)

    assert not list(tmp_path.rglob("*.corrupt"))
