"""Values that belong to no global tensor, compared between the ranks that saved them.

On both tiers, what all saved equal is given to every rank. A rule says what becomes of others,
and of a rank's place in the data. Digests are compared by the keys at the top of a state: sections.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from localckpt.errors import MismatchError
from localckpt.state_dict.containers import prefix_in

_SHOWN = 10
_ADVICE = (
    "Say what becomes of each with private=, as in private={{key}: 'drop'}; or mark what is equal, "
    "or counts the samples that all ranks have seen, by localckpt.replicated()"
)
# Ranks that tell their keys where a section differs: enough to name what differs.
_MOST_TELLERS = 64


@dataclass(frozen=True, slots=True)
class RuledValues:
    """Values that a rule is for: those that all ranks saved equal, with a rank that tells each."""

    equal: Mapping[str, int]
    unequal: Sequence[str]


def judge_rules(rules: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raise MismatchError unless all ranks have the same pairs of key prefix and kind of rule."""
    for rank, those in enumerate(rules):
        if list(map(list, those)) != list(map(list, rules[0])):
            raise MismatchError(
                f"the ranks of this job have different rules in private=: rank 0 has {rules[0]}, "
                f"and rank {rank} has {those}. Give the same on all ranks; nothing was changed"
            )


def judge_values(
    ruled: Mapping[int, Mapping[str, str]],
    is_kept: Callable[[str], bool],
    places: Container[str] = (),
) -> RuledValues:
    """Divide values that a rule is for into equal and unequal ones, by the digests of each rank.

    If the rule for a key keeps each rank's own (``is_kept``), what one rank alone has saved is then
    that rank's; else it counts as equal. ``places`` are key prefixes of places in the data, which
    never count as equal.
    """
    digests: dict[str, list[str]] = {}
    tellers: dict[str, int] = {}
    for shard, of_shard in ruled.items():
        for key, digest in of_shard.items():
            digests.setdefault(key, []).append(digest)
            tellers.setdefault(key, shard)
    unequal = {
        key
        for key, those in digests.items()
        if len(set(those)) > 1
        or len(those) < len(ruled)
        or (len(ruled) == 1 and is_kept(key))
        or prefix_in(key, places) is not None
    }
    equal = {key: shard for key, shard in tellers.items() if key not in unequal}
    return RuledValues(equal, sorted(unequal))


def tellers_of(sections: Mapping[int, Mapping[str, str]]) -> dict[int, list[str]]:
    """Choose which ranks tell which sections, by their digests: one for each different one."""
    known: dict[str, dict[str, int]] = {}
    tellers: dict[int, list[str]] = {}
    for shard, of_shard in sections.items():
        for section, digest in of_shard.items():
            different = known.setdefault(section, {})
            if digest not in different and len(different) < _MOST_TELLERS:
                different[digest] = shard
                tellers.setdefault(shard, []).append(section)
    return tellers


def judge_tables(
    about: str,
    tables: Mapping[int, Mapping[str, str]],
    sections: Mapping[int, Mapping[str, str]],
    places: Container[str] = (),
) -> None:
    """Raise MismatchError for values without a rule that differ, or are places in the data."""
    digests: dict[str, str] = {}
    unequal: dict[str, None] = {}
    for of_shard in tables.values():
        for key, digest in of_shard.items():
            if digests.setdefault(key, digest) != digest:
                unequal[key] = None
    kinds: dict[str, set[str]] = {}
    for of_shard in sections.values():
        for section, digest in of_shard.items():
            kinds.setdefault(section, set()).add(digest)
    if not unequal:
        # More sections differ than were told.
        unequal = {section: None for section, those in kinds.items() if len(those) > _MOST_TELLERS}
    kept = {k: None for of in tables.values() for k in of if prefix_in(k, places) is not None}
    texts = []
    if differing := [key for key in unequal if key not in kept]:
        texts.append(f"the values of {_named(differing)} differ between the ranks that saved them")
    if kept:
        texts.append(
            f"{_named(list(kept))} is a place in the data as one of the ranks that saved it counts "
            f"it, by which another number of ranks would skip or repeat data"
        )
    if texts:
        first = next(iter([*differing, *kept]))
        raise MismatchError(
            f"{about}, and this job has another number, or shards its tensors otherwise: "
            f"{'; and '.join(texts)}. Nothing was changed"
        ).advised("resize", _ADVICE.replace("{key}", repr(first)))


def _named(keys: Sequence[str]) -> str:
    more = f", and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more
