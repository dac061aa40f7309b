"""Options of a manager's saves, from the arguments of its constructor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from localckpt.errors import CheckpointingException

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from localckpt.events.stream import EventStream

__all__ = ["OnBusy", "SaveOptions"]

OnBusy = Literal["wait", "skip", "error"]
"""Action of an asynchronous save when older ones still use all staging buffers."""


@dataclass(frozen=True)
class SaveOptions:
    """Options of one manager, documented at the managers' constructors.

    Raises:
        CheckpointingException: An option has an impossible value.
    """

    timeout: float = 300.0
    process_group: dist.ProcessGroup | None = None
    async_worker: Literal["thread", "process"] = "thread"
    safe_globals: Iterable[Any] = ()
    background: bool | None = None
    strict: bool = False
    keep_last: int = 2
    num_buffers: int = 2
    staging_threads: int | None = None
    on_busy: OnBusy = "wait"
    guard: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    read_only: bool = False
    events: EventStream | None = None
    max_attempts: int | None = None
    check: Callable[[Mapping[str, torch.Tensor]], str | None] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "num_buffers", "staging_threads", "max_attempts"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise CheckpointingException(f"{name} is {number}; it must be at least 1")
        if self.on_busy not in get_args(OnBusy):
            raise CheckpointingException(
                f"on_busy is {self.on_busy!r}; it can be one of "
                f"{', '.join(map(repr, get_args(OnBusy)))}"
            )
        if self.by_process and self.optimizers:
            raise CheckpointingException(
                "guard works with async_worker='thread' only: another process cannot wait for "
                "copies of this one's GPU"
            )
        if self.async_worker not in ("thread", "process"):
            raise CheckpointingException(
                f"async_worker is {self.async_worker!r}; it can be 'thread' or 'process'"
            )
        if self.by_process and self.check is not None:
            raise CheckpointingException(
                "check works with async_worker='thread' only: another process does not have the "
                "captured tensors"
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
    def by_process(self) -> bool:
        """True if another process writes this rank's shard."""
        return self.async_worker == "process"

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the ``guard`` option, as a list."""
        return list(self.guard) if isinstance(self.guard, Iterable) else [self.guard]
