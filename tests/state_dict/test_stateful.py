"""Names of modules' values without wrappers, and which of their values are free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localckpt.state_dict.replicated import Replicated
from localckpt.state_dict.stateful import FREE, freedom_of, plain_names

_F32, _BF16 = torch.float32, torch.bfloat16


class _Extra(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {}

    def set_extra_state(self, state: Any) -> None:
        pass


class _Resizing(torch.nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def _compiled(module: torch.nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_plain_names_are_without_wrappers_at_every_level() -> None:
    inner = torch.nn.Sequential(_compiled(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1))
    module = torch.nn.Sequential(torch.nn.DataParallel(_compiled(inner)))
    module.add_module("module", torch.nn.DataParallel(torch.nn.Linear(1, 1)))

    whole = _compiled(module)

    names = plain_names(whole, whole.state_dict())

    assert names == {
        "_orig_mod.0.module._orig_mod.0._orig_mod.weight": "0.0.weight",
        "_orig_mod.0.module._orig_mod.0._orig_mod.bias": "0.0.bias",
        "_orig_mod.0.module._orig_mod.1.weight": "0.1.weight",
        "_orig_mod.0.module._orig_mod.1.bias": "0.1.bias",
        "_orig_mod.module.module.weight": "module.weight",
        "_orig_mod.module.module.bias": "module.bias",
    }


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.BatchNorm1d(2),
        _Extra(2, 2),
        torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
        _compiled(torch.nn.Linear(2, 2)),
    ],
)
def test_modules_with_hooks_of_torch_that_resize_nothing_are_strict_but_of_extra_states(
    module: torch.nn.Module,
) -> None:
    free = freedom_of(torch.nn.Sequential(module))

    assert not free.allows("0.weight", (_F32, (2,)), (_F32, (3,)))
    assert not free.allows("0.weight", (_F32, (2,)), None)
    # Where a module has one.
    assert free.allows("0._extra_state.amax", (_F32, (2,)), (_BF16, (3,))) == (
        type(module) is _Extra
    )
    assert free.allows("0._extra_state", None, (_F32, ())) == (type(module) is _Extra)


def _with_pre_hook() -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    module.register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    return module


@pytest.mark.parametrize(
    "module",
    [
        _Resizing(1, 1),
        torch.nn.Sequential(_Resizing(1, 1)),
        _with_pre_hook(),
        torch.nn.LazyLinear(1),
        torch.ao.quantization.FakeQuantize(),  # type: ignore[no-untyped-call]
    ],
)
def test_below_a_module_with_a_hook_shapes_are_free_and_dtypes_are_not(
    module: torch.nn.Module,
) -> None:
    free = freedom_of(torch.nn.ModuleDict({"a": module, "b": torch.nn.Linear(1, 1)}))

    for name in (f"a.{name}" for name in module.state_dict()):
        assert free.allows(name, (_F32, (2,)), (_F32, (3,)))
        assert free.allows(name, (_F32, (2,)), None)
        assert not free.allows(name, (_F32, (2,)), (_BF16, (2,)))
    assert not free.allows("b.weight", (_F32, (2,)), (_F32, (3,)))


def test_states_of_no_module_are_free() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    assert freedom_of(Replicated(optimizer, (0,))) == FREE
    assert FREE.allows("state.0.momentum_buffer", (_F32, (1,)), None)
