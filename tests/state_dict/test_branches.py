"""Whatever happens to a state between two saves, one planner saves what a new one does."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from localckpt.errors import CheckpointingException
from localckpt.ids import ShardIdentity
from localckpt.state_dict import branches
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import ImagePlanner, unpack
from localckpt.state_dict.replicated import Replicated
from localckpt.state_dict.safe_globals import SafeGlobals
from tests.ranks import run_ranks
from tests.state_dict.states import IDENTITY, Rows, bits, source_of, written

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

_COUNT = 5
_SHORT, _BLOCK, _BLOCKS = 150, 500, 20


@pytest.fixture(autouse=True, scope="module")
def small_branches() -> Iterator[None]:
    large, branches._LARGE = branches._LARGE, 3
    yield
    branches._LARGE = large


def _state() -> dict[str, Any]:
    names = [f"layer.{n}" for n in range(_COUNT)]
    model = OrderedDict((name, torch.rand(2, 3)) for name in names)
    model._metadata = OrderedDict((name, {"version": 1}) for name in names)  # type: ignore[attr-defined]
    moments = {
        n: {"step": torch.tensor(1.0), "exp_avg": torch.rand(2, 3), "note": 1.5}
        for n in range(_COUNT)
    }
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": [*range(_COUNT)]}]},
        "flat": {"iteration": 1, **{f"t{n}": torch.rand(4) for n in range(_COUNT)}},
        "list": [torch.rand(3), (torch.rand(2, 2), 1), [torch.rand(1) * 1j], "text"],
        "marked": Replicated({n: torch.rand(2) for n in names}, [3, 4]),
        "iteration": 1,
        "rng": torch.rand(7),
    }


_ALLOWED = SafeGlobals([Rows])


def _places(value: Any, wanted: Any, depth: int = 5) -> list[tuple[Any, Any]]:
    """Containers, and keys in them, of values of some classes; a list may hold itself."""
    found = []
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        found += [(value, key)] if isinstance(child, wanted) else []
        inner = child.value if hasattr(child, "ranks") else child
        if isinstance(inner, dict | list) and depth:
            found += _places(inner, wanted, depth - 1)
    return found


def _with(value: Any, name: str, attribute: Any) -> Any:
    setattr(value, name, attribute)
    return value


# Of a tensor and another one of the state what is put into its place, which may be itself.
_TENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "another value": lambda t, _: t.detach().add_(1) if t.is_floating_point() else t,
    "a copy": lambda t, _: t.detach().clone(),
    "the other": lambda _, o: o,
    "a view of the other": lambda _, o: o.detach().view_as(o),
    "a part of the other": lambda _, o: o.detach().reshape(-1)[1:],
    "data of the other": lambda t, o: _with(t, "data", o.detach()),
    "data of another shape": lambda t, _: _with(t, "data", torch.rand(6)),
    "data reshaped": lambda t, _: _with(t, "data", t.detach().reshape(1, -1)),
    "data of another dtype": lambda t, _: _with(t, "data", t.detach().to(torch.float64)),
    "data of integers of this size": lambda t, _: _with(t, "data", t.detach().view(torch.int32)),
    "data of another stride": lambda t, _: _with(t, "data", torch.rand(3, 2).t()),
    "data negated": lambda t, _: _with(t, "data", torch._neg_view(t.detach())),
    "one row of any stride": lambda t, _: _with(
        t, "data", torch.rand(9).as_strided((1, 4), (9, 1))
    ),
    "set to the other": lambda t, o: t.set_(o),
    "resized": lambda t, _: t.resize_(9),
    "transposed in place": lambda t, _: t.t_(),
    "swapped": lambda t, _: torch.utils.swap_tensors(t, torch.rand(3, 2)) or t,  # type: ignore[no-untyped-call]
    "requires grad itself": lambda t, _: t.requires_grad_(),
    "a parameter": lambda t, _: torch.nn.Parameter(t.detach(), requires_grad=False),
    "a buffer": lambda t, _: torch.nn.Buffer(t.detach().clone()),
    "with an attribute": lambda t, _: _with(t.detach(), "partition_dim", 1),
    "meta": lambda t, _: torch.empty(2, 3, device="meta"),
    "empty": lambda t, _: torch.empty(0, 3),
    "sparse": lambda t, _: torch.eye(3).to_sparse(),
    "complex": lambda t, _: torch.rand(2, 3, dtype=torch.complex64),
    "conjugated": lambda t, _: _with(t, "data", t.detach().conj()),
    "an array": lambda t, _: numpy.arange(1000),
    "a number": lambda t, _: 3,
    "an object": lambda t, _: {1, 2},
}
_LITERALS = [0, 0.0, -0.0, 1, 1.0, True, False, None, "", "1", 1 << 70, float("inf"), "layer.0"]


def _with_items(value: Any, change: Callable[[list[Any]], list[Any]]) -> None:
    if isinstance(value, dict):
        items = change([*value.items()])
        value.clear()
        value.update(items)


# Of a container what changes in it.
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "reordered": lambda c: c.reverse() if type(c) is list else _with_items(c, lambda i: i[::-1]),
    "last first": lambda c: c.move_to_end([*c][-1], last=False) if hasattr(c, "_metadata") else c,
    "renamed": lambda c: _with_items(c, lambda items: [(f"{k}", v) for k, v in items]),
    "last renamed": lambda c: _with_items(c, lambda items: [*items[:-1], ("new", items[-1][1])]),
    "True for 1": lambda c: _with_items(c, lambda of: [(k if k != 1 else True, v) for k, v in of]),
    "metadata": lambda c: hasattr(c, "_metadata") and c._metadata.update(b=torch.ones(2)),
    "versions": lambda c: hasattr(c, "_metadata") and c._metadata.update(b=[len(c)]),
    "one less": lambda c: len(c) > 1 and (c.popitem() if isinstance(c, dict) else c.pop()),
    "one more": lambda c: c.update(more=torch.rand(2)) if isinstance(c, dict) else c.append("more"),
    "itself": lambda c: c.update(itself=c) if isinstance(c, dict) else c.insert(0, c),
}


def _change(state: Any, what: str, at: int, other: int) -> None:
    tensors, containers = _places(state, torch.Tensor), _places([state], (dict, list))
    holder, key = containers[at % len(containers)]
    if what in _CONTAINERS:
        _CONTAINERS[what](holder[key])
    elif what == "literal":
        literals = _places(state, (int, float, str))
        place, of = literals[at % len(literals)]
        place[of] = _LITERALS[other % len(_LITERALS)]
    elif what == "as new objects":
        holder[key] = copy.deepcopy(holder[key])
    elif what == "shared":
        state["shared"] = holder[key]
    elif what == "marked by others":
        state["marked"] = Replicated(state["marked"].value, [3])
    elif tensors:
        (place, of), (there, name) = (tensors[n % len(tensors)] for n in (at, other))
        # Some torch refuses, as of tensors of one item.
        with suppress(RuntimeError):
            place[of] = _TENSORS[what](place[of], there[name])


_KINDS = (*_TENSORS, *_CONTAINERS, "literal", "as new objects", "shared", "marked by others")
_CHANGE = st.tuples(st.sampled_from(_KINDS), st.integers(0, 60), st.integers(0, 60))
_ROUNDS = st.lists(st.lists(_CHANGE, max_size=3), max_size=4)


def _planner(identity: ShardIdentity = IDENTITY) -> ImagePlanner:
    return ImagePlanner(_ALLOWED, Job(identity.rank, range(identity.world_size)))


def _described(value: Any, seen: dict[int, Any]) -> Any:
    """All that tells values apart, and which of them are one object."""
    if isinstance(value, torch.Tensor | dict | list | DTensorSpec | DeviceMesh):
        if id(value) in seen:
            return list(seen).index(id(value))
        seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        about = type(value), value.dtype, value.shape, value.layout, value.requires_grad
        if isinstance(value, DTensor):
            spec = value._spec
            parts = [[spec], [spec.mesh], [*map(repr, spec.placements)], value.to_local()]
            return about, vars(value), type(spec.placements[0]), _described(parts, seen)
        if value.layout is not torch.strided:
            return about, _described(value.to_dense(), seen)
        return about, vars(value), value.stride(), None if value.is_meta else bits(value)
    if isinstance(value, dict):
        items = [(repr(key), _described(child, seen)) for key, child in value.items()]
        attributes = vars(value) if isinstance(value, OrderedDict) else {}
        return type(value), items, _described([*attributes.items()], seen)
    if isinstance(value, list | tuple):
        return type(value), [_described(child, seen) for child in value]
    return type(value), repr(value)


def _saved(planner: ImagePlanner, state: Any, identity: ShardIdentity = IDENTITY) -> Any:
    """What a save keeps: its tables, and what a load makes of it; or the text of its error."""
    try:
        capture = planner.capture(wrapped(state))
    except CheckpointingException as error:
        return str(error)
    loaded = unpack(source_of(written(capture, identity)), allowed=_ALLOWED)
    return capture.plan.slots_json, capture.plan.tables, _described(loaded.state_dict, {})


def _as_a_whole(state: Any, identity: ShardIdentity = IDENTITY) -> Any:
    """What a save keeps that knows nothing of earlier ones, nor of branches."""
    large, branches._LARGE = branches._LARGE, 1 << 30
    try:
        return _saved(_planner(identity), state, identity)
    finally:
        branches._LARGE = large


def _check_changes(rounds: list[list[tuple[str, int, int]]]) -> None:
    torch.manual_seed(0)
    planner, state = _planner(), _state()
    for changes in [[], *rounds]:
        for change in changes:
            _change(state, *change)
        assert _saved(planner, state) == _as_a_whole(state), changes


@pytest.mark.fault("hard-state")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, _BLOCKS))]
)
def test_no_changed_state_is_taken_for_the_one_before(
    block: int, long_form: bool, record_property: Any
) -> None:
    record_property("cases", _BLOCK if long_form else _SHORT)

    @seed(block)
    @settings(max_examples=_BLOCK if long_form else _SHORT)
    @given(_ROUNDS)
    def check(rounds: list[list[tuple[str, int, int]]]) -> None:
        _check_changes(rounds)

    check()


@pytest.mark.parametrize("what", _KINDS)
def test_each_change_of_each_value_is_found(what: str) -> None:
    for at in range(24):
        _check_changes([[(what, at, at + 1)]])


def _change_dtensors(rank: int, world_size: int) -> None:
    branches._LARGE = 3
    identity = dataclasses.replace(IDENTITY, rank=rank, world_size=world_size)
    mesh, other = (init_device_mesh("cpu", (world_size,)) for _ in range(2))

    def made(placement: Any, of: DeviceMesh = mesh) -> DTensor:
        return DTensor.from_local(torch.rand(2, 3), of, [placement], run_check=False)

    first, second = made(Shard(0)), made(Shard(0))
    weights: dict[str, Any] = {str(n): made(Shard(n % 2)) for n in range(8)} | {
        "a": first,
        "b": second,
    }
    moments = {n: {"step": torch.tensor(1.0), "exp_avg": made(Shard(0))} for n in range(8)}
    state: dict[str, Any] = {"weights": weights, "state": moments, "": {1}, "one": made(Shard(0))}
    spec = DTensorSpec(mesh, (Shard(0),), first._spec.tensor_meta)

    def set_spec(new: DTensorSpec) -> None:
        second._spec = new

    def set_placement(placement: Any) -> None:
        spec.placements = (placement,)

    changes: list[Callable[[], Any]] = [
        lambda: state.update(iteration=1),
        lambda: weights.update(a=made(Shard(0))),
        lambda: set_spec(spec),
        lambda: set_spec(copy.copy(spec)),
        lambda: weights.update(c=DTensor(torch.rand(2, 3), spec, requires_grad=False)),
        lambda: set_placement(Rows(0)),
        lambda: set_placement(Shard(1)),
        lambda: weights.update(d=made(Replicate())),
        lambda: weights.update(d=made(Shard(0), other)),
        lambda: state.update(one=DTensor(torch.rand(2, 3), spec, requires_grad=False)),
        lambda: weights.update(d=first),
        lambda: second.requires_grad_(),
        lambda: setattr(second, "partition_dim", 1),
        lambda: weights.pop("b"),
        lambda: setattr(first, "_local_tensor", torch.rand(2, 3).half()),
        lambda: setattr(weights["c"], "_local_tensor", first._local_tensor),
        lambda: weights.update(e=torch.rand(2)),
        lambda: setattr(mesh, "_mesh_dim_names", ("renamed",)),
    ]

    planner = _planner(identity)
    for number, change in enumerate([lambda: None, *changes]):
        change()
        for _ in range(2):
            found, wanted = _saved(planner, state, identity), _as_a_whole(state, identity)
            assert found == wanted, number


def test_changes_of_dtensors_are_found() -> None:
    run_ranks(_change_dtensors, 2)


def test_a_planner_keeps_no_tensor_alive() -> None:
    planner, state = _planner(), _state()
    _saved(planner, state)
    _saved(planner, state)
    alive = [weakref.ref(holder[key]) for holder, key in _places(state, torch.Tensor)]

    del state

    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_one_layout_serves_while_only_values_change(layouts: list[Any]) -> None:
    planner, state = _planner(), _state()
    for iteration in range(5):
        state["flat"]["iteration"] = 10**iteration
        state["iteration"] = {"a": 1} if iteration % 2 else "text"
        for holder, key in _places(state, torch.Tensor):
            holder[key] = holder[key] + 1

        _saved(planner, state)

    assert len(layouts) == 1
