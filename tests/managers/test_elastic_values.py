"""Values, states that do not fit, and damaged copies where another number of ranks loads."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import StepLR

import localckpt
from localckpt import (
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
)
from localckpt.replication import parts
from localckpt.replication.host_transport import HostTransport
from localckpt.state_dict import image
from localckpt.state_dict.boxes import Box, RankSet, render_boxes
from tests.faults.images import flip
from tests.managers.jobs import error_of, on_node
from tests.ranks import run_ranks
from tests.upstream.environment import import_upstream, needs

_S = 60.0
_DROPPED = {"rng": "drop", "data": "drop"}


def _state(rank: int, world_size: int, *, fill: float | None = None) -> dict[str, Any]:
    """Sharded, replicated, marked and plain tensors, and values of all kinds."""
    mesh = init_device_mesh("cpu", (world_size,))
    wide, long = torch.arange(60.0).reshape(5, 12), torch.arange(11).to(torch.bfloat16)

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if fill is None else torch.full_like(tensor, fill)

    def sharded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return distribute_tensor(given(tensor), mesh, [Shard(dim)], src_data_rank=None)

    whole = distribute_tensor(given(wide), mesh, [Replicate()], src_data_rank=None)
    turned = distribute_tensor(given(wide).t().contiguous().t(), mesh, [Shard(0)])
    return {
        "rows": sharded(wide, 0),
        "columns": sharded(wide, 1),
        "bytes": sharded(wide.to(torch.int8), 1),
        "long": sharded(long, 0),
        # Larger than what is read of a file when it is found.
        "large": sharded(torch.arange(1_500_000.0).reshape(1500, 1000), 0),
        "whole": whole,
        "turned": turned,
        "marked": localckpt.replicated({"a": given(torch.arange(7.0))}),
        "plain": given(torch.arange(3)),
        "scalar": given(torch.tensor(2.5)),
        "step": 3 if fill is None else 0,
        "nested": {"names": ["x", ("y", 1)], "set": {3, 1, 2}} if fill is None else {},
        "layers": {"0": {"w": given(torch.ones(4)), "step": 3, "list": [given(torch.ones(2)), 5]}},
        "rng": {"seed": 10 + rank, "noise": torch.full((4,), float(rank))},
        "data": {"position": 100 * rank, "epoch": 1},
    }


def _assert_filled(loaded: dict[str, Any], rank: int, world_size: int) -> None:
    wanted = _state(rank, world_size)
    for key in ("rows", "columns", "bytes", "long", "large", "whole", "turned"):
        assert torch.equal(loaded[key].to_local(), wanted[key].to_local()), key
    assert torch.equal(loaded["marked"]["a"], torch.arange(7.0))
    for key in ("plain", "scalar"):
        assert torch.equal(loaded[key], wanted[key]), key
    assert loaded["step"] == loaded["layers"]["0"]["step"] == 3
    assert loaded["layers"]["0"]["list"][1] == 5
    assert loaded["nested"] == {"names": ["x", ("y", 1)], "set": {3, 1, 2}}


def _save(rank: int, world_size: int, iteration: int = 3) -> None:
    with on_node() as manager:
        manager.save(_state(rank, world_size), iteration)


def _position(values: list[Any], rank: int, world_size: int) -> Any:
    return {"position": min(value["position"] for value in values) + rank, "epoch": len(values)}


def _lock(values: list[Any], rank: int, world_size: int) -> Any:
    return threading.Lock()


def _load(rank: int, world_size: int, saved_by: int) -> None:
    with on_node() as manager:
        text = error_of(manager.find_latest, MismatchError)
        assert f"saved by {saved_by} ranks, and this job has {world_size}" in text
        assert "elastic=True" in text
    with on_node(elastic=True) as manager:
        assert manager.find_latest() == 3
        assert "pass the state to load() as into=" in error_of(manager.load, MismatchError)
        state = _state(rank, world_size, fill=-1.0)
        text = error_of(lambda: manager.load(into=state), MismatchError)
        assert "'data'" in text or "'rng'" in text
        assert "private=" in text
        assert torch.equal(
            state["rows"].to_local(), torch.full_like(state["rows"].to_local(), -1.0)
        )
    with on_node(elastic=True, private=_DROPPED) as manager:
        # Values without a place: rank 1 has no layer, or the list is too short.
        for layers, told in (
            ({} if rank == 1 else state["layers"], "no place for layers.0.step, a value"),
            ({"0": {"w": torch.ones(4), "list": [torch.ones(2)]}}, "no place for layers.0.list.1"),
        ):
            into = {**state, "layers": layers}
            text = error_of(lambda into=into: manager.load(into=into), MismatchError)  # type: ignore[misc]
            assert told in text
    private = {"rng": "keep", "data": _position}
    with on_node(elastic=True, private=private) as manager:
        loaded, _ = manager.load(into=_state(rank, world_size, fill=-1.0))
        _assert_filled(loaded, rank, world_size)
        assert loaded["rng"]["seed"] == 10 + rank
        assert loaded["data"] == {"position": rank, "epoch": saved_by}
    private = {"rng": "keep", "data": _lock}
    with on_node(elastic=True, private=private) as manager:
        given = _state(rank, world_size, fill=-1.0)
        text = error_of(lambda: manager.load(into=given), MismatchError)
        assert "the function for 'data' in private= returned for rank 0 cannot be sent" in text
    private = {"rng.noise": "drop", "rng": "drop", "data.position": "drop"}
    with on_node(elastic=True, private=private) as manager:
        given = _state(rank, world_size, fill=-1.0)
        given["data"] = {"position": -5, "epoch": 0}
        loaded, _ = manager.load(into=given)
        _assert_filled(loaded, rank, world_size)
        assert loaded["rng"]["seed"] == 10 + rank
        assert loaded["data"] == {"position": -5, "epoch": 1}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_values_are_given_where_equal_and_else_as_their_rules_say(
    before: int, after: int, tmp_path: Path
) -> None:
    nodes = [tmp_path]
    run_ranks(_save, before, store_per_node=nodes)

    run_ranks(_load, after, before, store_per_node=nodes)
    run_ranks(_go_back, before, store_per_node=nodes)


def _go_back(rank: int, world_size: int) -> None:
    """As many ranks as saved it load it as ever; the next of another number leaves it alone."""
    with on_node(elastic=True) as manager:
        loaded, _ = manager.load()
        _assert_filled(loaded, rank, world_size)
        assert loaded["data"]["position"] == 100 * rank


def _load_undisturbed(rank: int, world_size: int) -> int:
    with on_node(elastic=True, private=_DROPPED) as manager:
        loaded, ckpt_id = manager.load(into=_state(rank, world_size, fill=-1.0))
        _assert_filled(loaded, rank, world_size)
        return int(ckpt_id.iteration)


def _save_twice(rank: int, world_size: int) -> None:
    strategy = localckpt.CliqueReplicationStrategy.from_replication_params(timeout_s=_S)
    with on_node("", strategy) as manager:
        for iteration in (2, 3):
            manager.save(_state(rank, world_size), iteration)


def _load_damaged(rank: int, world_size: int, nodes: list[Path]) -> None:
    def copies(iteration: int, shard: int) -> list[Path]:
        return sorted(
            p for node in nodes for p in node.rglob(f"{iteration:012d}.{shard}.*.safetensors")
        )

    def damage(path: Path, before_end: int | None = None) -> None:
        dist.barrier()
        if rank == 0:
            content = path.read_bytes()
            # By default in the tensors: nothing sees it before they are read.
            path.write_bytes(flip(content, -(before_end or len(content) // 2), 3))
        dist.barrier()

    # What is sent then takes several turns.
    parts.PARCEL_NBYTES = 1 << 20
    load = partial(_load_undisturbed, rank, world_size)

    assert load() == 3
    # What describes the tensors is at the end, before the digests.
    described = copies(3, 2)[1]
    damage(described, before_end=200)
    assert load() == 3
    assert not described.exists()

    here, there = copies(3, 1)
    damage(here)
    assert load() == 3
    assert not here.exists()
    assert [path.suffix for path in here.parent.glob(f"{here.name}*")] == [".corrupt"]

    damage(there)
    assert load() == 2

    for path in copies(2, 0):
        damage(path)
    with pytest.raises(NoReplicasAvailableError, match="do not match their digest"):
        load()


def test_of_a_damaged_copy_another_one_is_taken_and_else_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save_twice, 4, store_per_node=nodes)

    run_ranks(_load_damaged, 3, nodes, store_per_node=nodes)


def _tied(fill: float | None = None) -> dict[str, dict[str, Any]]:
    """States by name: one tensor in two places, two tensors of one path, and some apart."""
    one = torch.arange(4.0) if fill is None else torch.full((4,), fill)
    apart = {"one": one.clone(), "other": one + 1, "last": one + 2}
    return {
        "tied": {"one": one, "other": one, "view": one.view(2, 2)},
        "one path": {"a.b": one.clone(), "a": {"b": one + 1}},
        "apart": apart,
    }


def _save_tied(rank: int, world_size: int) -> None:
    states = _tied() | {"values": {"a": {"t": torch.ones(2), "b": rank}, "a.b": 5}}
    for name, state in states.items():
        with on_node(name) as manager:
            manager.save(state, 1)


def _load_tied(rank: int, world_size: int) -> None:
    def load(name: str, into: dict[str, Any]) -> dict[str, Any]:
        with on_node(name, elastic=True) as manager:
            loaded: dict[str, Any] = manager.load(into=into)[0]
            return loaded

    loaded = load("tied", _tied(-1.0)["tied"])
    assert loaded["one"] is loaded["other"]
    assert torch.equal(loaded["view"].flatten(), loaded["one"])
    assert torch.equal(loaded["one"], torch.arange(4.0))

    into = _tied(-1.0)["one path"]
    text = error_of(lambda: load("one path", into), MismatchError)
    assert "'a.b' is the path of two tensors" in text
    assert torch.equal(into["a.b"], torch.full((4,), -1.0))
    values = {"a": {"t": torch.zeros(2), "b": 0}, "a.b": 0}
    assert "the values of 'a.b' differ" in error_of(lambda: load("values", values), MismatchError)

    memory = torch.full((12,), -1.0)
    for other, last, why in (
        (memory[:4], memory[8:], "one and other were saved apart, and those given share memory"),
        (memory[8:], memory[3:7], "one and last were saved apart, and those given share memory"),
        (memory[8:], memory[4].expand(4), "items of 'last' share memory"),
    ):
        into = {"one": memory[:4], "other": other, "last": last}
        assert why in error_of(lambda into=into: load("apart", into), MismatchError)  # type: ignore[misc]
        assert bool((memory == -1.0).all())


def test_tensors_that_share_memory_or_a_path_are_never_filled_with_another_ones_values(
    tmp_path: Path,
) -> None:
    run_ranks(_save_tied, 2, store_per_node=[tmp_path])

    run_ranks(_load_tied, 1, store_per_node=[tmp_path])


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
        with on_node(str(iteration)) as manager:
            manager.save(state, 1)


def _load_forged(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for iteration, what in enumerate(_FORGED):
        given = distribute_tensor(torch.full((10, 4), -1.0), mesh, [Shard(0)])
        with on_node(str(iteration), elastic=True) as manager:
            text = error_of(
                lambda m=manager, g=given: m.load(into={"w": g}),  # type: ignore[misc]
                localckpt.CheckpointingException,
            )
        assert ("RestoreError" in text) == (what in ("reaches out", "another size", "huge")), text
        assert bool((given.to_local() == -1.0).all()), what


@pytest.mark.fault("hostile-file")
def test_forged_tables_are_refused_before_a_tensor_is_changed(tmp_path: Path) -> None:
    run_ranks(_save_forged, 5, store_per_node=[tmp_path])

    run_ranks(_load_forged, 2, store_per_node=[tmp_path])

    assert not list(tmp_path.rglob("*.corrupt"))


def _megatron_state(rank: int, world_size: int, kind: str, *, fill: float | None = None) -> Any:
    """Rows of one tensor, another one that all ranks have, and plain values."""
    core = import_upstream("megatron.core.dist_checkpointing.mapping")
    rows = torch.arange(48.0).reshape(12, 4).chunk(world_size)[rank]
    whole, plain = torch.arange(5.0), torch.ones(2)
    if fill is not None:
        rows, whole, plain = (torch.full_like(t, fill) for t in (rows, whole, plain))
    sharded = core.ShardedTensor.from_rank_offsets
    state = {
        # The rows of one layer, along an axis that the tensor itself does not have.
        "weight": sharded(
            *("layers.weight", rows.clone(), (0, 0, 1), (1, rank, world_size)), prepend_axis_num=1
        ),
        "bias": sharded("bias", whole, replica_id=rank),
        "args": {"iteration": 5 if fill is None else 0},
        "plain": plain,
    }
    if kind == "ours":
        state["left to others"] = sharded("left", torch.ones(3)).without_data()
        return localckpt.BasicTensorAwareStateDict(state)
    theirs = import_upstream("megatron.core.dist_checkpointing.tensor_aware_state_dict")
    made, _ = theirs.MCoreTensorAwareStateDict.from_state_dict(state, algo="atomic")
    return made


def _save_megatron(rank: int, world_size: int) -> None:
    for number, kind in enumerate(("ours", "Megatron-Core's")):
        with on_node(str(number)) as manager:
            manager.save(_megatron_state(rank, world_size, kind), 1)


def _load_megatron(rank: int, world_size: int) -> None:
    for number, kind in enumerate(("ours", "Megatron-Core's")):
        given = _megatron_state(rank, world_size, kind, fill=-1.0)
        with on_node(str(number), elastic=True) as manager:
            loaded, _ = manager.load(into=given)
        assert type(loaded) is type(given)
        found, wanted = (
            s.state_dict if kind == "ours" else s.common | s.sharded_state_dict
            for s in (loaded, _megatron_state(rank, world_size, kind))
        )
        for key in ("weight", "bias"):
            assert torch.equal(found[key].data, wanted[key].data), key
        assert found["args"] == wanted["args"]
        assert torch.equal(found["plain"], wanted["plain"])


@needs("megatron.core")
@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors_of_megatron_core_are_filled_from_their_parts(tmp_path: Path) -> None:
    # Few processes, each of which takes seconds to import it.
    run_ranks(_save_megatron, 3, store_per_node=[tmp_path])

    run_ranks(_load_megatron, 2, store_per_node=[tmp_path])


def _named(fill: float, dtype: torch.dtype = torch.float32, **changed: str) -> dict[str, Any]:
    """A state in which parts have other names."""
    model = torch.nn.Linear(2, 1).to(dtype)
    torch.nn.init.constant_(model.weight, fill)
    tied = torch.full((3,), fill, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=fill)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": StepLR(optimizer, 2),
        "epoch": int(fill),
        "run": {"best": {"loss": fill}, "names": ["a"]},
        "scalar": torch.tensor(fill, dtype=dtype),
        "tied": [tied, tied],
    }
    state |= {name: state.pop(old) for name, old in changed.items()}
    return state


_OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "renamed parts": (
        _named(7.0, sched="schedule", epochs="epoch"),
        [
            *("schedule: saved, not given", "epoch: saved, not given"),
            *("sched: given, not saved", "epochs: given, not saved"),
        ],
    ),
    "a renamed value within": (
        _named(7.0) | {"run": {"best": {"score": 7.0}, "names": []}},
        ["run.best.loss: saved, not given", "run.best.score: given, not saved"],
    ),
    "a module in place of another": (
        _named(7.0) | {"model": torch.nn.Linear(2, 1, bias=False)},
        ["model.bias: saved, not given"],
    ),
}


def _save_named(rank: int, world_size: int) -> None:
    with on_node() as manager:
        manager.save(_named(1.0009765625), 1)


def _load_others(rank: int, world_size: int) -> None:
    with on_node(elastic=True) as manager:
        for name, (state, told) in _OTHERS.items():
            weights = state["model"].weight.clone()

            text = error_of(lambda s=state: manager.load(into=s), MismatchError)  # type: ignore[misc]

            assert all(line in text for line in told), (name, text)
            assert torch.equal(state["model"].weight, weights), name
            assert state["optimizer"].param_groups[0]["lr"] == 7.0, name

        state = _named(7.0, torch.bfloat16)
        weight, tied = state["model"].weight, state["tied"][0]
        text = error_of(lambda: manager.load(into=state), MismatchError)
        assert re.search(r"model.weight: saved as float32 \[1, 2\], given as bfloat16", text)
        assert re.search(r"scalar: saved as float32 \[\], given as bfloat16", text)
        assert torch.equal(weight, torch.full_like(weight, 7.0))

        loaded, _ = manager.load(into=state, allow_dtype_change=True)

    assert state["model"].weight is weight
    assert loaded["tied"][0] is tied
    for tensor in (weight, loaded["scalar"], *loaded["tied"]):
        assert torch.equal(tensor, torch.full_like(tensor, 1.0))
        assert tensor.dtype is torch.bfloat16


@pytest.mark.fault("world-size")
@pytest.mark.parametrize("loaded_by", [1, 2])
def test_names_and_dtypes_that_differ_are_listed_and_change_nothing_unless_allowed(
    loaded_by: int, tmp_path: Path
) -> None:
    run_ranks(_save_named, 2, store_per_node=[tmp_path])

    run_ranks(_load_others, loaded_by, store_per_node=[tmp_path])


def _load_beside_one_that_dies(rank: int, world_size: int) -> None:
    if rank == 2:
        HostTransport.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    manager = on_node(timeout=8.0, elastic=True, private=_DROPPED)
    began = time.monotonic()
    into = _state(rank, world_size, fill=-1.0)
    assert "rank 2" in error_of(lambda: manager.load(into=into), PeerLostError)
    assert time.monotonic() - began < 40.0
    with pytest.raises(PeerLostError), manager:
        raise PeerLostError


@pytest.mark.fault("world-size")
def test_a_rank_that_dies_within_a_load_is_named_and_the_load_can_be_made_again(
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    run_ranks(_save, 4, store_per_node=nodes)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")}

    run_ranks(_load_beside_one_that_dies, 3, store_per_node=nodes, expect_dead=[2])

    assert {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == before
    assert run_ranks(_load_undisturbed, 3, store_per_node=nodes) == [3] * 3
