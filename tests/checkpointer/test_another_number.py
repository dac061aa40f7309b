"""One rule for both tiers on another number of ranks: what each kind of value becomes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
import torch

import localckpt
from localckpt import MismatchError, Values
from tests.checkpointer.loops import Part, resume_once, save_once
from tests.ranks import logged, node_store, on_ranks

_S = 60.0
_SAVED_BY = 2
_MADE = -1.0

Becomes = Literal["saved", "made", "own", "made by the rule", "of a rank", "refused"]
"""``own``: that of the rank's number, as made on ranks beyond; ``of a rank``: of any one."""


class _Loader(Part):
    """Data loader with a place of its own."""


class _Sampled(torch.utils.data.Sampler[int], Part):  # type: ignore[misc]
    def __init__(self, value: Any) -> None:
        self.value = value


_Made = tuple[Any, Callable[[], Any]]
"""A part, and what reads its value."""


def _part(value: Any, kind: Any = Part) -> _Made:
    part = kind(value)
    return part, lambda: part.value


def _pair(value: Any) -> _Made:
    box = Part(value)
    return (lambda: box.value, partial(setattr, box, "value")), lambda: box.value


def _values(value: Any) -> _Made:
    run = Values(best=value)
    return run, lambda: run.best


def _linear(value: Any) -> _Made:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, float(value))
    return module, lambda: module.weight


def _norm(value: Any) -> _Made:
    module = torch.nn.BatchNorm1d(1, affine=False)
    module.running_mean.fill_(float(value))
    return module, lambda: module.running_mean


def _marked(value: Any, kind: Any = Part) -> _Made:
    part, read = _part(value, kind)
    return localckpt.replicated(part), read


@dataclass(frozen=True)
class _Row:
    """Kind of a value, and what becomes of it on another number of ranks."""

    make: Callable[[Any], _Made]
    becomes: Becomes
    # Whether the ranks that save have different values.
    differs: bool = False
    # Class of the value when it is saved, and when the part is made.
    saved_as: Callable[[float], Any] = float
    made_as: Callable[[float], Any] = float
    rule: Any = None
    # Key of the rule, below the name of the part.
    below: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def saved(self, rank: int) -> float:
        return 3.0 + rank * self.differs

    def expected(self, rank: int) -> list[float]:
        saved = [self.saved(number) for number in range(_SAVED_BY)]
        return {
            "saved": saved[:1],
            "made": [_MADE],
            "own": saved[rank : rank + 1] or [_MADE],
            "made by the rule": [100 * sum(saved) + rank],
            "of a rank": saved,
        }[self.becomes]


def _ruled(values: list[Any], rank: int, world_size: int) -> Any:
    assert len(values) == _SAVED_BY
    first = values[0]
    if isinstance(first, dict):
        return {key: _ruled([v[key] for v in values], rank, world_size) for key in first}
    return 100 * sum(values) + rank


_DROP = {"on_resize": "drop"}
_TENSOR: Any = torch.tensor
_VALUE_ROWS = {
    f"{name} {kind}{' differing' * differs}": _Row(
        make, becomes, differs, saved_as, made_as, rule, below, options
    )
    for name, make, below in (
        ("pair", _pair, ""),
        ("values", _values, ".best"),
        ("part", _part, ".value"),
    )
    for saved_as, made_as, of in ((float, float, ""), (_TENSOR, float, " now a tensor"))
    for kind, differs, becomes, rule, options in (
        (f"equal{of}", False, "saved", None, {}),
        (f"equal dropping{of}", False, "saved", None, _DROP),
        (f"equal drop{of}", False, "saved", "drop", {}),
        (f"equal keep{of}", False, "saved", "keep", {}),
        (f"equal function{of}", False, "saved", _ruled, {}),
        (f"no rule{of}", True, "refused", None, {}),
        (f"dropping{of}", True, "made", None, _DROP),
        (f"drop{of}", True, "made", "drop", {}),
        (f"keep{of}", True, "own", "keep", {}),
        (f"function{of}", True, "made by the rule", _ruled, {}),
    )
    if name != "part" or of
}
_ROWS = _VALUE_ROWS | {
    "tensor": _Row(_pair, "saved", saved_as=_TENSOR, made_as=_TENSOR),
    "tensor differing": _Row(_pair, "refused", True, _TENSOR, _TENSOR),
    "marked number": _Row(_marked, "saved"),
    "marked tensor": _Row(_marked, "saved", saved_as=_TENSOR),
    "marked number differing": _Row(_marked, "refused", True),
    "marked number kept": _Row(_marked, "own", True, rule="keep"),
    "module": _Row(_linear, "saved"),
    "buffer": _Row(_norm, "of a rank", True),
    "buffer keep": _Row(_norm, "own", True, rule="keep", below=".running_mean"),
    "buffer drop": _Row(_norm, "made", True, rule="drop", below=".running_mean"),
    "stage equal": _Row(_linear, "saved", rule="keep"),
    "stage keep": _Row(_linear, "own", True, rule="keep"),
    "stage weight keep": _Row(_linear, "own", True, rule="keep", below=".weight"),
    "stage drop": _Row(_linear, "made", True, rule="drop"),
    "stage function": _Row(_linear, "made by the rule", True, rule=_ruled),
    **{
        f"{name} {kind}{' differing' * differs}": _Row(make, becomes, differs, **options)
        for name, make in (
            ("loader", partial(_part, kind=_Loader)),
            ("sampler", partial(_part, kind=_Sampled)),
        )
        for differs in (False, True)
        for kind, becomes, options in (
            ("no rule", "refused", {}),
            ("dropping", "made", {"options": _DROP}),
            ("drop", "made", {"rule": "drop"}),
            ("keep", "own", {"rule": "keep"}),
            ("function", "made by the rule", {"rule": _ruled, "below": ".value"}),
        )
    },
    "loader marked": _Row(partial(_marked, kind=_Loader), "saved"),
}
_KEYS = {row: f"p{number}" for number, row in enumerate(_ROWS)}


def _save(rank: int, world_size: int) -> None:
    state = {
        key: _ROWS[n].make(_ROWS[n].saved_as(_ROWS[n].saved(rank)))[0] for n, key in _KEYS.items()
    }
    private = {key: "keep" for name, key in _KEYS.items() if name.startswith("stage")}
    places: dict[str, Any] = {tier: node_store() / tier for tier in ("local", "shared")}
    save_once(state, **places, timeout_s=_S, private=private)


@pytest.mark.rows(2)
@pytest.mark.fault("world-size")
@pytest.mark.parametrize("world_size", [3, 1])
@pytest.mark.parametrize("tier", ["nodes", "shared"])
@on_ranks(nodes=1, after=(_save, _SAVED_BY), timeout_s=_S)
def test_each_kind_of_value_becomes_the_same_on_both_tiers(
    rank: int, world_size: int, tier: str
) -> None:
    local, options, warned = node_store() / "local", dict[str, Any](), logged()
    if tier == "shared":
        local, options = node_store() / "empty", {"shared": node_store() / "shared"}
        local.mkdir(exist_ok=True)
    # What loads together, and what is refused by itself.
    groups: dict[str, list[str]] = {}
    for name, row in _ROWS.items():
        alone = name if row.becomes == "refused" else ""
        groups.setdefault(f"{alone}{row.options}", []).append(name)
    found: dict[str, Any] = {}
    for names in groups.values():
        made = {name: _ROWS[name].make(_ROWS[name].made_as(_MADE)) for name in names}
        private = {
            _KEYS[name] + _ROWS[name].below: _ROWS[name].rule
            for name in names
            if _ROWS[name].rule is not None
        }
        state = {_KEYS[name]: part for name, (part, _) in made.items()}
        given = {**options, **_ROWS[names[0]].options, "private": private, "read_only": True}
        error = ""
        try:
            resume_once(state, only=list(state), local=local, timeout_s=_S, **given)
        except MismatchError as refused:
            error = f"refused: {refused}"
            assert [float(read()) for _, read in made.values()] == [_MADE] * len(made)
            assert all(f"'{key}" in error for key in state), error
        found |= {name: error or float(read()) for name, (_, read) in made.items()}
    wrong = {}
    for name, row in _ROWS.items():
        got = found[name]
        is_refused = isinstance(got, str)
        if is_refused != (row.becomes == "refused") or (
            not is_refused and got not in row.expected(rank)
        ):
            wrong[name] = row.becomes, got
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    if rank == 0:
        dropped = re.search(r"which differ in .*'(p\d+)'.*: dropped", "\n".join(warned))
        assert dropped is not None
        assert dropped[1] in _KEYS.values()
