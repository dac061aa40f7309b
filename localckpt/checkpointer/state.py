"""State of a training loop: its parts by name, their checks, and rules for private values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from localckpt.checkpointer.epochs import OF_RANK, Epochs
from localckpt.checkpointer.parts import (
    RNG,
    ModulePart,
    RandomPart,
    ValuePart,
    parts_of,
)
from localckpt.options import PrivateRule
from localckpt.state_dict.names import OURS
from localckpt.state_dict.replica_digests import find_not_finite
from localckpt.state_dict.replicated import without_marker

OnResize = Literal["error", "drop"]


class TrainingState:
    """State of one rank's training loop.

    Attributes:
        parts: Parts by name; always the same dict, which is empty before :meth:`make`.
        rules: Rules for the parts by key prefix, for a load by another number of ranks; always the
            same dict.
    """

    def __init__(
        self,
        given: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        epochs: Epochs,
        *,
        rng: bool,
        private: Mapping[str, PrivateRule],
        drop: bool,
    ) -> None:
        self._make = given if callable(given) else None
        self._epochs = epochs
        self._rng = rng
        self._private = dict(private)
        self._drop = drop
        self.parts: dict[str, Any] = {}
        self.rules: dict[str, PrivateRule] = {}
        self._set({} if callable(given) else parts_of(given, epochs, rng=rng))

    def make(self) -> None:
        """Make parts of what the given function returns, if one was given."""
        if self._make is not None:
            self._set(parts_of(self._make(), self._epochs, rng=self._rng))

    def rewind_random(self) -> None:
        """Set the random number generators to the states that were loaded last, if any were."""
        part = self.parts.get(RNG)
        if isinstance(part, RandomPart):
            part.rewind()

    def _set(self, parts: Mapping[str, Any]) -> None:
        # In place, since managers read the rules, and the check of captured states the parts.
        self.parts.clear()
        self.parts.update(parts)
        self.rules.clear()
        self.rules.update(self._rules_of(parts))

    def _rules_of(self, parts: Mapping[str, Any]) -> dict[str, PrivateRule]:
        unmarked = {key: without_marker(part) for key, part in parts.items()}
        rules: dict[str, PrivateRule] = {}
        if self._drop:
            whole = (ModulePart, torch.optim.Optimizer, Epochs)
            rules |= {k: "drop" for k, part in unmarked.items() if not isinstance(part, whole)}
        # Ranks may have parts of their own.
        rules[OURS] = "keep"
        rules |= dict.fromkeys(OF_RANK, of_one_rank)
        if self._rng:
            rules[RNG] = "keep"
        for key, part in unmarked.items():
            if isinstance(part, ModulePart):
                # Such as the statistics of BatchNorm, which each rank has of its own data.
                rules |= {f"{key}.{name}": of_one_rank for name in part.buffer_names()}
        for key, rule in self._private.items():
            # A pair of functions has a value, which its part has a key for.
            rules[f"{key}.value" if isinstance(unmarked.get(key), ValuePart) else key] = rule
        return rules


def of_one_rank(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """Return one saved rank's value of those that all ranks have."""
    return values[rank % len(values)]


Check = Callable[[Mapping[str, torch.Tensor]], str | None]


def combined_check(parts: Mapping[str, Any], check: Check | None, *, finite: bool) -> Check | None:
    """Return one check of all that is asked for; ``None`` if nothing is.

    With ``finite`` the parameters of all modules must be finite, but not their buffers: a mask is
    made of infinite values.
    """
    if not finite:
        return check

    def check_all(tensors: Mapping[str, torch.Tensor]) -> str | None:
        unmarked = {key: without_marker(part) for key, part in parts.items()}
        modules = {key: part for key, part in unmarked.items() if isinstance(part, ModulePart)}
        prefixes = tuple(f"{key}." for key in modules)
        buffers = {f"{key}.{name}" for key, part in modules.items() for name in part.buffer_names()}
        found = find_not_finite(
            {n: t for n, t in tensors.items() if n.startswith(prefixes) and n not in buffers}
        )
        return found if found is not None or check is None else check(tensors)

    return check_all
