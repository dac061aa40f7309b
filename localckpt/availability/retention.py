"""Retention on both tiers: the checkpoints that stay when a newer one is complete.

Pure functions of plain data. On the nodes all ranks decide by them; on shared storage the first
rank does, and the command line tells by them why a checkpoint is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite, isnan, nan
from typing import Any, Literal, SupportsFloat, TypeAlias, TypeVar, get_args

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.ids import Checkpoint
from localckpt.lineage import Lineage
from localckpt.trust import LONGEST_METRIC

CandidateT = TypeVar("CandidateT")

Mode = Literal["min", "max"]
Metrics: TypeAlias = Mapping[str, SupportsFloat]
"""Numbers by name that are given with a save, such as a loss."""

Version: TypeAlias = tuple[int, int]
"""Epoch and iteration of a checkpoint; a greater one is newer."""

Reason = Literal[
    "all", "newest", "resumed from", "pinned", "last", "every", "best", "ahead", "left behind"
]
"""Why a checkpoint is kept. ``all``: no rule was given. ``ahead``: a job that did not go back from
it has not passed it. ``left behind``: the job went back from it, and has saved few others."""


@dataclass(frozen=True, slots=True)
class Best:
    """Rule that keeps the checkpoints with the best values of a metric.

    Args:
        metric: Name of the metric, as it is given with saves.
        mode: Whether the least value is the best (``"min"``), or the greatest (``"max"``).
        count: Number of checkpoints that it keeps. Of equal values the newer one is better.

    Raises:
        CheckpointingException: An argument makes no sense.
    """

    metric: str
    mode: Mode = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise CheckpointingException(
                f"Best({self.metric!r}): name the metric as it is given with saves, such as 'loss'"
            )
        if self.mode not in get_args(Mode):
            raise CheckpointingException(f"Best(mode={self.mode!r}): it must be 'min' or 'max'")
        _require_count("Best", "count", self.count)

    def value(self, metrics: Metrics | None) -> float | None:
        """Return the metric's value among those of a save; ``None`` if it is none, or NaN."""
        value = plain_metrics(metrics, self.metric).get(self.metric, nan)
        return None if isnan(value) else value

    def of(self, newest_first: Mapping[CandidateT, Mapping[str, float]]) -> list[CandidateT]:
        """Return the best of checkpoints with metrics, the best one first; NaN is never best."""
        sign = 1.0 if self.mode == "min" else -1.0
        values = {c: sign * metrics.get(self.metric, nan) for c, metrics in newest_first.items()}
        # The sort keeps the order of equal values.
        return sorted((c for c in values if not isnan(values[c])), key=values.__getitem__)[
            : self.count
        ]


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules by which checkpoints are kept; one stays while any rule keeps it.

    On shared storage all stay without a rule, and the newest checkpoint, the one that the job
    resumed from, and those that are pinned stay in any case. The nodes need ``last``.

    Args:
        last: Number of the newest checkpoints that are kept.
        every: Number of iterations of which one checkpoint is kept: the last one at or before each
            multiple of it. Their number has no bound, so the nodes refuse it.
        best: Keeps those with the best values of a metric.

    Raises:
        CheckpointingException: An argument makes no sense.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            if getattr(self, name) is not None:
                _require_count("Retention", name, getattr(self, name))
        if self.best is not None and not isinstance(self.best, Best):
            raise CheckpointingException(
                f"Retention(best={self.best!r}): give the metric as Best('loss', mode='min')"
            )

    @property
    def keeps_all(self) -> bool:
        """True if no rule was given."""
        return self == Retention()

    @property
    def most(self) -> int:
        """Number of checkpoints that ``last`` and ``best`` keep at most."""
        return (self.last or 0) + (0 if self.best is None else self.best.count)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the commit record."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> Retention:
        """Read what :meth:`to_json` gave; raises CheckpointingException for anything else."""
        try:
            best = fields["best"]
            return cls(fields["last"], fields["every"], None if best is None else Best(**best))
        except (TypeError, LookupError) as error:
            raise MismatchError(f"{fields!r:.80} is no retention: {error}") from error


@dataclass(frozen=True, slots=True)
class Candidate:
    version: Version
    metrics: Mapping[str, float]
    is_pinned: bool


def reasons_to_keep(
    retention: Retention,
    candidates: Iterable[Candidate],
    saved: Version,
    resumed_from: Version | None,
) -> dict[Version, tuple[Reason, ...]]:
    """Decide which checkpoints stay, and why, now that one (``saved``) is complete.

    What the job went back from, and what is ahead of a job that did not go back from it, is not
    counted by any rule, so it pushes out nothing. ``resumed_from`` is ``None`` if the job did not
    resume from shared storage.
    """
    newest_first = sorted(candidates, key=lambda candidate: candidate.version, reverse=True)
    earlier = [c.version for c in newest_first if c.version[0] < saved[0]]
    left_behind = {v for v in earlier if resumed_from is not None and v > resumed_from}
    ahead = {v for v in earlier if v[1] > saved[1]} - left_behind
    counted = [c for c in newest_first if c.version not in left_behind | ahead]
    kept: dict[Version, list[Reason]] = {c.version: [] for c in newest_first}

    def keep(versions: Iterable[Version], reason: Reason) -> None:
        for version in versions:
            kept[version].append(reason)

    keep(kept.keys() & {saved}, "newest")
    keep(kept.keys() & {resumed_from}, "resumed from")
    keep((c.version for c in newest_first if c.is_pinned), "pinned")
    if retention.keeps_all:
        keep(kept, "all")
    else:
        keep((c.version for c in counted[: retention.last or 0]), "last")
        keep(_last_of_spans(counted, retention.every), "every")
        if retention.best is not None:
            keep(retention.best.of({c.version: c.metrics for c in counted}), "best")
        keep(ahead, "ahead")
        # As long as few others are there, they may be wanted.
        keep(left_behind if len(counted) < (retention.last or 1) else (), "left behind")
    return {version: tuple(reasons) for version, reasons in kept.items() if reasons}


def _last_of_spans(newest_first: Iterable[Candidate], every: int | None) -> list[Version]:
    """The newest checkpoint of each span of iterations that ends at a multiple of ``every``."""
    if every is None:
        return []
    last: dict[int, Version] = {}
    for candidate in newest_first:
        span = max(1, -(-candidate.version[1] // every))
        last.setdefault(span, candidate.version)
    return list(last.values())


def rules(keep_last: int | None, retention: Retention | None, prefix: str = "") -> Retention:
    """Return the rules that two arguments, whose names have a prefix, give together."""
    if keep_last is not None and retention is not None:
        raise CheckpointingException(
            f"give {prefix}keep_last= or {prefix}retention=, not both: "
            f"{prefix}retention=Retention(last={keep_last}, ...) has all rules"
        )
    if keep_last is not None and keep_last < 1:
        raise CheckpointingException(f"{prefix}keep_last is {keep_last}; it must be at least 1")
    if not isinstance(retention, Retention | None):
        raise CheckpointingException(
            f"{prefix}retention={retention!r:.80}: give the rules as Retention(last=2, ...)"
        )
    return retention or Retention(last=keep_last)


def node_rules(keep_last: int | None, retention: Retention | None, default: int = 2) -> Retention:
    """Return the rules that two arguments give together for the nodes, if these can follow them."""
    given = rules(default if keep_last is None and retention is None else keep_last, retention)
    if given.last is None:
        raise CheckpointingException(
            f"retention={given} is for the nodes, which need last=, at least 1: a restart loads "
            f"the newest checkpoint, and an older one if that is damaged"
        )
    if given.every is not None:
        raise CheckpointingException(
            f"retention={given} is for the nodes, where every= would fill them: the number of "
            f"checkpoints that it keeps has no bound. Give it to shared storage, "
            f"which has room for them"
        )
    if given.best is not None and len(given.best.metric) > LONGEST_METRIC:
        raise CheckpointingException(
            f"the name of the metric {given.best.metric!r:.80} has {len(given.best.metric)} "
            f"characters, and the nodes note at most {LONGEST_METRIC}: give a shorter one"
        )
    return given


def plain_metrics(metrics: Metrics | None, only: str | None = None) -> dict[str, float]:
    """Return the metrics of a save, or ``only`` one, as numbers; raises CheckpointingException."""
    if not isinstance(metrics, Mapping | None):
        raise CheckpointingException(
            f"metrics is a {type(metrics).__name__}: give numbers by name, as {{'loss': 0.5}}. "
            f"Nothing was saved"
        )
    plain = {}
    for name, value in (metrics or {}).items():
        if only is not None and name != only:
            continue
        if not isinstance(name, str) or not name:
            raise CheckpointingException(f"the metric {name!r} has no name: give a text")
        try:
            plain[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointingException(
                f"the metric {name!r} is a {type(value).__name__}, and must be a number: {error}. "
                f"Nothing was saved"
            ) from error
    return plain


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no NaN and no infinity: they are texts."""
    return {name: value if isfinite(value) else str(value) for name, value in metrics.items()}


def metrics_from_json(fields: Any) -> dict[str, float]:
    """Read what :func:`metrics_to_json` gave; raises MismatchError for anything else."""
    texts = ("nan", "inf", "-inf")
    if not isinstance(fields, dict) or not all(
        type(value) in (int, float) or value in texts for value in fields.values()
    ):
        raise MismatchError(f"{fields!r:.80} are no metrics")
    try:
        return {str(name): float(value) for name, value in fields.items()}
    except OverflowError as error:
        raise MismatchError(f"{fields!r:.80} are no metrics: {error}") from error


def _require_count(what: str, name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise CheckpointingException(f"{what}({name}={value!r}): it must be a whole number above 0")


@dataclass(frozen=True, slots=True)
class Retirement:
    """Rule for what to prune: up to an iteration, given up, or of ``also``; never of ``but``."""

    up_to: int
    lineage: Lineage | None
    but: frozenset[Checkpoint]
    also: frozenset[Checkpoint] = frozenset()

    def takes(self, checkpoint: Checkpoint) -> bool:
        epoch, iteration = checkpoint.generation.epoch_id, checkpoint.iteration
        given_up = self.lineage is not None and self.lineage.gives_up(epoch, iteration)
        is_over = iteration <= self.up_to or given_up
        return checkpoint in self.also or (checkpoint not in self.but and is_over)
