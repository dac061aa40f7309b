"""Words of the front door: what its errors advise are its own methods and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from localckpt.errors import CheckpointingException
from localckpt.interrupted import was_interrupted

P = ParamSpec("P")
T = TypeVar("T")

_SLOW = (
    "If the ranks are alive but slow, give the Checkpointer a longer timeout_s; else restart the "
    "job. Is {call}() called on every rank?"
)
_RESIZE = (
    "Resume with as many ranks; or leave what differs as it is made, with on_resize='drop' or, by "
    "name, private={'loader': 'drop'}, where 'keep' gives each rank that of its number, and a "
    "function of the saved values makes each rank's; or mark a part that counts the samples that "
    "all ranks have seen by localckpt.replicated()"
)
_SAVING = ("step", "save", "wait_until_finished")


def fit(*, is_partial: bool = False, converts: bool = False) -> str:
    """Advice on the topic ``fit``, on a state that is not as it was saved."""
    ways = [
        "go on without some (skip=[...] or only=[...])",
        "find one under its older name (rename={'old': 'new'})",
    ]
    if not is_partial:
        ways.append("let values go that a module has not or that were not saved (partial=True)")
    if not converts:
        ways.append("convert dtypes (allow_dtype_change=True)")
    *others, last = ways
    return (
        f"Make the parts as they were, under the same names; or let resume() {', '.join(others)}, "
        f"or {last}"
    )


def worded(
    error: CheckpointingException, call: str, options: Mapping[str, Any] = MappingProxyType({})
) -> CheckpointingException:
    if error.topic == "slow":
        error.advice = _SLOW.replace("{call}", call)
    elif error.topic == "resize":
        error.advice = _RESIZE
    elif error.topic == "fit":
        error.advice = fit(
            is_partial=bool(options.get("partial")),
            converts=bool(options.get("allow_dtype_change")),
        )
    return error


def in_own_words(method: Callable[P, T]) -> Callable[P, T]:
    call = "Checkpointer" if method.__name__ == "__init__" else method.__name__

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        checkpointer: Any = args[0]
        interrupted = getattr(checkpointer, "_interrupted", "")
        if interrupted and call != "close":
            raise was_interrupted("Checkpointer", interrupted)
        try:
            return method(*args, **kwargs)
        except CheckpointingException as error:
            worded(error, call, kwargs)
            if call in _SAVING:
                checkpointer._has_failed = True
            raise
        except Exception:
            raise
        except BaseException:
            # Nobody knows how far the call was, and other ranks may wait for it.
            checkpointer._interrupted = call
            raise

    return called
