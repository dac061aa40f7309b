"""Plain values of a training loop, as one part of its state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localckpt.errors import CheckpointingException

logger = logging.getLogger(__name__)


class Values:
    """Plain values of a training loop, such as an epoch or the best loss so far, as attributes.

    A part of a ``Checkpointer``'s state in place of a pair of functions for each value::

        run = localckpt.Values(epoch=0, best=math.inf)
        checkpointer = localckpt.Checkpointer({"model": model, "run": run}, local=...)
        ...
        run.best = min(run.best, loss)

    Each value may be any that a checkpoint takes, a tensor too, and may change its class while
    training. Its names are fixed: one that was saved and is not here, or the reverse, is an error
    when the job resumes.

    Args:
        values: The values by name, as a fresh run has them.

    Raises:
        CheckpointingException: A name is that of a method.
    """

    def __init__(self, **values: Any) -> None:
        if taken := sorted(name for name in values if hasattr(type(self), name)):
            raise CheckpointingException(
                f"Values({', '.join(taken)}=...): a method has that name, choose another"
            )
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(
                f"there is no value {name!r} (there are {', '.join(self.__dict__) or 'none'}): "
                f"name each when it is made, Values({name}=...), so that it can be resumed"
            )
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values that are here; with ``partial=True`` others may have been saved."""
        if gone := sorted(state.keys() - vars(self).keys()):
            logger.warning("saved, and no value here has the name: %s", ", ".join(gone))
        if new := sorted(vars(self).keys() - state.keys()):
            logger.warning("not saved, and left as they are: %s", ", ".join(new))
        self.__dict__.update((name, state[name]) for name in vars(self).keys() & state.keys())
