"""Options of managers: their names, defaults, texts and checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from localckpt.availability.retention import Retention, node_rules, rules
from localckpt.errors import CheckpointingException

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from localckpt.events.stream import EventStream

OnBusy = Literal["wait", "skip"]
"""Action of an asynchronous save when older ones still use all staging buffers."""

PrivateRule = Literal["drop", "keep"] | Callable[[list[Any], int, int], Any]
"""Rule for a value that differs between the ranks that saved it, where another number loads it.

``"drop"``: every rank keeps what it has; ``"keep"``: each rank gets that of its own number, and
ranks beyond keep what they have; a function ``f(values, rank, world_size)`` makes each rank's."""

OnDivergence = Literal["error", "warn"]
"""Action when tensors differ that the ranks of a job keep equal."""


class _CommonOptions(TypedDict, total=False):
    timeout: float
    timeout_s: float
    process_group: dist.ProcessGroup | None
    safe_globals: Iterable[Any]
    events: EventStream | None


class HookOptions(_CommonOptions, total=False):
    """Options of a manager with hooks of its own; see :class:`Options`."""

    iteration_file: str | os.PathLike[str] | None
    background: bool | None
    strict: bool
    check_replicas: int | None
    on_divergence: OnDivergence


class SharedOptions(_CommonOptions, total=False):
    """Options that a manager of shared storage has as well; see :class:`Options`."""

    keep_last: int | None
    retention: Retention | None
    staging_threads: int | None
    read_only: bool
    max_attempts: int | None


class StoreOptions(HookOptions, SharedOptions, total=False):
    """Options of the managers on disk and in memory; see :class:`Options`."""

    num_buffers: int
    on_busy: OnBusy
    guard: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    check: Callable[[Mapping[str, torch.Tensor]], str | None] | None
    elastic: bool
    private: Mapping[str, PrivateRule] | None
    divide_replicated: bool
    staging_limit: int | None


@dataclass(frozen=True)
class Options:
    """Options of a manager, which takes them as keyword arguments.

    ``keep_last=n`` is short for ``retention=Retention(last=n)``.

    Attributes:
        timeout: Deadline of every wait, in seconds; by default 300, and 1800 on shared storage,
            where it is how much longer than the fastest rank the slowest one may take to write.
            Managers take it as ``timeout_s``, too.
        process_group: The ranks of the job; ``None`` for all.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults.
        background: Whether replicas are made while training goes on. By default they are, unless
            GPUs send the bytes.
        strict: Whether a save fails when a peer is lost that was to keep a replica. Else it stands
            with fewer copies: a warning, ``degraded_saves`` and :meth:`status` say so.
        events: Stream that is told what happens here; it stays the caller's to close. ``None`` for
            none.
        check_replicas: Compare, in every save of so many, what the state says is equal on several
            ranks: by :func:`localckpt.replicated`, as a ``DTensor`` that is replicated, or in
            Megatron-Core. Digests of the captured tensors are computed behind training and compared
            when the save is finalized. After a difference every save compares, until there is none.
            ``None`` to compare nothing.
        on_divergence: Whether a difference is an ``"error"``, with which the save is rolled back on
            all ranks, or a ``"warn"``-ing, with which the checkpoint is marked bad as by ``check``
            (where the storage is not a user's own).
        retention: Rules by which complete checkpoints are kept. On the nodes: ``last``, at least 1,
            by default 2 on disk and 1 in memory, with room for one more for each save under way,
            and ``best``, by a metric that is given with saves. On shared storage any, by default
            all are kept; the newest one, the one that the job resumed from, and pinned ones
            always are.
        num_buffers: Number of saves that can be under way at once.
        staging_threads: Threads that copy tensors; by default this rank's share of the cores, at
            most 4.
        on_busy: What an asynchronous save does when that many are under way: ``"wait"`` for the
            oldest, or ``"skip"`` itself on all ranks (logged, counted, and noted in ``last_save``).
        guard: Optimizers whose parameters and state, where they are on a GPU, change in their
            ``step`` only. ``save`` returns while those are still being copied, and the next step
            begins after the copies. Replicas in the foreground wait for them; whoever changes these
            tensors in another way calls :meth:`wait_staged` before.
        read_only: Only load, beside a job that may be saving in this session: nothing is made,
            renamed, removed or claimed here.
        max_attempts: Number of starts of the job that may resume from a checkpoint, begin a save or
            call :meth:`count_attempt`, and end before a later one is complete (on shared storage
            beside the nodes: before :meth:`note_progress`), in a row. Then it is quarantined, or
            passed over on shared storage, and an older one is taken. ``None`` to count none.
        check: Judges each captured state behind training, on each rank: it is given the rank's
            tensors by name, in the memory that is about to be written, and returns why they are
            bad, or ``None``. It may neither change nor keep them. A checkpoint that is bad on any
            rank is marked so, with a warning, and is loaded only if there is no other. A check
            that raises fails the save.
        elastic: Whether a checkpoint is loaded, too, that another number of ranks saved, or whose
            tensors were sharded otherwise: each tensor of ``load(into=)`` is filled from the parts
            of it that the nodes hold.
        private: With ``elastic``, by key prefix, what becomes of values that differ between the
            ranks that saved them: ``"drop"`` leaves each rank what it has, ``"keep"`` gives each
            what the rank of its number had, and a function ``f(values, rank, world_size)`` of the
            values of all ranks that saved makes each rank's. All ranks give the same.
        divide_replicated: Whether the ranks of a node divide what the state says is equal on them,
            by :func:`localckpt.replicated` or as a ``DTensor``: each copies, hashes, writes and
            sends a part of these tensors, and a load puts them together. Tensors below 64 KiB
            stay whole on every rank. A tensor that is not equal, though the state says so, comes
            back as a mixture of the ranks' values. A save that compares replicas divides nothing;
            ``check`` is given what its rank saves. All ranks give the same.
        staging_limit: Most bytes of host memory that the saves of a rank take, replicas of other
            ranks included. Images that do not fit are staged in pieces: ``save`` returns when the
            disk has taken all but so many bytes. By default they are where the node has no memory
            for one buffer of each image. For checkpoints on disk.
        iteration_file: File for the number of the newest complete iteration that is not bad, which
            NVRx's launcher reads (``--ft-checkpoint-iteration-file``). The first rank of each node
            replaces it when a save is finalized. Its folder is there; a failure is a warning.

    Raises:
        CheckpointingException: An option has an impossible value.
        TypeError: There is no such option.
    """

    timeout: float = 300.0
    process_group: dist.ProcessGroup | None = None
    safe_globals: Iterable[Any] = ()
    background: bool | None = None
    strict: bool = False
    events: EventStream | None = None
    check_replicas: int | None = None
    on_divergence: OnDivergence = "error"
    retention: Retention = Retention(last=2)  # noqa: RUF009 - a frozen value
    num_buffers: int = 2
    staging_threads: int | None = None
    on_busy: OnBusy = "wait"
    guard: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    read_only: bool = False
    max_attempts: int | None = None
    check: Callable[[Mapping[str, torch.Tensor]], str | None] | None = None
    elastic: bool = False
    private: Mapping[str, PrivateRule] | None = None
    divide_replicated: bool = False
    staging_limit: int | None = None
    iteration_file: str | os.PathLike[str] | None = None

    @classmethod
    def of_hooks(cls, given: Mapping[str, Any]) -> Options:
        return cls(**_known(given, HookOptions.__optional_keys__))

    @classmethod
    def of_store(cls, given: Mapping[str, Any], keep_last: int) -> Options:
        given = _known(given, StoreOptions.__optional_keys__)
        kept = node_rules(given.get("keep_last"), given.get("retention"), keep_last)
        return cls(**_without_rules(given), retention=kept)

    @classmethod
    def of_shared(cls, given: Mapping[str, Any]) -> Options:
        """Make the options of a manager of shared storage, which is slower and keeps all."""
        given = _known(given, SharedOptions.__optional_keys__)
        kept = rules(given.get("keep_last"), given.get("retention"))
        return cls(**{"timeout": 1800.0} | _without_rules(given), retention=kept)

    def __post_init__(self) -> None:
        for name in ("num_buffers", "staging_threads", "max_attempts", "staging_limit"):
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
        file = self.iteration_file
        if file is not None and not isinstance(file, str | os.PathLike):
            raise CheckpointingException(f"iteration_file is {file!r}; give the path of a file")
        if self.timeout <= 0:
            raise CheckpointingException(f"timeout is {self.timeout} s; it must be above 0")

    @property
    def rules(self) -> Mapping[str, PrivateRule]:
        return self.private or {}

    @property
    def needs_whole_images(self) -> bool:
        """Whether captured states are looked at in memory, before they are written."""
        return self.check is not None or self.check_replicas is not None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.guard) if isinstance(self.guard, Iterable) else [self.guard]


def _known(given: Mapping[str, Any], known: frozenset[str]) -> Mapping[str, Any]:
    """Return the options under their names; raises TypeError for others, or one given twice."""
    if unknown := sorted(given.keys() - known):
        raise TypeError(
            f"no such option: {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    if {"timeout", "timeout_s"} <= given.keys():
        raise TypeError("timeout= and timeout_s= are one option: give one of them")
    return {"timeout" if name == "timeout_s" else name: value for name, value in given.items()}


def _without_rules(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in ("keep_last", "retention")}
