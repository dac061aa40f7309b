"""States of modules and optimizers: names, loading, and values that may be other ones at a load.

Most values are filled in place. *Free* ones are given to ``load_state_dict`` as they were saved.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from localckpt.errors import MismatchError
from localckpt.memory.tensor_bytes import composing
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.replicated import without_marker

TensorKind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

# By its name, since wrappers around torch.compile's may leave their own name out of a state.
_COMPILED = frozenset({"_orig_mod"})
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
# torch's own hooks that resize nothing; those of lazy modules and of torch.ao do.
_STRICT_HOOKS = ("torch.nn.", "torch.distributed.", "torch._dynamo.")
_LAZY_HOOKS = "torch.nn.modules.lazy"
# Wrappers whose own hooks leave these names out of a state.
_UNNAMED = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True)
class Freedom:
    """Names of a state whose values may differ from those that were saved.

    Attributes:
        below: Names, dotted, that are free with all below them; ``""`` for the whole state.
        shapes: Names of tensors that are free in shape and presence, and keep their dtype.
    """

    below: frozenset[str] = frozenset()
    shapes: frozenset[str] = frozenset()

    def allows(self, name: str, saved: TensorKind | None, given: TensorKind | None) -> bool:
        """Return whether a value of a kind may be given as it was saved, in place of another."""
        if name in self.shapes:
            return saved is None or given is None or saved[0] == given[0]
        return self.covers(name)

    def covers(self, name: str) -> bool:
        """Return whether a name is free, or below one that is."""
        # Mostly nothing is free, and a restart waits for this, which is asked of each name.
        return bool(self.below) and prefix_in(name, self.below) is not None


NO_FREEDOM = Freedom()
"""Freedom of states of which nothing is free."""
FREE = Freedom(frozenset({""}))
"""Freedom of states that are no module's."""


def freedom_of(value: Any) -> Freedom:
    """Return which values of the state of a stateful value are free.

    All are, but in a module. There it is the extra states, and what belongs to modules with a hook
    of their own, which may make tensors of other shapes when a state is loaded. A value that stands
    for a module says its freedom by an attribute ``freedom``.
    """
    value = without_marker(value)
    if not isinstance(value, torch.nn.Module):
        own = getattr(value, "freedom", None)
        return own if isinstance(own, Freedom) else FREE
    below: set[str] = set()
    for prefix, module in value.named_modules(remove_duplicate=False):
        prefix = _without(prefix, _UNNAMED)
        if _has_hook(module):
            below.add(prefix)
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            below.add(f"{prefix}._extra_state".removeprefix("."))
    tensors = (
        *value.named_parameters(remove_duplicate=False),
        *value.named_buffers(remove_duplicate=False),
    )
    names = (_without(name, _UNNAMED) for name, _ in tensors) if below else ()
    shapes = {name for name in names if prefix_in(name, below) is not None}
    plain = plain_names(value, {*below, *shapes})
    return Freedom(*(frozenset(plain[name] for name in those) for those in (below, shapes)))


def is_place(value: Any) -> bool:
    """Return whether the state of a stateful value is a rank's place in the data.

    So it is of the loaders, samplers and datasets of torch and torchdata, and of classes that are
    called so. It counts what one of so many ranks has seen, so for another number of ranks it is
    another place, also where it is equal on all that saved it.
    """
    return any(
        kind.__module__.startswith(("torch.utils.data", "torchdata"))
        or kind.__name__.lower().endswith(("loader", "sampler"))
        for kind in type(value).__mro__
    )


def module_state(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return the state of a module by the names that its values have without wrappers."""
    own: Mapping[str, Any] = module.state_dict()
    plain = plain_names(module, own)
    if all(name == of_plain for name, of_plain in plain.items()):
        return own
    return {plain[name]: value for name, value in own.items()}


def load_module_state(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load what :func:`module_state` returns; raises as :func:`load_module`."""
    own = module.state_dict()
    names = {plain: name for name, plain in plain_names(module, own).items()}
    given = OrderedDict((names.get(name, name), value) for name, value in state.items())
    # Without the versions of the modules' states, hooks would take them for old ones.
    given._metadata = getattr(state, "_metadata", getattr(own, "_metadata", None))  # type: ignore[attr-defined]
    load_module(module, given)


def load_module(module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise MismatchError(
            f"{type(module).__name__} does not take its state from the checkpoint, and may have a "
            f"part of it: {' '.join(str(error).split())} Make it as it was when it was saved"
        ) from error


def is_same_tensor(loaded: Any, own: Any) -> bool:
    """Return whether a loaded value is in the memory of another value."""
    if not (isinstance(loaded, torch.Tensor) and isinstance(own, torch.Tensor)):
        return False
    loaded, own = (t.to_local() if hasattr(t, "to_local") else t for t in (loaded, own))
    if type(loaded) is not type(own) or loaded.is_meta:
        return False
    parts, own_parts = composing(loaded), composing(own)
    if parts is not None and own_parts is not None:
        return len(parts) == len(own_parts) and all(map(is_same_tensor, parts, own_parts))
    return (loaded.data_ptr(), loaded.shape, loaded.stride(), loaded.dtype) == (
        *(own.data_ptr(), own.shape, own.stride(), own.dtype),
    )


def plain_names(module: torch.nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return each of a module's names as it is without DDP and ``torch.compile``."""
    wrapped = [
        (f"{prefix}.module".removeprefix("."), prefix)
        for prefix, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, _WRAPPERS)
    ]
    # The innermost first, since the names of the outer ones begin theirs.
    return {name: _plain(name, wrapped[::-1]) for name in names}


def _plain(name: str, wrapped: Iterable[tuple[str, str]]) -> str:
    for inner, outer in wrapped:
        if f"{name}.".startswith(f"{inner}."):
            name = f"{outer}{name.removeprefix(inner)}".removeprefix(".")
    return _without(name, _COMPILED)


def _without(name: str, parts: Collection[str]) -> str:
    if not any(part in name for part in parts):
        return name
    return ".".join(part for part in name.split(".") if part not in parts)


def _has_hook(module: torch.nn.Module) -> bool:
    """Return whether a module, not torch's, takes part in how its state is loaded."""
    added: Iterable[Any] = module._load_state_dict_pre_hooks.values()
    hooks = (hook.hook for hook in added)
    return any(map(_may_resize, (module.load_state_dict, module._load_from_state_dict, *hooks)))


def _may_resize(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(inspect.unwrap(hook), "__module__", None) or ""
    return home == _LAZY_HOOKS or not home.startswith(_STRICT_HOOKS)


class ParametersOfStates:
    """Parameters of the optimizers of a state: torch's, or values with an ``optimizer``."""

    def __init__(self, state: Any) -> None:
        self._by_prefix: dict[str, list[torch.Tensor]] = {}
        for key, value in state.items() if isinstance(state, Mapping) else ():
            inner = without_marker(value)
            optimizer = getattr(inner, "optimizer", inner)
            if isinstance(optimizer, torch.optim.Optimizer):
                groups = optimizer.param_groups
                self._by_prefix[f"{key}.state."] = [p for group in groups for p in group["params"]]

    def of(self, key: str) -> torch.Tensor | None:
        """Return the parameter of an optimizer's state tensor, which is sharded alike."""
        for prefix, parameters in self._by_prefix.items():
            number, _, name = key.removeprefix(prefix).partition(".")
            is_below = key.startswith(prefix) and number.isdecimal() and name != "step"
            if is_below and int(number) < len(parameters):
                return parameters[int(number)]
        return None


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer, whose values stay as they were saved.

    ``torch.optim.Optimizer.load_state_dict`` gives tensors the dtype of their parameter, which is
    another one where the states of float32 parameters are in bfloat16, and spoils text.
    """
    optimizer.load_state_dict(dict(state))
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, saved in state["state"].items():
        owner = parameters[key] if isinstance(key, int) else key
        optimizer.state[owner] = _as_saved(optimizer.state[owner], saved)


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return a loaded value with the dtypes, and the text, that were saved."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        loaded.update((k, _as_saved(v, saved[k])) for k, v in loaded.items() if k in saved)
    if type(saved) in (list, tuple) and type(loaded) is type(saved):
        return type(saved)(map(_as_saved, loaded, saved))
    return saved if isinstance(saved, str | bytes) else loaded
