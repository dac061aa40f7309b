"""The state of a training loop on shared storage, in torch.distributed.checkpoint's form.

Modules and optimizers have the names that they have on any number of ranks, so another number can
load them. What else there is belongs to a rank, but for what torch keeps alike on all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, SupportsFloat

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from localckpt.checkpointer.parts import RNG, ModulePart, OptimizerPart
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict.basic import unwrapped, wrapped
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.replicated import without_marker
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource

__all__ = ["OnResize", "SharedState"]

logger = logging.getLogger(__name__)

OnResize = Literal["error", "drop"]

_WORLD, _PRIVATE, _COMMON = "world_size", "of_rank", "of_all"
# What is the same on all ranks, so that one more rank can have it, too.
_ALIKE = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


class SharedState:
    """The parts of a state, saved to and loaded from shared storage.

    Args:
        parts: Parts by name.
        manager: Manager of the checkpoints there.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults.
        on_resize: What becomes of the parts that belong to a rank when another number of ranks
            loads them: an ``"error"``, or they are ``"drop"``-ped, and stay as they are.

    Raises:
        CheckpointingException: The parameters of an optimizer are in none of the modules.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        manager: GlobalCheckpointManager,
        safe_globals: tuple[Any, ...],
        on_resize: OnResize,
    ) -> None:
        # Checkpoints there hold no table of ranks: what is equal is found by its name.
        parts = {key: without_marker(part) for key, part in parts.items()}
        self._manager = manager
        self._allowed = SafeGlobals(safe_globals)
        self._on_resize = on_resize
        self._modules = {k: part.module for k, part in parts.items() if type(part) is ModulePart}
        self._optimizers = {
            key: (_module_of(key, part.optimizer, self._modules), part.optimizer)
            for key, part in parts.items()
            if isinstance(part, OptimizerPart)
        }
        rest = {
            key: part
            for key, part in parts.items()
            if key not in self._modules and key not in self._optimizers
        }
        self._alike = {key: part for key, part in rest.items() if isinstance(part, _ALIKE)}
        self._private = {key: part for key, part in rest.items() if key not in self._alike}

    def save(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Save the state of all ranks behind training; raises what the save before failed with."""
        state = {
            **self._sharded(),
            _WORLD: self._manager.world_size,
            _COMMON: {key: self._packed(part, step) for key, part in self._alike.items()},
            _PRIVATE: {
                f"{key}.{self._manager.rank}": self._packed(part, step)
                for key, part in self._private.items()
            },
        }
        self._manager.save(state, step, is_async=True, metrics=metrics)

    def load(self, step: int) -> None:
        """Fill the parts with the state of a step; all ranks call it.

        Raises:
            MismatchError: Parts belong to a rank, and another number of ranks has saved them. The
                state is as it was.
        """
        about: dict[str, Any] = {_WORLD: 0}
        self._manager.load(into=about, iteration=step)
        is_resized = about[_WORLD] != self._manager.world_size
        left = self._left_out(about[_WORLD]) if is_resized else frozenset[str]()
        private = {} if is_resized else self._private
        rank = self._manager.rank
        state = {
            **self._sharded(),
            _COMMON: dict.fromkeys(self._alike, b""),
            _PRIVATE: {f"{key}.{rank}": b"" for key in private},
        }
        self._manager.load(into=state, iteration=step)
        for key, module in self._modules.items():
            set_model_state_dict(module, state[key])
        for key, (module, optimizer) in self._optimizers.items():
            set_optimizer_state_dict(module, optimizer, state[key])
        for key, part in self._alike.items():
            part.load_state_dict(self._unpacked(state[_COMMON][key]))
        for key, part in private.items():
            part.load_state_dict(self._unpacked(state[_PRIVATE][f"{key}.{rank}"]))
        if left:
            logger.warning(
                "saved by %d ranks and loaded by %d: %s stay as they are",
                *(about[_WORLD], self._manager.world_size, ", ".join(sorted(left))),
            )

    def _left_out(self, world_size: int) -> frozenset[str]:
        """Names of the parts that another number of ranks cannot have."""
        # Streams of random numbers are as good when they begin anew.
        lost = sorted(self._private.keys() - {RNG})
        if lost and self._on_resize == "error":
            raise MismatchError(
                f"the checkpoint on shared storage was saved by {world_size} ranks, and this job "
                f"has {self._manager.world_size}: {', '.join(lost)} belong to single ranks. Resume "
                f"with as many ranks, or leave them as they are with on_resize='drop'. Nothing was "
                f"changed"
            )
        return frozenset(self._private)

    def _sharded(self) -> dict[str, Any]:
        """States of the modules and optimizers; tensors are those that training uses."""
        models = {key: get_model_state_dict(module) for key, module in self._modules.items()}
        optimizers = {
            key: get_optimizer_state_dict(module, optimizer)
            for key, (module, optimizer) in self._optimizers.items()
        }
        return {**models, **optimizers}

    def _packed(self, part: Any, step: int) -> bytes:
        """Return an object as one value of bytes, which can be loaded without knowing its shape."""
        identity = ShardIdentity("", Generation(0, 0), step, 0, 1)
        image = pack(wrapped(part.state_dict()), identity, ImagePlanner(self._allowed))
        return bytes(image.view)

    def _unpacked(self, image: bytes) -> Any:
        source = MemorySource(memoryview(bytearray(image)))
        return unwrapped(unpack(source, allowed=self._allowed))


def _module_of(
    key: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]
) -> torch.nn.Module:
    """The module whose parameters an optimizer has."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules.values():
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise CheckpointingException(
        f"{key!r} of the training state is an optimizer whose parameters are not all in one of its "
        f"modules ({', '.join(modules) or 'there is none'}): on shared storage its state is named "
        f"by them. Give the module, or leave out shared="
    )
