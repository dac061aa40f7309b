"""Options of a manager's saves, from the arguments of its constructor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from localckpt.availability.retention import Retention
from localckpt.errors import CheckpointingException

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from localckpt.events.stream import EventStream

__all__ = ["OnBusy", "OnDivergence", "PrivateRule", "SaveOptions"]

OnBusy = Literal["wait", "skip"]
"""Action of an asynchronous save when older ones still use all staging buffers."""

PrivateRule = Literal["drop", "keep"] | Callable[[list[Any], int, int], Any]
"""Rule for a value that differs between the ranks that saved it, where another number loads it.

``"drop"``: every rank keeps what it has; ``"keep"``: each rank gets that of its own number, and
ranks beyond keep what they have; a function ``f(values, rank, world_size)`` makes each rank's."""

OnDivergence = Literal["error", "warn"]
"""Action when tensors differ that the ranks of a job keep equal."""


@dataclass(frozen=True)
class SaveOptions:
    """Options of one manager, documented at the managers' constructors.

    Raises:
        CheckpointingException: An option has an impossible value.
    """

    timeout: float = 300.0
    process_group: dist.ProcessGroup | None = None
    safe_globals: Iterable[Any] = ()
    background: bool | None = None
    strict: bool = False
    retention: Retention = Retention(last=2)  # noqa: RUF009 - a frozen value
    num_buffers: int = 2
    staging_threads: int | None = None
    on_busy: OnBusy = "wait"
    guard: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    read_only: bool = False
    events: EventStream | None = None
    max_attempts: int | None = None
    check: Callable[[Mapping[str, torch.Tensor]], str | None] | None = None
    elastic: bool = False
    private: Mapping[str, PrivateRule] | None = None
    check_replicas: int | None = None
    on_divergence: OnDivergence = "error"
    divide_replicated: bool = False

    def __post_init__(self) -> None:
        for name in ("num_buffers", "staging_threads", "max_attempts"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise CheckpointingException(f"{name} is {number}; it must be at least 1")
        if self.on_busy not in get_args(OnBusy):
            raise CheckpointingException(
                f"on_busy is {self.on_busy!r}; it can be one of "
                f"{', '.join(map(repr, get_args(OnBusy)))}"
            )
        for key, rule in self.rules.items():
            if not isinstance(key, str) or not key:
                raise CheckpointingException(
                    f"private= has a rule for {key!r}; a rule is for the value at a key of the "
                    f"state, as 'rng' or 'data.position', and there is none for all of it"
                )
            if not (rule in ("drop", "keep") or callable(rule)):
                raise CheckpointingException(
                    f"the rule for {key!r} in private= is {rule!r}; it can be 'drop', 'keep', or a "
                    f"function of the saved values, the rank and the number of ranks"
                )
        if self.private and not self.elastic:
            raise CheckpointingException(
                "private= says what another number of ranks loads: give elastic=True with it"
            )
        # Python's True is an int.
        every = self.check_replicas
        if every is not None and (type(every) is not int or every < 1):
            raise CheckpointingException(
                f"check_replicas is {every!r}; it is a number of saves, at least 1: every save of "
                f"that number compares replicas"
            )
        if self.on_divergence not in get_args(OnDivergence):
            raise CheckpointingException(
                f"on_divergence is {self.on_divergence!r}; it can be 'error' or 'warn'"
            )
        if self.read_only and self.max_attempts is not None:
            raise CheckpointingException(
                "max_attempts counts the starts of a job that trains; a manager with "
                "read_only=True notes nothing: leave it out"
            )
        if self.timeout <= 0:
            raise CheckpointingException(f"timeout is {self.timeout} s; it must be above 0")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> SaveOptions:
        """Pick the options from the ``locals()`` of a constructor."""
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.name in arguments})

    @property
    def rules(self) -> Mapping[str, PrivateRule]:
        """Rules of the ``private`` option."""
        return self.private or {}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the ``guard`` option, as a list."""
        return list(self.guard) if isinstance(self.guard, Iterable) else [self.guard]
