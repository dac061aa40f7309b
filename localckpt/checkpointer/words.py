"""Words of the front door: what its errors advise are its own methods and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from localckpt.errors import CheckpointingException

__all__ = ["FIT", "in_own_words", "worded"]

P = ParamSpec("P")
T = TypeVar("T")

FIT = (
    "Make the parts as they were, under the same names; or let resume() go on without some "
    "(skip=[...] or only=[...]), find one under its older name (rename={'old': 'new'}), let values "
    "go that a module has not or that were not saved (partial=True), or convert dtypes "
    "(allow_dtype_change=True)"
)
"""Advice on the topic ``fit``, on a state that is not as it was saved."""

_ADVICE = {
    "fit": FIT,
    "resize": "Resume with as many ranks; or leave what differs as it is made, with "
    "on_resize='drop' or, by name, private={'loader': 'drop'}, where 'keep' gives each rank that "
    "of its number, and a function of the saved values makes each rank's; or mark a part that "
    "counts the samples that all ranks have seen by localckpt.replicated()",
    "slow": "If the ranks are alive but slow, give the Checkpointer a longer timeout_s; else "
    "restart the job. Is {call}() called on every rank?",
}
_SAVING = ("step", "save", "wait_until_finished")


def worded(error: CheckpointingException, call: str) -> CheckpointingException:
    """Return an error with the advice of the front door, of which ``call`` is a method."""
    if error.topic in _ADVICE:
        error.advice = _ADVICE[error.topic].replace("{call}", call)
    return error


def in_own_words(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of the front door."""
    call = "Checkpointer" if method.__name__ == "__init__" else method.__name__

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except CheckpointingException as error:
            worded(error, call)
            if call in _SAVING:
                setattr(args[0], "_has_failed", True)  # noqa: B010 - of any class
            raise

    return called
