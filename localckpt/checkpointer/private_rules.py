"""Rules for values that differ between ranks, where another number of ranks loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localckpt.checkpointer.parts import RNG, ModulePart, OptimizerPart, ValuePart
from localckpt.options import PrivateRule
from localckpt.state_dict.replicated import without_marker

__all__ = ["rules_of"]


def rules_of(
    parts: Mapping[str, Any], private: Mapping[str, PrivateRule], *, drop: bool, rng: bool
) -> dict[str, PrivateRule]:
    """Return the rules for the parts of a state, by key prefix.

    Args:
        parts: Parts of the state, by key.
        private: The caller's rules, which overrule the others.
        drop: Whether to drop what differs in parts that are no modules or optimizers.
        rng: Whether the random number generators are among the parts.
    """
    whole = (ModulePart, OptimizerPart)
    unmarked = {key: without_marker(part) for key, part in parts.items()}
    dropped = [key for key, part in unmarked.items() if not isinstance(part, whole)]
    rules: dict[str, PrivateRule] = {}
    rules |= dict.fromkeys(dropped if drop else (), "drop")
    if rng:
        rules[RNG] = "keep"
    for key, part in unmarked.items():
        if isinstance(part, ModulePart):
            # Such as the statistics of BatchNorm, which each rank has of its own data.
            buffers = (f"{key}.{name}" for name, _ in part.module.named_buffers())
            rules |= dict.fromkeys(buffers, _of_a_rank)
    for key, rule in private.items():
        # A pair of functions has a value, which its part has a key for.
        rules[f"{key}.value" if isinstance(unmarked.get(key), ValuePart) else key] = rule
    return rules


def _of_a_rank(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """A value that every rank has, as one of the ranks that saved it had it."""
    return values[rank % len(values)]
