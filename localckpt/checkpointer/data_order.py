"""Order of the data of an epoch: the random numbers that it is drawn from.

It is drawn when an epoch begins: from a seed, from a generator of the sampler or the loader, or
from the random number generators of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from localckpt.checkpointer.parts import RandomPart

__all__ = [
    "EpochPosition",
    "entry_of",
    "restore_entry",
    "restore_generators",
    "samplers_of",
    "states_of",
]


class EpochPosition:
    """Position in the data of a framework that leaves out batches itself, as a part of the state.

    With it the framework finds the same batches in the same order.
    """

    def __init__(self) -> None:
        self._samplers: dict[str, Any] = {}
        # States of all generators at the beginning of the epoch to go on in.
        self._entry: dict[str, Any] = {}
        self._is_within_epoch = False
        self._is_resumed = False

    def enter_epoch(self, loader: Any) -> None:
        """Begin an epoch, or begin the one that was resumed again."""
        self._samplers = samplers_of(loader)
        if not self._is_resumed:
            self._entry = entry_of(self._samplers)
            return
        restore_entry(self._samplers, self._entry)
        # At the end of an epoch there is nothing to leave out.
        self._is_resumed = self._is_within_epoch

    def enter_step(self) -> bool:
        """Begin a step; whether it is the first one of an epoch that was resumed within."""
        is_resumed, self._is_resumed = self._is_resumed, False
        return is_resumed

    def end_step(self, *, is_last_of_epoch: bool) -> None:
        """End a step, before it is saved."""
        self._is_within_epoch = not is_last_of_epoch
        if is_last_of_epoch:
            self._entry = entry_of(self._samplers)

    def state_dict(self) -> dict[str, Any]:
        return {"entry": self._entry, "is_within_epoch": self._is_within_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entry = dict(state["entry"])
        self._is_within_epoch = state["is_within_epoch"]
        self._is_resumed = True


def samplers_of(loader: Any) -> dict[str, Any]:
    """A data loader and its samplers, by their paths from the loader."""
    found: dict[str, Any] = {}
    looking, seen = {"loader": loader}, set[int]()
    while looking:
        path, thing = looking.popitem()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        found[path] = thing
        for name in ("sampler", "batch_sampler"):
            if (inner := getattr(thing, name, None)) is not None:
                looking[f"{path}.{name}"] = inner
    return found


def entry_of(samplers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the order of the epoch that begins now is drawn from."""
    return {
        "random": RandomPart().state_dict(),
        "generators": states_of(samplers),
        # Accelerate's sampler draws each epoch from the seed that its process began with.
        "seeds": {
            path: sampler.initial_seed
            for path, sampler in samplers.items()
            if isinstance(getattr(sampler, "initial_seed", None), int)
        },
    }


def restore_entry(samplers: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Have the order of an epoch drawn again from what :func:`entry_of` returned."""
    RandomPart().load_state_dict(entry["random"])
    for path, seed in entry["seeds"].items():
        if path in samplers:
            samplers[path].initial_seed = seed
    restore_generators(samplers, entry["generators"])


def states_of(samplers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of the generators of loaders and samplers, by their paths."""
    return {path: generator.get_state() for path, generator in _generators_of(samplers).items()}


def restore_generators(samplers: Mapping[str, Any], states: Mapping[str, torch.Tensor]) -> None:
    """Have generators go on from the states that :func:`states_of` returned."""
    generators = _generators_of(samplers)
    for path, state in states.items():
        if path in generators:
            generators[path].set_state(state)


def _generators_of(samplers: Mapping[str, Any]) -> dict[str, torch.Generator]:
    """Generators that loaders and samplers draw from, by their paths."""
    found: dict[str, torch.Generator] = {}
    for path, thing in samplers.items():
        for name in ("generator", "synchronized_generator"):
            generator = getattr(thing, name, None)
            if isinstance(generator, torch.Generator) and generator not in found.values():
                found[f"{path}.{name}"] = generator
    return found
