"""Optimizers in the form of Apex's: the number of steps is in the group, and not in each state.

With torch's own in their place Megatron-Core before 0.16 fails to save, and none of its releases
takes over the number of steps that it has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["FusedAdam", "FusedSGD"]

FusedSGD = torch.optim.SGD


class FusedAdam(torch.optim.Optimizer):
    """AdamW; one group has one number of steps."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        unbiased = state["exp_avg_sq"] / (1 - second ** group["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(
            state["exp_avg"],
            unbiased.sqrt_().add_(group["eps"]),
            value=-group["lr"] / (1 - first ** group["step"]),
        )
