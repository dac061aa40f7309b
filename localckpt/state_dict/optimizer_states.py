"""States of optimizers that have not made a step: made, so that they can be filled in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from localckpt.state_dict.replicated import without_marker

__all__ = ["make_states", "step_of_nothing"]


def make_states(state: Any) -> dict[str, Callable[[], None]]:
    """Make the states of a dict's optimizers that have none; all ranks call it.

    An optimizer is one of torch's, or a value with an ``optimizer`` that is.

    Args:
        state: The state that is to be loaded into.

    Returns:
        By the key prefix of each state that was made, a function that takes it away again.
    """
    made: dict[str, Callable[[], None]] = {}
    if not isinstance(state, Mapping):
        return made
    for key, value in state.items():
        inner = without_marker(value)
        optimizer = getattr(inner, "optimizer", inner)
        if isinstance(optimizer, torch.optim.Optimizer) and not optimizer.state:
            step_of_nothing(optimizer)
            if optimizer.state:
                made[f"{key}.state"] = optimizer.state.clear
    return made


def step_of_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state by a step that changes no parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            # Some change parameters whatever the gradient, as by weight decay.
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
