"""Training states of libraries beside torch, each resumed and compared with an undisturbed run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torchao.optim
from torch.distributed.fsdp import fully_shard
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import localckpt
from tests.checkpointer.loops import lives
from tests.ranks import node_store

__all__ = ["resume_each"]

_STEPS = 4
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
    """Each training goes on bit for bit though it is killed after each of its steps."""
    warnings.simplefilter("ignore")
    # Low-precision optimizers compile their step, which takes far longer than the step.
    torch.compiler.set_stance("force_eager")
    for name, make in _CASES[world_size > 1].items():
        program = partial(_train, make=make)
        losses, found, count = lives(rank, program, node_store() / name, "nodes")
        assert found == losses, name
        assert count == _STEPS + 1


def _train(note: Callable[[str, Any], None], make: Callable[[], _Training], **options: Any) -> None:
    training = make()
    parts = {"model": training.model, "optimizer": training.optimizer}
    with localckpt.Checkpointer(parts, events=(), **options) as checkpointer:
        for step in range(checkpointer.resume(), _STEPS):
            loss = training.loss()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            note(f"{step}", loss.item())
            checkpointer.step(step)
