"""Parts of a training state: each gives values to a save, and takes them from a load.

A part has ``state_dict`` and ``load_state_dict``, as torch's own classes do. Tensors that a part
gives are filled in place by a load; ``load_state_dict`` then takes what cannot be filled.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.state_dict.basic import is_stateful
from localckpt.state_dict.optimizer_states import load_optimizer
from localckpt.state_dict.replicated import Replicated
from localckpt.state_dict.stateful import (
    Freedom,
    freedom_of,
    is_same_tensor,
    load_module,
    plain_names,
)

__all__ = ["RNG", "ModulePart", "OptimizerPart", "RandomPart", "ValuePart", "parts_of"]

RNG = "rng"
"""Key of the states of the random number generators."""
_SHOWN = 10


def parts_of(state: Mapping[str, Any], *, rng: bool) -> dict[str, Any]:
    """Make a part of each value of a training state.

    Args:
        state: Modules, optimizers, anything else with ``state_dict`` and ``load_state_dict``, and
            pairs of a function that gives a value and one that takes it; each may be marked as
            equal on several ranks.
        rng: Whether to add the states of the random number generators.

    Returns:
        The parts by name, marked where the values are.

    Raises:
        CheckpointingException: A value is none of these, or a key is no name.
    """
    parts: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or not key or (rng and key == RNG):
            raise CheckpointingException(
                f"the key {key!r} of the training state must be a name, and not {RNG!r}, under "
                f"which the random number generators are saved (rng=False leaves them out)"
            )
        if isinstance(value, Replicated):
            parts[key] = Replicated(_part_of(key, value.value), value.ranks)
        else:
            parts[key] = _part_of(key, value)
    if not parts:
        raise CheckpointingException("the training state is empty: there is nothing to save")
    if rng:
        # Last, since making and loading the other parts may draw random numbers.
        parts[RNG] = RandomPart()
    return parts


def _part_of(key: str, value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return ModulePart(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerPart(value)
    if is_stateful(value):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(map(callable, value)):
        return ValuePart(*value)
    raise CheckpointingException(
        f"{key!r} of the training state is a {type(value).__name__}, which has no "
        f"state_dict and load_state_dict. Give a plain value as a pair of functions, "
        f"such as {key!r}: (lambda: run.epoch, run.set_epoch)"
    )


class ModulePart:
    """A module, by the names that its values have without DDP and ``torch.compile``.

    Parameters and buffers are given as they are, each rank's own part of them where FSDP or tensor
    parallelism shards them. FSDP1 makes a sharded copy for each save.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = _unwrapped(module)
        self._is_fsdp1 = any(_is_fsdp1(child) for child in self.module.modules())

    @property
    def freedom(self) -> Freedom:
        """Values that are taken as they were saved."""
        return freedom_of(self.module)

    def state_dict(self) -> dict[str, Any]:
        own = self._own_state()
        plain = plain_names(self.module, own)
        if nested := [plain[n] for n, v in own.items() if type(v) is torch.Tensor and v.is_nested]:
            raise CheckpointingException(
                f"torch loads no nested tensors into modules: {', '.join(nested[:_SHOWN])}. Save "
                f"such buffers as a part of their own, a pair of functions"
            )
        return {plain[name]: value for name, value in own.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was loaded; tensors that were filled in place are there already."""
        own, free = self._own_state(), self.freedom
        names = {plain: name for name, plain in plain_names(self.module, own).items()}
        if unknown := sorted(name for name in state.keys() - names.keys() if not free.covers(name)):
            raise MismatchError(
                f"the checkpoint has {len(unknown)} values that {type(self.module).__name__} has "
                f"not: {', '.join(unknown[:_SHOWN])}. Make the module as it was when it was saved"
            )
        loaded = OrderedDict((names.get(name, name), value) for name, value in state.items())
        # A hook needs all that its module saved, and FSDP1's own tensors are copies.
        is_whole = self._is_fsdp1 or any(not name.endswith("_extra_state") for name in free.below)
        if not is_whole:
            loaded = OrderedDict((n, v) for n, v in loaded.items() if not is_same_tensor(v, own[n]))
        if not loaded:
            return
        # The versions of the modules' states, by which hooks see that nothing is to be converted.
        loaded._metadata = getattr(own, "_metadata", None)  # type: ignore[attr-defined]
        with self._sharded():
            load_module(self.module, loaded, strict=is_whole)

    def _own_state(self) -> dict[str, Any]:
        with self._sharded():
            return self.module.state_dict()

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        if not self._is_fsdp1:
            yield
            return
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        with FullyShardedDataParallel.state_dict_type(
            self.module, StateDictType.SHARDED_STATE_DICT
        ):
            yield


class OptimizerPart:
    """An optimizer, whose states keep the dtypes that they are saved in."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_optimizer(self.optimizer, state)


class ValuePart:
    """A plain value.

    Args:
        get: Returns the value.
        take: Takes a value that was loaded.
    """

    def __init__(self, get: Callable[[], Any], take: Callable[[Any], object]) -> None:
        self._get = get
        self._take = take

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._get()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._take(state["value"])


class RandomPart:
    """Random number generators of this process: Python's, numpy's, torch's and those of its GPU."""

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def rewind(self) -> None:
        """Have them go on from what was loaded last, if anything was."""
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside of DDP, DataParallel and ``torch.compile``, in whatever order."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module


def _is_fsdp1(module: torch.nn.Module) -> bool:
    # Its package takes long to import, and no module is of a class that was not imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
