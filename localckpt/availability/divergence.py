"""Divergence of replicas: ranks whose tensors differ though the job keeps them equal.

Pure functions of the ranks' digests. The root first compares one digest for each set of ranks. Only
where those differ does one rank of each kind report the digest of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localckpt.availability.plain import Record
from localckpt.failure_texts import ranks_named, runs_of

# Limits of what is told of a divergence, since every rank of the job reads it.
_MOST_SETS, _MOST_GROUPS, _MOST_NAMED, _MOST_NODES = 16, 8, 20, 8
_SHOWN = 3


class RankSet(tuple[int, ...]):
    """Ranks in order, which JSON has as the first and the last of each run."""

    __slots__ = ()

    def to_json(self) -> list[Any]:
        return [*runs_of(self)]

    @classmethod
    def from_json(cls, runs: Iterable[Sequence[int]]) -> RankSet:
        return cls(rank for first, last in runs for rank in range(first, last + 1))


@dataclass(frozen=True, slots=True)
class Diverged:
    """Ranks that have not all the same in common, by equal digests; ``others`` not told apart."""

    set_id: int
    groups: tuple[RankSet, ...]
    others: RankSet = RankSet()  # noqa: RUF009 - a frozen value

    @property
    def asked(self) -> list[int]:
        """One rank of each group, all of whose ranks have the same."""
        return [group[0] for group in self.groups]

    def may_be_named(self, rank: int) -> bool:
        """Return whether a rank may be among those whose nodes are told."""
        is_in_minority = any(rank in group for group in self.groups[1:])
        # Without a majority, the first ranks of all groups are.
        return is_in_minority or rank in self.groups[0][:_MOST_NODES]


@dataclass(frozen=True, slots=True)
class Difference:
    """Tensor, by its key and place, that differs between ranks which should have it equal.

    The largest of the groups with equal bytes comes first. The minority are ranks outside of it if
    more than half of all have its bytes; else there is none.
    """

    key: str
    groups: tuple[RankSet, ...]
    minority: RankSet


@dataclass(frozen=True, slots=True)
class Divergence(Record):
    """Replicas of one save that differ, up to a limit; no differences while nobody has asked."""

    sets: tuple[Diverged, ...]
    differences: tuple[Difference, ...] = ()
    more_tensors: int = 0
    nodes: tuple[str, ...] = ()

    @property
    def minority(self) -> tuple[int, ...]:
        return tuple(sorted({rank for d in self.differences for rank in d.minority}))

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks in the minority; all ranks that differ, if nobody can tell who is."""
        if self.minority:
            return self.minority
        groups = [d.groups for d in self.differences] or [s.groups for s in self.sets]
        return tuple(sorted({rank for of in groups for group in of for rank in group}))


def compare_replicas(
    reports: Sequence[Iterable[tuple[int, int]]],
    most_sets: int = _MOST_SETS,
    most_groups: int = _MOST_GROUPS,
) -> Divergence | None:
    """Compare the digests of sets of ranks that each reports; ``None`` if none differ."""
    ranks: dict[int, dict[int, list[int]]] = {}
    for rank, report in enumerate(reports):
        for set_id, digest in report:
            ranks.setdefault(set_id, {}).setdefault(digest, []).append(rank)
    found = [
        _diverged(set_id, of.values(), most_groups) for set_id, of in ranks.items() if len(of) > 1
    ]
    if not found:
        return None
    found.sort(key=lambda of: (of.groups, of.set_id))
    return Divergence(tuple(found[:most_sets]))


def _diverged(set_id: int, groups: Iterable[Sequence[int]], most_groups: int) -> Diverged:
    ordered = _largest_first(groups)
    others = sorted(rank for group in ordered[most_groups:] for rank in group)
    return Diverged(set_id, ordered[:most_groups], RankSet(others))


def judge_differences(divergence: Divergence, reports: Sequence[Any]) -> Divergence:
    """Find the tensors that differ, by the digests of each that ranks were asked for.

    Each rank that may be named reports its node, and digests by the number of the set as a text.
    """
    differences: list[Difference] = []
    for of in divergence.sets:
        told: dict[int, Mapping[str, int]] = {
            rank: reports[rank][1].get(str(of.set_id), {}) if reports[rank] else {}
            for rank in of.asked
        }
        keys = sorted({key for digests in told.values() for key in digests})
        count = sum(map(len, of.groups)) + len(of.others)
        for key in keys:
            values: dict[int | None, list[int]] = {}
            for group in of.groups:
                # A rank that lacks the tensor differs from those that have it.
                values.setdefault(told[group[0]].get(key), []).extend(group)
            if len(values) > 1:
                differences.append(_difference(key, values.values(), count))
    found = Divergence(
        divergence.sets,
        tuple(differences[:_MOST_NAMED]),
        max(0, len(differences) - _MOST_NAMED),
    )
    named = (reports[rank] for rank in found.suspects[:_MOST_NODES])
    return replace(found, nodes=tuple(report[0] if report else "?" for report in named))


def _difference(key: str, groups: Iterable[Sequence[int]], count: int) -> Difference:
    ordered = _largest_first(groups)
    is_known = 2 * len(ordered[0]) > count
    minority = sorted(rank for group in ordered[1:] for rank in group) if is_known else []
    return Difference(key, ordered, RankSet(minority))


def describe(divergence: Divergence) -> str:
    parts = [_described(difference) for difference in divergence.differences[:_SHOWN]]
    more = len(divergence.differences) - len(parts) + divergence.more_tensors
    if more:
        parts.append(f"{more} more tensors differ as well")
    if not parts:
        parts = [
            f"what {' and '.join(map(ranks_named, of.groups))} have in common differs"
            for of in divergence.sets[:_SHOWN]
        ]
    whose = "In the minority" if divergence.minority else "It cannot be told which are right"
    pairs = zip(divergence.suspects, divergence.nodes, strict=False)
    at = ", ".join(f"rank {rank} on {node}" for rank, node in pairs)
    left = len(divergence.suspects) - len(divergence.nodes)
    more_ranks = f" and {left} more" if left and at else ""
    return f"{'; '.join(parts)}. {whose}: {at or ranks_named(divergence.suspects)}{more_ranks}"


def _described(difference: Difference) -> str:
    if difference.minority:
        return f"{difference.key!r} of {ranks_named(difference.minority)} is not that of the others"
    groups = " and ".join(map(ranks_named, difference.groups[:_SHOWN]))
    return f"{difference.key!r} differs between {groups}"


def _largest_first(groups: Iterable[Sequence[int]]) -> tuple[RankSet, ...]:
    return tuple(sorted((RankSet(sorted(group)) for group in groups), key=lambda g: (-len(g), g)))
