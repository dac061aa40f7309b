"""Training states of libraries beside torch, each resumed and compared with an undisturbed run.

A run draws random numbers in each step and goes on from other ones than it began with, so that its
losses are the same bit for bit only if all of its state is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils._pytree
import torchao.optim
from torch.distributed.fsdp import fully_shard
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import localckpt
from tests.ranks import node_store

__all__ = ["resume_each"]

_STEPS, _STOPPED_AT, _SAVED_AT = 6, 3, 2
_WIDTH = 256
_BATCH = torch.randn(8, 32, generator=torch.Generator().manual_seed(5))


class _Training(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], torch.Tensor]


class _Adapted(torch.nn.Module):
    """A frozen model with a trained low-rank addition."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(32, 4))
        self.up = torch.nn.Parameter(torch.randn(4, 32))

    def forward(self, batch: torch.Tensor) -> Any:
        return self.base(batch) + batch @ self.down @ self.up


def _perceptron() -> torch.nn.Sequential:
    layers = torch.nn.Linear(32, _WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(_WIDTH, 32)
    return torch.nn.Sequential(*layers)


def _loss_of(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: model(_BATCH).square().mean()


def _low_precision_optimizer(kind: Any, is_sharded: bool = False) -> _Training:
    model = _perceptron()
    if is_sharded:
        fully_shard(model)
    return _Training(model, kind(model.parameters(), lr=0.01), _loss_of(model))


def _quantised(config: Any) -> _Training:
    base = _perceptron().requires_grad_(False)
    quantize_(base, config)
    model = _Adapted(base)
    trained = [model.down, model.up]
    return _Training(model, torch.optim.AdamW(trained, lr=0.01), _loss_of(model))


def _sparse_gradients() -> _Training:
    model = torch.nn.Embedding(50, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    return _Training(model, optimizer, lambda: model(torch.randint(50, (6,))).square().mean())


# Of a process that is alone, and of several ranks.
_CASES: dict[bool, dict[str, Callable[[], _Training]]] = {
    False: {
        "adamw of 8 bits": lambda: _low_precision_optimizer(torchao.optim.AdamW8bit),
        "adamw of 4 bits": lambda: _low_precision_optimizer(torchao.optim.AdamW4bit),
        "adamw of float8": lambda: _low_precision_optimizer(torchao.optim.AdamWFp8),
        "int8 weights": lambda: _quantised(Int8WeightOnlyConfig()),
        "int8 everywhere": lambda: _quantised(Int8DynamicActivationInt8WeightConfig()),
        "float8 weights": lambda: _quantised(Float8WeightOnlyConfig()),
        "sparse gradients": _sparse_gradients,
    },
    True: {
        "adamw of 8 bits": lambda: _low_precision_optimizer(torchao.optim.AdamW8bit, True),
        "adamw of float8": lambda: _low_precision_optimizer(torchao.optim.AdamWFp8, True),
    },
}


def resume_each(rank: int, world_size: int) -> None:
    """Each training goes on bit for bit after its first attempt was left."""
    warnings.simplefilter("ignore")
    # Low-precision optimizers compile their step, which takes far longer than the step.
    torch.compiler.set_stance("force_eager")
    for name, make in _CASES[world_size > 1].items():
        whole, state = _train(make, node_store() / name / "whole", _STEPS, seed=1)
        _train(make, node_store() / name / "resumed", _STOPPED_AT, seed=1)
        resumed, resumed_state = _train(make, node_store() / name / "resumed", _STEPS, seed=2)
        assert resumed == whole[_SAVED_AT + 1 :], name
        assert _is_equal(state, resumed_state), name


def _train(
    make: Callable[[], _Training], local: Path, steps: int, *, seed: int
) -> tuple[list[str], list[Any]]:
    torch.manual_seed(seed)
    training = make()
    parts = {"model": training.model, "optimizer": training.optimizer}
    losses = []
    with localckpt.Checkpointer(
        parts, local=local, every=localckpt.Every(steps=10**6), events=()
    ) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            loss = training.loss()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            losses.append(loss.item().hex())
            checkpointer.step(step)
            if step == _SAVED_AT:
                checkpointer.save(step)
    states = training.model.state_dict(), training.optimizer.state_dict()
    return losses, torch.utils._pytree.tree_leaves(states)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values of states are equal, tensors bit for bit and of the same class."""
    if isinstance(one, list):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(_is_equal(*pair) for pair in pairs)
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if type(one) is not type(other) or one.dtype is not other.dtype:
        return False
    if hasattr(one, "__tensor_flatten__"):
        names, _ = one.__tensor_flatten__()
        return all(_is_equal(getattr(one, name), getattr(other, name)) for name in names)
    ours, others = (value.flatten().view(torch.uint8) for value in (one, other))
    return torch.equal(ours, others)
