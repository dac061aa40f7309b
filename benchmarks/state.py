"""What is saved: GPT-2 124M with AdamW, 592 tensors and 1.49 GB, built from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

__all__ = ["GPT2_WIDTH", "build_state", "expected_nbytes", "state_nbytes", "state_tensors"]

GPT2_WIDTH = 768
_LAYERS, _VOCABULARY, _CONTEXT = 12, 50257, 1024


def build_state(width: int = GPT2_WIDTH, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Parameters, both moments in fp32 and the step of each; a smaller width keeps the count."""
    generator = torch.Generator().manual_seed(seed)

    def filled(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape).uniform_(-1, 1, generator=generator).to(device)

    shapes = dict(_parameter_shapes(width))
    moments = {
        number: {"step": torch.tensor(100.0), "exp_avg": filled(s), "exp_avg_sq": filled(s)}
        for number, s in enumerate(shapes.values())
    }
    groups = [{"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": list(moments)}]
    return {
        "model": {name: filled(shape) for name, shape in shapes.items()},
        "optimizer": {"state": moments, "param_groups": groups},
        "iteration": 100,
    }


def expected_nbytes(width: int) -> int:
    """Bytes of :func:`build_state`, without building it."""
    return sum(4 * (3 * prod(shape) + 1) for _, shape in _parameter_shapes(width))


def state_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of :func:`build_state`, in a fixed order."""
    moments = state["optimizer"]["state"].values()
    return [*state["model"].values(), *(tensor for moment in moments for tensor in moment.values())]


def state_nbytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state_tensors(state))


def _parameter_shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (_VOCABULARY, width)
    yield "wpe.weight", (_CONTEXT, width)
    for layer in range(_LAYERS):
        for name in ("ln_1", "ln_2"):
            yield f"h.{layer}.{name}.weight", (width,)
            yield f"h.{layer}.{name}.bias", (width,)
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            yield f"h.{layer}.{name}.weight", (inputs, outputs)
            yield f"h.{layer}.{name}.bias", (outputs,)
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)
