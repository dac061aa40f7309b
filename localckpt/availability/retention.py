"""Retention on both tiers: the checkpoints that stay when a newer one is complete.

Pure functions of plain data: :func:`reasons_to_keep` decides for both. On the nodes all ranks call
it, by :func:`retire`; on shared storage the first rank does, and the command line, to tell why a
checkpoint is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite, isnan, nan
from typing import Any, Literal, SupportsFloat, TypeAlias, TypeVar, get_args

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.ids import Checkpoint
from localckpt.lineage import Lineage
from localckpt.trust import LONGEST_METRIC, Mark

CandidateT = TypeVar("CandidateT")

Mode = Literal["min", "max"]
Metrics: TypeAlias = Mapping[str, SupportsFloat]
"""Numbers by name that are given with a save, such as a loss."""

Version: TypeAlias = tuple[int, int]
"""Epoch and iteration of a checkpoint; a greater one is newer."""

Reason = (
    Literal["all", "newest", "resumed from", "pinned", "last", "every", "best"]
    | Literal["ahead", "left behind", "redundant", "good", "last resort"]
)
"""Why a checkpoint is kept. ``all``: no rule was given. ``ahead``: a job that did not go back from
it has not passed it. ``left behind``: the job went back from it, and has saved few others. On the
nodes also the newest that is ``redundant`` (survives the loss of any node) or marked ``good``, and
as the ``last resort`` the newest that is marked bad, if it is newer than all others."""


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
    """Complete checkpoint; the mark and the redundancy are known of those on the nodes."""

    version: Version
    metrics: Mapping[str, float]
    is_pinned: bool = False
    mark: Mark | None = None
    is_redundant: bool = False


def reasons_to_keep(
    retention: Retention,
    candidates: Iterable[Candidate],
    saved: Version | None = None,
    resumed_from: Version | None = None,
) -> dict[Version, tuple[Reason, ...]]:
    """Decide which checkpoints stay, and why, now that one (``saved``) is complete.

    What the job went back from, what is ahead of a job that did not go back from it, and what is
    marked bad is not counted by any rule, so it pushes out nothing. ``resumed_from`` is ``None`` if
    the job did not resume from shared storage; ``saved`` is so for the nodes, of whose candidates
    none is ahead.
    """
    newest_first = sorted(candidates, key=lambda candidate: candidate.version, reverse=True)
    earlier = [c.version for c in newest_first if saved is not None and c.version[0] < saved[0]]
    left_behind = {v for v in earlier if resumed_from is not None and v > resumed_from}
    ahead = {v for v in earlier if saved is not None and v[1] > saved[1]} - left_behind
    others = [c for c in newest_first if c.version not in left_behind | ahead]
    counted = [c for c in others if c.mark != "bad"]
    newest = max((c.version[1] for c in counted), default=-1)
    newer_bad = [c for c in others if c.mark == "bad" and c.version[1] > newest]
    by_rule: dict[Reason, set[Version | None]] = {
        "newest": {saved},
        "resumed from": {resumed_from},
        "pinned": {c.version for c in newest_first if c.is_pinned},
    }
    if retention.keeps_all:
        by_rule["all"] = {c.version for c in newest_first}
    else:
        metrics = {c.version: c.metrics for c in counted}
        by_rule |= {
            "last": {c.version for c in counted[: retention.last or 0]},
            "redundant": {c.version for c in [c for c in counted if c.is_redundant][:1]},
            "good": {c.version for c in [c for c in counted if c.mark == "good"][:1]},
            "last resort": {c.version for c in newer_bad[:1]},
            "every": {*_last_of_spans(counted, retention.every)},
            "best": set() if retention.best is None else {*retention.best.of(metrics)},
            "ahead": {*ahead},
            # As long as few others are there, they may be wanted.
            "left behind": {*left_behind} if len(counted) < (retention.last or 1) else set(),
        }
    kept: dict[Version, tuple[Reason, ...]] = {
        c.version: tuple(reason for reason, those in by_rule.items() if c.version in those)
        for c in newest_first
    }
    return {version: reasons for version, reasons in kept.items() if reasons}


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
    but: frozenset[Checkpoint] = frozenset()
    also: frozenset[Checkpoint] = frozenset()

    def gives_up(self, checkpoint: Checkpoint) -> bool:
        epoch = checkpoint.generation.epoch_id
        return self.lineage is not None and self.lineage.gives_up(epoch, checkpoint.iteration)

    def takes(self, checkpoint: Checkpoint) -> bool:
        is_over = checkpoint.iteration <= self.up_to or self.gives_up(checkpoint)
        return checkpoint in self.also or (checkpoint not in self.but and is_over)


def retire(
    retention: Retention,
    passed: Mapping[Checkpoint, Candidate],
    lineage: Lineage | None,
    held: Iterable[Checkpoint],
) -> Retirement | None:
    """Decide what nodes prune of checkpoints that the job has passed, and that nobody holds.

    Returns ``None`` if nothing may go, as long as there are fewer than ``last`` that are not bad.
    """
    kept = reasons_to_keep(retention, passed.values())
    last = [c.iteration for c, of in passed.items() if "last" in kept.get(of.version, ())]
    but = frozenset((*(c for c, of in passed.items() if of.version in kept), *held))
    also = frozenset(c for c, of in passed.items() if of.mark == "bad") - but
    if len(last) == retention.last:
        return Retirement(min(last), lineage, but, also)
    return Retirement(-1, None, but, also) if also else None
