"""Position in an epoch of a framework that leaves out batches when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from localckpt.checkpointer.parts import RandomPart

__all__ = ["EpochPosition"]


class EpochPosition:
    """Position in the data: a part of the state, to find the same batches in the same order.

    Batches that were trained on are left out by the framework. Their order is drawn when an epoch
    begins: from a seed, from a generator of the sampler, or from the random number generators.
    """

    def __init__(self) -> None:
        self._random = RandomPart()
        self._samplers: dict[str, Any] = {}
        # States of all generators at the beginning of the epoch to go on in.
        self._entry: dict[str, Any] = {}
        self._is_within_epoch = False
        self._is_resumed = False

    @property
    def is_resumed(self) -> bool:
        """Whether no epoch was entered since a state was loaded."""
        return self._is_resumed

    def enter_epoch(self, loader: Any) -> None:
        """Begin an epoch, or begin the one that was resumed again."""
        self._samplers = _samplers_of(loader)
        if not self._is_resumed:
            self._note_entry()
            return
        self._random.load_state_dict(self._entry["random"])
        for path, seed in self._entry["seeds"].items():
            if path in self._samplers:
                self._samplers[path].initial_seed = seed
        generators = _generators_of(self._samplers)
        for path, state in self._entry["generators"].items():
            if path in generators:
                generators[path].set_state(state)
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
            self._note_entry()

    def state_dict(self) -> dict[str, Any]:
        return {"entry": self._entry, "is_within_epoch": self._is_within_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entry = dict(state["entry"])
        self._is_within_epoch = state["is_within_epoch"]
        self._is_resumed = True

    def _note_entry(self) -> None:
        generators = _generators_of(self._samplers)
        self._entry = {
            "random": self._random.state_dict(),
            "generators": {path: g.get_state() for path, g in generators.items()},
            # Accelerate's sampler draws each epoch from the seed that its process began with.
            "seeds": {
                path: sampler.initial_seed
                for path, sampler in self._samplers.items()
                if isinstance(getattr(sampler, "initial_seed", None), int)
            },
        }


def _samplers_of(loader: Any) -> dict[str, Any]:
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


def _generators_of(samplers: Mapping[str, Any]) -> dict[str, torch.Generator]:
    """Generators that loaders and samplers draw from, by their paths."""
    found: dict[str, torch.Generator] = {}
    for path, thing in samplers.items():
        for name in ("generator", "synchronized_generator"):
            generator = getattr(thing, name, None)
            if isinstance(generator, torch.Generator) and generator not in found.values():
                found[f"{path}.{name}"] = generator
    return found
