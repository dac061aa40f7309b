"""Guard of an optimizer's tensors while they are copied from the GPU, beside training.

Between two steps of an optimizer nobody changes its parameters and its state, so their copies need
to be over only when it steps next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["Guard"]


class Guard:
    """Guard of optimizers, whose next step waits.

    Args:
        optimizers: Those whose tensors change only in their ``step``.
        before_step: Called before each of their steps.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], before_step: Callable[[], None]
    ) -> None:
        self._optimizers = list(optimizers)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: before_step()) for optimizer in optimizers
        ]

    def storages(self) -> frozenset[int]:
        """Return the addresses of the storages that only a step changes."""
        tensors = (t for optimizer in self._optimizers for t in _tensors_of(optimizer))
        # Of a DTensor, this rank's part is what is saved.
        local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
        # A tensor that is made of others has no storage; what it is made of is copied at once.
        plain = (t for t in local if type(t) in (torch.Tensor, torch.nn.Parameter))
        return frozenset(t.untyped_storage().data_ptr() for t in plain)

    def close(self) -> None:
        """Remove the hooks from the optimizers. May be called twice."""
        for hook in self._hooks:
            hook.remove()


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
