"""Values, states that do not fit, and damaged copies where another number of ranks loads."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import localckpt
from localckpt import (
    MismatchError,
    NoReplicasAvailableError,
)
from localckpt.replication import parts
from localckpt.state_dict import image
from localckpt.state_dict.boxes import Box, RankSet, render_boxes
from tests.managers.jobs import damage, error_of, on_node
from tests.ranks import node_store, on_ranks
from tests.scenarios import Begin
from tests.upstream.environment import import_upstream, needs

_LONG_S = 120.0
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


def _of_rank(rank: int, iteration: int) -> dict[str, Any]:
    return _state(rank, dist.get_world_size())


def _load(manager: Any, iteration: int) -> None:
    # What is sent then takes several turns.
    parts.PARCEL_NBYTES = 1 << 20
    loaded, ckpt_id = manager.load(into=_state(manager.rank, manager.world_size, fill=-1.0))
    _assert_filled(loaded, manager.rank, manager.world_size)
    assert ckpt_id.iteration == iteration


def _load_own(manager: Any) -> None:
    """As many ranks as saved it load it as ever; the next of another number leaves it alone."""
    loaded, _ = manager.load()
    _assert_filled(loaded, manager.rank, manager.world_size)
    assert loaded["data"]["position"] == 100 * manager.rank


def _refuse(manager: Any, call: str, told: str) -> None:
    assert told in error_of(getattr(manager, call), MismatchError)


def _refuse_into(manager: Any, told: str, on: int | None = None, **changed: Any) -> None:
    """A load into a state with changed parts, on all ranks or one, fails and fills nothing."""
    state = _state(manager.rank, manager.world_size, fill=-1.0)
    into = state | (changed if on in (None, manager.rank) else {})
    assert told in error_of(lambda: manager.load(into=into), MismatchError)
    assert bool((state["rows"].to_local() == -1.0).all())


def _lock(values: list[Any], rank: int, world_size: int) -> Any:
    return threading.Lock()


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_values_without_a_place_or_a_rule_are_an_error_and_saved_ones_stay_as_they_were(
    before: int, after: int, job: Begin
) -> None:
    running = job(1, ranks=before, timeout=_LONG_S, state=_of_rank).save(3).restart(ranks=after)

    running.call(_refuse, "find_latest", f"saved by {before} ranks, and this job has {after}")
    running.call(_refuse, "find_latest", "elastic=True")
    running.restart(elastic=True).find(3)
    running.call(_refuse, "load", "pass the state to load() as into=").call(
        _refuse_into, "private="
    )
    running.restart(private=_DROPPED)
    running.call(_refuse_into, "no place for layers.0.step, a value", on=1, layers={})
    short = {"0": {"w": torch.ones(4), "list": [torch.ones(2)]}}
    running.call(_refuse_into, "no place for layers.0.list.1", layers=short)
    running.restart(private={"rng": "keep", "data": _lock})
    running.call(_refuse_into, "the function for 'data' in private= returned for rank 0 cannot be")
    running.restart(private=_DROPPED).call(_load, 3)

    running.restart(ranks=before).call(_load_own).run()


def test_of_a_damaged_copy_another_one_is_taken_and_else_an_older_checkpoint(job: Begin) -> None:
    def copies(iteration: int, shard: int) -> list[Path]:
        pattern = f"{iteration:012d}.{shard}.*.safetensors"
        return sorted(path for node in running.nodes for path in node.rglob(pattern))

    running = job(2, ranks=4, redundancy=(None, 2), timeout=_LONG_S, state=_of_rank).save(2, 3)
    running.restart(ranks=3, redundancy=None, elastic=True, private=_DROPPED)
    running.call(_load, 3).run()

    # What describes the tensors is at the end, before the digests.
    described = copies(3, 2)[1]
    damage(described, 1 - 200 / described.stat().st_size)
    running.call(_load, 3).run()
    assert not described.exists()

    # In the tensors: nothing sees it before they are read.
    here, there = copies(3, 1)
    damage(here)
    running.call(_load, 3).run()
    assert not here.exists()
    assert [path.suffix for path in here.parent.glob(f"{here.name}*")] == [".corrupt"]

    damage(there)
    running.call(_load, 2).run()

    for path in copies(2, 0):
        damage(path)
    running.call(_find_nothing).run()


def _find_nothing(manager: Any) -> None:
    into = _state(manager.rank, manager.world_size, fill=-1.0)
    with pytest.raises(NoReplicasAvailableError, match="do not match their digest"):
        manager.load(into=into)


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


@on_ranks(1, nodes=1, after=(_save_tied, 2))
def test_tensors_that_share_memory_or_a_path_are_never_filled_with_another_ones_values(
    rank: int,
) -> None:
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


@pytest.mark.fault("hostile-file")
@on_ranks(2, nodes=1, after=(_save_forged, 5))
def test_forged_tables_are_refused_before_a_tensor_is_changed(rank: int, world_size: int) -> None:
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
    assert not list(node_store().rglob("*.corrupt"))


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


@needs("megatron.core")
@pytest.mark.filterwarnings("ignore")
# Few processes, each of which takes seconds to import it.
@on_ranks(2, nodes=1, after=(_save_megatron, 3))
def test_sharded_tensors_of_megatron_core_are_filled_from_their_parts(
    rank: int, world_size: int
) -> None:
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


def _save_run(manager: Any) -> None:
    tied = torch.ones(3)
    manager.save({"tied": [tied, tied], "epoch": 5, "run": {"best": {"loss": 1.0}}}, 1)


def _refuse_other_names(manager: Any) -> None:
    tied = torch.zeros(3)
    for changed, saved, given in (
        ({"epochs": 7, "run": {"best": {"loss": 0.0}}}, "epoch", "epochs"),
        ({"epoch": 7, "run": {"best": {"score": 0.0}}}, "run.best.loss", "run.best.score"),
    ):
        load = partial(manager.load, into={"tied": [tied, tied], **changed})
        text = error_of(load, MismatchError)
        assert f"{saved}: saved, not given" in text
        assert f"{given}: given, not saved" in text
        assert not tied.any()


@pytest.mark.fault("world-size")
@pytest.mark.parametrize("loaded_by", [1, 2])
def test_names_of_values_that_differ_are_listed_and_change_nothing(
    loaded_by: int, job: Begin
) -> None:
    saved = job(1, ranks=2).call(_save_run)

    saved.restart(ranks=loaded_by, elastic=True).call(_refuse_other_names).run()
