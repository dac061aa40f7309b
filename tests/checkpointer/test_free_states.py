"""States that grow, shrink or change their kind while training are resumed as they were saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import Checkpointer, MismatchError
from tests.checkpointer.loops import resume_once, save_once
from tests.managers.jobs import error_of
from tests.ranks import node_store, run_ranks

_S = 60.0


class _Plain:
    """A part that is given a state, and tells what it has got."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class _Scaled(torch.nn.Linear):
    """A history in an extra state, as modules for FP8 have."""

    history: Any = None

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


class _Buffers(torch.nn.Module):
    """A buffer that takes the saved shape, and one that is not there at first."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(length)))
        self.register_buffer("late", torch.ones(2) if length else None)
        self.weight = torch.nn.Parameter(torch.full((2,), float(length)))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen = torch.empty_like(state[f"{prefix}seen"])
        self.late = torch.empty(2) if f"{prefix}late" in state else None
        super()._load_from_state_dict(state, prefix, *args)


class _Metric(torch.nn.Module):
    """Values of all batches in its state, as torchmetrics' modules have."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.values = values

    def state_dict(self, *args: Any, prefix: str = "", **_: Any) -> Any:
        return {f"{prefix}values": list(self.values)}

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.values = state.pop(f"{prefix}values")


def _scaled(history: Any) -> torch.nn.Module:
    module = torch.nn.Sequential(_Scaled(2, 2), torch.nn.Linear(2, 1))
    module[0].history = history
    return module


_T = torch.tensor
# Of each part the state of the first start when it is saved, and that of the second when made.
_STATES: dict[str, tuple[Any, Any]] = {
    "grown": ([_T([1.0]), _T([2.0, 3.0])], []),
    "shrunk": ({"a": [_T(1)]}, {"a": [_T(5), _T(6)], "b": _T(7)}),
    "longer": ({"a": torch.arange(5)}, {"a": torch.zeros(2, dtype=torch.int64)}),
    "of another dtype": ({"a": _T([1.5])}, {"a": _T([1])}),
    "number": ({"a": 0.25}, {"a": _T(0.5)}),
    "tensor": ({"a": _T(0.25), "b": 1}, {"a": 0.5, "b": None}),
    "none at first": ({"a": {"x": _T(1), "y": [2]}}, {"a": None}),
    "none at last": ({"a": None}, {"a": {"x": _T(1)}}),
    "empty at first": ({"g": _T([4.0])}, {}),
    "same": ({"a": _T([3.0]), "n": 3}, {"a": _T([0.0]), "n": 0}),
}


def _state(number: int) -> dict[str, Any]:
    """Parts as they are saved (0), or as they are made at the next start (1)."""
    torch.manual_seed(number)
    shared = torch.full((3,), 9.0 - 8 * number)
    return {
        **{name: _Plain(states[number]) for name, states in _STATES.items()},
        "tied": _Plain([shared, shared] if number else [shared, shared.clone() + 1]),
        "extra": _scaled([{"amax": _T([1.0, 2.0])}, None][number]),
        "extra that shrank": _scaled([_T([]), _T([1.0])][number]),
        "buffers": torch.nn.Sequential(_Buffers([3, 0][number])),
        "buffers that shrank": _Buffers([0, 3][number]),
        "metric": _Metric([[_T(1.0), _T(2.0)], []][number]),
    }


def _state_of(part: Any) -> Any:
    return part.state if isinstance(part, _Plain) else dict(part.state_dict())


def _parts(number: int) -> tuple[dict[str, Any], list[Any]]:
    """The same with a pair of functions, and what its second one has got."""
    value = [[_T([7]), _T(8)], None][number]
    got: list[Any] = []
    return _state(number) | {"value": (lambda: value, got.append)}, got


def _marked(state: dict[str, Any], is_marked: bool) -> dict[str, Any]:
    return {k: localckpt.replicated(part) if is_marked else part for k, part in state.items()}


def _save(rank: int, world_size: int, is_marked: bool) -> None:
    state, _ = _parts(0)
    save_once(_marked(state, is_marked), local=node_store(), timeout_s=_S)


def _load(rank: int, world_size: int, is_marked: bool) -> None:
    saved, (state, got) = _state(0), _parts(1)
    same, weight = state["same"].state["a"], state["buffers"][0].weight
    assert resume_once(_marked(state, is_marked), local=node_store(), timeout_s=_S) == 1

    for name in saved:
        torch.testing.assert_close(
            _state_of(state[name]), _state_of(saved[name]), rtol=0, atol=0, msg=name
        )
    assert [value.tolist() for value in got[0]] == [[7], 8]
    # What is as it was saved is filled in place.
    assert state["same"].state["a"] is same
    assert state["buffers"][0].weight is weight


@pytest.mark.fault("world-size")
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "is_marked"), [(2, 2, False), (2, 1, True), (1, 2, False)]
)
def test_states_of_another_kind_than_those_given_are_resumed_as_they_were_saved(
    saved_by: int, loaded_by: int, is_marked: bool, tmp_path: Path
) -> None:
    run_ranks(_save, saved_by, is_marked, store_per_node=[tmp_path], timeout_s=_S)

    run_ranks(_load, loaded_by, is_marked, store_per_node=[tmp_path], timeout_s=_S)


@pytest.mark.fault("changed-program")
def test_a_value_that_has_become_a_part_and_what_a_hook_does_not_take_are_mismatches(
    tmp_path: Path,
) -> None:
    save_once({"e": (lambda: 3, print), "m": torch.nn.Linear(2, 3)}, local=tmp_path, events=())
    part, model = _Plain({"x": 1}), torch.nn.Linear(2, 4)
    model.register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]

    with Checkpointer({"e": part, "m": model}, local=tmp_path, events=()) as checkpointer:
        told = error_of(checkpointer.resume, MismatchError)
        assert re.search(r"e: saved as value of a pair .*, given as part", told)
        assert part.state == {"x": 1}
        with pytest.raises(MismatchError, match=r"Linear does not take its state .* size mismatch"):
            checkpointer.resume(only=["m"])


@pytest.mark.parametrize("tier", ["local", "shared"])
def test_an_extra_state_of_which_the_module_is_rid_is_not_left_out_without_a_word(
    tier: str, tmp_path: Path
) -> None:
    scaled = _Scaled(2, 2)
    scaled.history = [1.0, 2.0]
    save_once({"model": scaled}, local=tmp_path / "local", shared=tmp_path / "shared")
    # Another machine finds nothing on its disk.
    local = tmp_path / ("local" if tier == "local" else "other")

    with Checkpointer(
        {"model": torch.nn.Linear(2, 2)}, local=local, shared=tmp_path / "shared", save_last=False
    ) as checkpointer:
        text = error_of(checkpointer.resume, MismatchError)
        assert "_extra_state" in text
        assert checkpointer.resume(partial=True) == 1
