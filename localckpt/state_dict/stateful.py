"""Values of a state that have states of their own: models, optimizers, data loaders.

What has ``state_dict`` and ``load_state_dict`` at the outermost level of a plain dict is saved as
its own state, and takes it when it stands there in the state that is loaded into; as in
torch.distributed.checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["give_states", "is_stateful", "own_states", "stateful_keys"]


def is_stateful(value: Any) -> bool:
    """Return whether a value tells and takes a state of its own."""
    kind = type(value)
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def stateful_keys(state: Any) -> list[Any]:
    """The keys of a dict under which such values stand; empty for anything else."""
    if not isinstance(state, dict):
        return []
    return [key for key, value in state.items() if is_stateful(value)]


def own_states(state: Any) -> Any:
    """The state with the own state of each such value in its place, as a new dict."""
    keys = stateful_keys(state)
    if not keys:
        return state
    return {**state, **{key: state[key].state_dict() for key in keys}}


def give_states(into: Any, loaded: Any) -> Any:
    """Have the values of ``into`` take their states.

    Returns:
        What was loaded, with those values in the places of their states.
    """
    for key in stateful_keys(into):
        if isinstance(loaded, Mapping) and key in loaded:
            into[key].load_state_dict(loaded[key])
            loaded[key] = into[key]  # type: ignore[index]
    return loaded
