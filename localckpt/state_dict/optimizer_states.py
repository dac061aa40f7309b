"""States of optimizers: the parameters that they belong to, and loading in their own dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from localckpt.state_dict.replicated import without_marker

__all__ = ["ParametersOfStates", "load_optimizer"]


class ParametersOfStates:
    """Parameters of the optimizers of a state.

    Args:
        state: The state; an optimizer in it is one of torch's, or a value with an ``optimizer``.
    """

    def __init__(self, state: Any) -> None:
        self._by_prefix: dict[str, list[torch.Tensor]] = {}
        for key, value in state.items() if isinstance(state, Mapping) else ():
            inner = without_marker(value)
            optimizer = getattr(inner, "optimizer", inner)
            if isinstance(optimizer, torch.optim.Optimizer):
                groups = optimizer.param_groups
                self._by_prefix[f"{key}.state."] = [p for group in groups for p in group["params"]]

    def of(self, key: str) -> torch.Tensor | None:
        """Return the parameter of a state tensor, which is sharded as the parameter is.

        Args:
            key: Dotted name of the tensor.

        Returns:
            The parameter; ``None`` for a key that is no optimizer's, and for numbers of steps.
        """
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
