"""What is saved, built from shapes alone: a GPT-2 with AdamW, many small tensors, or one large one.

All have the same outer structure, so that whoever reads one of them reads the others.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from itertools import count
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.stores import serve_store

__all__ = [
    "GPT2_WIDTH",
    "KINDS",
    "Training",
    "build_state",
    "expected_nbytes",
    "flat_tensors",
    "parameter_shapes",
    "state_nbytes",
    "state_tensors",
]

GPT2_WIDTH = 768
KINDS = {
    "gpt2": "GPT-2 124M with AdamW, 592 tensors",
    "small": "10,000 tensors of 16 KiB",
    "many": "100,000 tensors of 4 KiB",
    "moments": "10,000 dicts of two moments of 16 KiB and a step",
    "dtensors": "10,000 DTensors of 16 KiB",
    "one": "one large tensor",
}
_RANDOM_BLOCK = 4 << 20
_LAYERS, _VOCABULARY, _CONTEXT = 12, 50257, 1024


def build_state(
    width: int = GPT2_WIDTH, seed: int = 0, device: str = "cpu", kind: str = "gpt2"
) -> dict[str, Any]:
    """One of :data:`KINDS`; a smaller width makes the GPT-2 and the one tensor smaller."""
    filled = _filler(seed, device)
    if kind in ("small", "many", "dtensors"):
        number, side = (100_000, 32) if kind == "many" else (10_000, 64)
        model = {f"tensor.{n}": filled((side, side)) for n in range(number)}
        if kind == "dtensors":
            model = _sharded(model)
        return {"model": model, "optimizer": {"state": {}, "param_groups": []}, "iteration": 100}
    if kind == "one":
        model = {"tensor": filled(((1 << 29) * width // GPT2_WIDTH,))}
        return {"model": model, "optimizer": {"state": {}, "param_groups": []}, "iteration": 100}
    is_small = kind == "moments"
    shapes = (
        {f"{n}": (64, 64) for n in range(10_000)} if is_small else dict(parameter_shapes(width))
    )
    moments = {
        number: {"step": torch.tensor(100.0), "exp_avg": filled(s), "exp_avg_sq": filled(s)}
        for number, s in enumerate(shapes.values())
    }
    groups = [{"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": list(moments)}]
    return {
        "model": {} if is_small else {name: filled(shape) for name, shape in shapes.items()},
        "optimizer": {"state": moments, "param_groups": groups},
        "iteration": 100,
    }


def _sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as FSDP2 has them, here on a mesh of this process alone."""
    # Imported for this state alone: it takes long.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=serve_store(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)
    mesh = init_device_mesh("cpu", (1,))
    return {name: DTensor.from_local(t, mesh, [Shard(0)]) for name, t in tensors.items()}


def _filler(seed: int, device: str) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Makes tensors of random values; one block serves all, for 1.5 GB of them take 5 seconds.

    Each tensor begins elsewhere in the block, so that no two of one shape are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(_RANDOM_BLOCK).uniform_(-1, 1, generator=generator)
    starts = count()

    def filled(shape: tuple[int, ...]) -> torch.Tensor:
        values = block[next(starts) :]
        tensor = torch.empty(shape)
        flat = tensor.view(-1)
        for start in range(0, len(flat), len(values)):
            piece = flat[start : start + len(values)]
            piece.copy_(values[: len(piece)])
        return tensor.to(device)

    return filled


class Training:
    """Changes one byte of each MiB of each tensor of a state, as a step changes all.

    Else a save would have nothing to write: what a file has already is not written again.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        # The lowest bits of a value.
        flat = (t.detach().view(-1).view(torch.uint8) for t in state_tensors(state) if t.numel())
        self._bytes = [tensor[:: 1 << 20] for tensor in flat]

    def step(self) -> None:
        torch._foreach_add_(self._bytes, 1)


def expected_nbytes(width: int) -> int:
    """Bytes of the GPT-2 of this width, without building it."""
    return sum(4 * (3 * prod(shape) + 1) for _, shape in parameter_shapes(width))


def state_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of :func:`build_state`, in a fixed order; of DTensors those of this rank."""
    return [*flat_tensors(state).values()]


def state_nbytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state_tensors(state))


def flat_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state under one name each."""
    named = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for number, moment in state["optimizer"]["state"].items():
        named |= {f"optimizer.{number}.{name}": tensor for name, tensor in moment.items()}
    return {n: t.to_local() if hasattr(t, "to_local") else t for n, t in named.items()}


def parameter_shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of a GPT-2 of this width."""
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
