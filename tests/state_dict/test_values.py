"""Values of a saved state are found by their places, told apart by digests, and put back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import take_tensors
from localckpt.state_dict.unpickler import check_skeleton
from localckpt.state_dict.values import (
    Placeholder,
    Unit,
    digest_of,
    placed,
    read_tree,
    root_of,
    units_of,
)

Pair = namedtuple("Pair", "left right")


@dataclass
class _Counters:
    seen: int
    kept: torch.Tensor


def _tree(state: Any) -> Any:
    taken = take_tensors(wrapped(state))
    check_skeleton(taken.skeleton, SafeGlobals([_Counters]), len(taken.tensors))
    return root_of(read_tree(taken.skeleton, SafeGlobals([_Counters]), lambda _: None))


def _state() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(2), "b": torch.zeros(1)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1}]},
        "pair": Pair(1, torch.zeros(3)),
        "counters": _Counters(4, torch.zeros(1)),
        "list": [1, torch.zeros(1), {"a": "b"}],
        "rng": {"torch": torch.zeros(4), "python": (3, (1, 2), None)},
        "step": 7,
    }


def test_values_are_the_largest_parts_that_hold_no_tensor_and_each_tensor() -> None:
    ruled, others = units_of(_tree(_state()), lambda number: number in (0, 1), ["rng"])

    assert [unit.key for unit in ruled] == ["rng"]
    found = {unit.key: unit.value for unit in others}
    assert found == {
        "optimizer.state.0.step": Placeholder((2,)),
        "optimizer.groups": [{"lr": 0.1}],
        "pair.left": 1,
        "pair.right": Placeholder((3,)),
        "counters.seen": 4,
        "counters.kept": Placeholder((4,)),
        "list.0": 1,
        "list.1": Placeholder((5,)),
        "list.2": {"a": "b"},
        "step": 7,
    }


def test_values_are_put_back_without_a_change_of_the_containers_they_are_put_in() -> None:
    state = _state()
    root = root_of(wrapped(state))
    units = [
        Unit(("optimizer", "groups"), [{"lr": 0.2}]),
        Unit(("optimizer", "new"), 5),
        Unit(("pair", "left"), 2),
        Unit(("counters", "seen"), 5),
        Unit(("list", 2), "c"),
        Unit(("step",), 8),
    ]

    result = placed(root, units)

    assert result["optimizer"]["groups"] == [{"lr": 0.2}]
    assert result["optimizer"]["new"] == 5
    assert (result["pair"].left, result["pair"].right) == (2, state["pair"].right)
    assert (result["counters"].seen, result["counters"].kept) == (5, state["counters"].kept)
    assert result["list"] == [1, state["list"][1], "c"]
    assert result["step"] == 8
    assert result["model"] is state["model"]
    assert (state["step"], state["pair"].left, state["counters"].seen) == (7, 1, 4)
    assert "new" not in state["optimizer"]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def _digest(value: Any) -> str:
    return digest_of(value, lambda placeholder: str(placeholder.numbers))


@given(_VALUES, _VALUES)
def test_equal_values_have_equal_digests_and_others_do_not(one: Any, other: Any) -> None:
    # Read from its pickle a value is equal, of other objects.
    again = _tree(one)

    assert _digest(one) == _digest(again)
    assert (_digest(one) == _digest(other)) == (repr(one) == repr(other)) or isinstance(one, dict)


def test_digests_mind_types_bytes_and_shapes_but_no_order_of_dicts_and_sets() -> None:
    alike = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {1, 2, 3}),
        (torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(2, 3).t().contiguous()),
        (numpy.arange(6)[::2], numpy.array([0, 2, 4])),
        (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)),
        (OrderedDict(a=1), OrderedDict(a=1)),
        (Pair(1, 2), Pair(1, 2)),
        (torch.float32, torch.float32),
    ]
    different = [
        (1, True),
        (0.0, -0.0),
        ([1], (1,)),
        ("a", b"a"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (numpy.zeros(2), numpy.zeros(2, dtype=numpy.float32)),
        (torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)),
        (OrderedDict(a=1), {"a": 1}),
        (Pair(1, 2), (1, 2)),
        (Placeholder((1,)), Placeholder((2,))),
    ]

    assert [_digest(a) == _digest(b) for a, b in alike] == [True] * len(alike)
    assert [_digest(a) == _digest(b) for a, b in different] == [False] * len(different)
    nested: list[Any] = []
    nested.append(nested)
    assert _digest(nested) != _digest([])
