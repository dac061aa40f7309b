"""Comparison of the parts of a training state with those that were saved: pure functions.

Whether tensors fit is found where they are filled. Here it is what has no tensors: the names of the
parts, their classes, and the parameter groups of optimizers. All that does not fit is one error.
The nodes compare names of values by themselves, so what they are to compare besides is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from localckpt.checkpointer.parts import OURS
from localckpt.checkpointer.values import Values
from localckpt.checkpointer.words import fit
from localckpt.errors import MismatchError
from localckpt.failure_texts import said_by
from localckpt.state_dict.names import ABOUT, CLASS, KEYS, ORDER, Names

__all__ = [
    "VALUES",
    "is_torchs",
    "judge_fits",
    "paired_groups",
    "why_groups_differ",
    "why_other_class",
    "why_parts_are_others",
    "why_parts_differ",
]

VALUES = f"part {Values.__module__}.{Values.__qualname__}"
"""Kind of the parts whose names are all that is to be resumed."""
_SHOWN = 8
_UNNAMED = "one of no module"


def why_parts_differ(saved: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Compare the parts of a state with those that were saved.

    Args:
        saved, given: Kinds of the parts, such as ``"module my.Net"``, by name.
    """
    lines = [f"{key} ({saved[key]}): saved, not given" for key in saved if key not in given]
    lines += [f"{key} ({given[key]}): given, not saved" for key in given if key not in saved]
    lines += [
        f"{key}: saved as {saved[key]}, given as {given[key]}"
        for key in saved
        if key in given and _sort(saved[key]) != _sort(given[key])
    ]
    return lines


def why_other_class(
    key: str, saved: str, given: str, saved_keys: Sequence[str], given_keys: Sequence[str]
) -> list[str]:
    """Compare the class of a part that is no module, and the names of :class:`Values`.

    A class that was renamed is taken if its state has the keys that were saved. Classes of torch
    are not renamed, and one may take the state of another one for its own.

    Args:
        key: Name of the part.
        saved, given: Kinds of the part.
        saved_keys, given_keys: Keys of its state.
    """
    if saved == given:
        is_other = given == VALUES and set(saved_keys) != set(given_keys)
        return [f"{key}: its values are others{_other_keys('', saved_keys, given_keys)}"] * is_other
    if set(saved_keys) == set(given_keys) and not (is_torchs(saved) and is_torchs(given)):
        return []
    return [
        f"{key}: saved as {saved}, given as {given}{_other_keys('keys', saved_keys, given_keys)}"
    ]


def why_parts_are_others(saved: Names, given: Names, *, is_partial: bool) -> dict[str, list[str]]:
    """Compare what :func:`described` says of parts on the nodes; by the name of each what differs.

    Classes are compared by the rules of :func:`why_other_class`. Groups of one of torch's
    optimizers must have the keys that were saved; optimizers of another class may add keys while
    they train. The parameters of an optimizer must be in the order that they were saved in.

    Args:
        saved, given: Names of the states.
        is_partial: Whether values may have been saved, or are given, alone.
    """
    if ABOUT not in (saved.get(OURS) or {}):
        why = (
            "it was saved by another object than a Checkpointer: load it with that one, as "
            "resume(Elsewhere(step, load=...)) does"
        )
        return {OURS: [why]}
    about = [names[OURS][ABOUT] for names in (saved, given)]
    found = {}
    for key in about[0].keys() & about[1].keys() & saved.keys() & given.keys():
        # Several if ranks have different ones.
        before, now = (" or ".join(sorted(of_parts[key][CLASS])) for of_parts in about)
        is_module = before == now == "module"
        keys = [[] if is_module else _keys(names[key]) for names in (saved, given)]
        lines, groups = [], [[*(names[key] or {})] for names in (saved, given)]
        if _sort(before) != _sort(now):
            lines = [f"{key}: saved as {before}, given as {now}"]
        elif before != now or (before == VALUES and not is_partial):
            lines = why_other_class(key, before, now, *keys)
        if ORDER in about[0][key] and ORDER in about[1][key]:
            lines += _why_other_order(key, *({*of_parts[key][ORDER]} for of_parts in about))
            if not lines and set(groups[0]) != set(groups[1]):
                how = _other_keys("", *groups)
                lines = [f"{key}: its param_groups divide the parameters otherwise{how}"]
            elif not lines and is_torchs(before) and set(keys[0]) != set(keys[1]):
                lines = [f"{key} ({before}): param_groups differ{_other_keys('', *keys)}"]
        if lines:
            found[key] = lines
    return dict(sorted(found.items()))


def _why_other_order(key: str, saved: set[str], given: set[str]) -> list[str]:
    """Compare the names of an optimizer's parameters, of which ranks may have different ones."""
    if saved == given:
        return []
    names = [
        sorted({name or _UNNAMED for order in orders for name in order.split("\n")})
        for orders in (saved, given)
    ]
    if names[0] != names[1]:
        return [f"{key}: its parameters are others{_other_keys('', *names)}"]
    before, now = (
        min(one - other or one).split("\n") for one, other in ((saved, given), (given, saved))
    )
    moved = [
        f"number {number} was {was or _UNNAMED}, and is {is_now or _UNNAMED}"
        for number, (was, is_now) in enumerate(zip_longest(before, now, fillvalue="none"))
        if was != is_now
    ]
    return [f"{key}: its parameters are in another order ({', '.join(_cut(moved))})"]


def _keys(names: Names | None) -> list[str]:
    """Return the keys of a part's state, or of the groups of an optimizer."""
    if names is None or KEYS in names:
        return sorted((names or {}).get(KEYS, ()))
    groups = ((group.partition(" ")[0], below) for group, below in names.items())
    return sorted(f"{group}.{key}" for group, below in groups for key in below)


def is_torchs(kind: str) -> bool:
    """Return whether a kind of a part is a class of torch."""
    return kind.partition(" ")[2].startswith("torch.")


def why_groups_differ(
    key: str,
    saved: Sequence[Mapping[str, Any]],
    given: Sequence[Mapping[str, Any]],
    kinds: tuple[str, str],
) -> list[str]:
    """Compare the parameter groups of an optimizer, whose ``params`` are names.

    Optimizers that are not torch's may add keys to their groups while they train, so a new one of
    the same class need not have these.

    Args:
        key: Name of the optimizer.
        saved, given: The groups. They may be in another order, and so may their parameters.
        kinds: Kinds of the optimizer that was saved, and of the one that is given.
    """
    about = f"{key} (saved as {kinds[0]}, given as {kinds[1]})"
    names = [{name for group in groups for name in group["params"]} for groups in (saved, given)]
    if names[0] != names[1]:
        return [f"{about}: its parameters are others{_other_keys('', *map(sorted, names))}"]
    pairs = paired_groups(saved, given)
    if len(pairs) != len(saved) or len(pairs) != len(given):
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, given)]
        differ = f"saved with {sizes[0]} parameters, given with {sizes[1]}"
        return [f"{about}: its param_groups divide the parameters otherwise: {differ}"]
    lines = []
    for group, own in pairs:
        may_lack = kinds[0] == kinds[1] and not is_torchs(kinds[0])
        if own.keys() - group.keys() or (group.keys() - own.keys() and not may_lack):
            what = f"param_groups[{saved.index(group)}]"
            lines.append(f"{about}: {what} differs{_other_keys('', list(group), list(own))}")
    return lines


def paired_groups(
    saved: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pair saved and given parameter groups of the same parameters, in the order of the given.

    Groups that have none are paired in their order.
    """
    left = list(saved)
    pairs = []
    for own in given:
        params = frozenset(own["params"])
        number = next((n for n, group in enumerate(left) if params == {*group["params"]}), None)
        if number is not None:
            pairs.append((left.pop(number), own))
    return pairs


def judge_fits(fits: Sequence[Mapping[str, Any]]) -> None:
    """Judge what all ranks have found.

    Args:
        fits: Of each rank, its parts by name (``given``), those that the checkpoint has
            (``saved``), those that this rank has saved and lacks now (``lost``), values that were
            saved and that it does not give (``lacking``), and what does not fit (``lines``).

    Raises:
        MismatchError: Something does not fit; it has all that is wrong, on all ranks.
    """
    given = {key: kind for fit in fits for key, kind in fit["given"].items()}
    lines = why_parts_differ(fits[0]["saved"], given)
    lines += [
        f"{key}: rank {rank} has saved it, and has none now"
        for rank, fit in enumerate(fits)
        for key in fit["lost"]
        if key in given
    ]
    nobody_gives = set(fits[0]["lacking"]).intersection(*(fit["lacking"] for fit in fits))
    lines += [f"{name}: saved, not given" for name in fits[0]["lacking"] if name in nobody_gives]
    of_ranks = {
        rank: "; ".join(_cut(fit["lines"])) for rank, fit in enumerate(fits) if fit["lines"]
    }
    if len(set(of_ranks.values())) == 1 and len(of_ranks) == len(fits):
        lines += _cut(fits[0]["lines"])
    elif of_ranks:
        lines.append(said_by(of_ranks))
    if lines:
        raise MismatchError(
            f"the state is not as it was saved: {'; '.join(_cut(lines))}. Nothing was changed"
        ).advised("fit", fit())


def _cut(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"and {more} more"] if more > 0 else list(lines)


def _sort(kind: str) -> str:
    """First word of a kind: module, optimizer, or other."""
    return kind.partition(" ")[0]


def _other_keys(what: str, saved: Sequence[str], given: Sequence[str]) -> str:
    sides = (
        ("saved, not given", [key for key in saved if key not in given]),
        ("given, not saved", [key for key in given if key not in saved]),
    )
    listed = [f"{side}: {', '.join(_cut(keys))}" for side, keys in sides if keys]
    return f" ({' '.join([what, '; '.join(listed)]).strip()})" if listed else ""
