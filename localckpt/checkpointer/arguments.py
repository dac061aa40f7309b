"""Arguments of a :class:`Checkpointer`: their checks, made before it makes anything, and advice.

What its errors advise are its own methods and arguments.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from localckpt.availability.retention import node_rules, rules
from localckpt.checkpointer.cadence import Every
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.state_dict.targets import FIT
from localckpt.storage.names import local_path, shared_path
from localckpt.threads import raise_if_aborted

F = TypeVar("F", bound=Callable[..., Any])


def absolute_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the paths among a checkpointer's options absolute, for whoever makes it later."""
    names = "local", "shared", "stop_file", "iteration_file"
    paths = [name for name in names if options.get(name) is not None]
    # A URL that only shared storage may have is refused by whoever takes it for a path.
    return {**options, **{name: shared_path(options[name]) for name in paths}}


def as_cadence(name: str, every: object) -> Every:
    """Return a cadence, of which a number is one in steps; raises CheckpointingException."""
    if isinstance(every, Every):
        return every
    if isinstance(every, int) and not isinstance(every, bool):
        return Every(steps=every)
    raise CheckpointingException(
        f"{name}={every!r} is no cadence: give a number of steps, or Every(steps=...), "
        f"Every(minutes=...), Every(overhead=...) or Every(mtbf_hours=...)"
    )


def check_timeout(timeout_s: float) -> None:
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < inf:
        raise CheckpointingException(
            f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0"
        )


def judge_arguments(told_by: Sequence[Mapping[str, str]]) -> None:
    lines = []
    for name, first in told_by[0].items():
        other = next((rank for rank, told in enumerate(told_by) if told[name] != first), None)
        if other is not None:
            lines.append(f"{name} is {first} on rank 0 and {told_by[other][name]} on rank {other}")
    if lines:
        raise MismatchError(
            f"the ranks were given different arguments: {'; '.join(lines)}. Give all ranks the "
            f"same. Nothing was done"
        )


def judge_last_steps(told_by: Sequence[Sequence[Any]]) -> list[Any]:
    """Judge after which step the ranks end.

    ``told_by`` has of each rank whether a call of it has failed, its step or ``None``, and whether
    a save of it lacks on the nodes, and on shared storage. Returns the ranks of which a call
    failed, in words; the step, and whether a save lacks.
    """
    if failed := [rank for rank, (has_failed, *_) in enumerate(told_by) if has_failed]:
        return [ranks_named(failed), None, False, False]
    steps = [step for _, step, *_ in told_by]
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        raise MismatchError(
            f"the ranks end after different steps: rank 0 after {_named(steps[0])}, rank {other} "
            f"after {_named(steps[other])}, so the last one is not saved. Checkpoints saved before "
            f"are as they were. Call step() on every rank in each step"
        )
    return ["", steps[0], *(any(lacks) for lacks in list(zip(*told_by, strict=True))[2:])]


def _named(step: int | None) -> str:
    return "no step" if step is None else f"step {step}"


# Arguments that all ranks give alike, and those that all give, or none does.
_ALIKE = (
    *("session_id", "every", "shared_every", "memory", "keep_last", "retention"),
    *("replication_factor", "rng", "on_resize", "on_error", "max_failures", "max_attempts"),
    *("finite", "check_replicas", "divide_replicated", "on_divergence", "timeout_s"),
    *("save_last", "read_only"),
)
_ALL_OR_NONE = ("local", "shared", "check")


def texts_of(given: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: repr(given[name]) for name in _ALIKE}
    texts |= {name: repr(given[name] is not None) for name in _ALL_OR_NONE}
    return texts | {"private": repr(sorted(given["private"] or {}))}


def check_arguments(given: Mapping[str, Any]) -> None:
    local, shared, factor = given["local"], given["shared"], given["replication_factor"]
    if local is None and not given["memory"]:
        raise CheckpointingException(
            "give local=, a directory on a disk of each node, or memory=True to keep checkpoints "
            "in the nodes' memory"
        )
    if factor is not None and given["repl_strategy"] is not None:
        raise CheckpointingException("give replication_factor= or repl_strategy=, not both")
    if factor is not None and factor < 1:
        raise CheckpointingException(
            f"replication_factor is {factor}: it counts the node itself, and must be 1 (no copies) "
            f"or more"
        )
    for name, choices in (("on_error", ("warn", "raise")), ("on_resize", ("error", "drop"))):
        if given[name] not in choices:
            raise CheckpointingException(
                f"{name} is {given[name]!r}; it must be {' or '.join(map(repr, choices))}"
            )
    if given["max_failures"] < 1:
        raise CheckpointingException(f"max_failures is {given['max_failures']}; it must be above 0")
    if local is not None and shared is not None:
        nodes, common = local_path(local).resolve(), shared_path(shared)
        if not isinstance(common, str) and common.resolve().is_relative_to(nodes):
            raise CheckpointingException(
                f"shared={str(shared)!r} is in local={str(local)!r}, or the same: local is a "
                f"directory on a disk of each node, which is lost with it, and shared one that all "
                f"nodes reach. Give two directories"
            )
    rules(given["shared_keep_last"], given["shared_retention"], "shared_")
    node_rules(given["keep_last"], given["retention"])
    as_cadence("every", given["every"])
    shared_every = as_cadence("shared_every", given["shared_every"])
    if shared_every.steps is None and shared_every.minutes is None:
        raise CheckpointingException(
            "shared_every takes steps or minutes: the cost that is measured is that of the nodes"
        )
    _check_stopping(given)
    # A module can be called as well.
    state = given["state"]
    is_one_part = isinstance(state, torch.nn.Module | torch.optim.Optimizer)
    if is_one_part or not (isinstance(state, Mapping) or callable(state)):
        raise CheckpointingException(
            f"the training state is a {type(state).__name__}: give a dict of parts by name, such "
            f"as {{'model': model, 'optimizer': optimizer}}, or a function that returns one"
        )


def _check_stopping(given: Mapping[str, Any]) -> None:
    stop_signals, stop_file, grace_s = given["stop_signals"], given["stop_file"], given["grace_s"]
    if not isinstance(stop_signals, Iterable):
        raise CheckpointingException(
            f"stop_signals is {stop_signals!r}; give a list of signals, such as [signal.SIGTERM]"
        )
    for number in stop_signals:
        if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
            raise CheckpointingException(
                f"stop_signals has {number!r}, which no process can catch: leave it out"
            )
    if stop_file is not None and not isinstance(stop_file, str | os.PathLike):
        raise CheckpointingException(f"stop_file is {stop_file!r}; give the path of a file")
    if grace_s is not None and not (isinstance(grace_s, int | float) and 0 <= grace_s < inf):
        raise CheckpointingException(
            f"grace_s is {grace_s!r}; it must be a number of seconds, or None for timeout_s"
        )
    events = given["events"]
    if events is not None and not isinstance(events, Iterable):
        raise CheckpointingException(f"events is {events!r}; give a list of sinks, or ()")


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


def worded(
    error: CheckpointingException, call: str, options: Mapping[str, Any] = MappingProxyType({})
) -> CheckpointingException:
    if error.topic == "slow":
        error.advice = _SLOW.replace("{call}", call)
    elif error.topic == "resize":
        error.advice = _RESIZE
    if error.topic == "fit" or FIT in error.text:
        ways = [
            "go on without some (skip=[...] or only=[...])",
            "find one under its older name (rename={'old': 'new'})",
        ]
        if not options.get("partial"):
            ways.append("let values go that a module has not or that were not saved (partial=True)")
        if not options.get("allow_dtype_change"):
            ways.append("convert dtypes (allow_dtype_change=True)")
        advice = "Make the parts as they were, under the same names; or let resume() "
        advice += ", ".join([*ways[:-2], " or ".join(ways[-2:])])
        error.args = (error.text.replace(FIT, advice),)
        error.advice = advice if error.topic == "fit" else error.advice
    return error


def in_own_words(method: F) -> F:
    call = "Checkpointer" if method.__name__ == "__init__" else method.__name__

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if call in ("Checkpointer", "close", "rejoin"):
            inside: AbstractContextManager[None] = nullcontext()
        else:
            self._check_usable(also_closed=True)
            inside = self._abort
        try:
            with inside:
                raise_if_aborted()
                return method(self, *args, **kwargs)
        except CheckpointingException as error:
            worded(error, call, kwargs)
            if call in _SAVING:
                self._has_failed = True
            raise
        except Exception:
            raise
        except BaseException:
            # Nobody knows how far the call was, and other ranks may wait for it.
            self._interrupted = call
            raise

    return called  # type: ignore[return-value]
