"""Comparison of the parts of a training state with those that were saved: pure functions.

Whether tensors fit is found where they are filled. Here it is what has no tensors: the names of the
parts, their classes, and the parameter groups of optimizers. All that does not fit is one error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from localckpt.checkpointer.values import Values
from localckpt.state_dict.names import ABOUT, CLASS, KEYS, MODULE, ORDER, OURS, Names

VALUES = f"part {Values.__module__}.{Values.__qualname__}"
"""Kind of the parts whose names are all that is to be resumed."""
_SHOWN = 8
_UNNAMED = "one of no module"


def _why_other_class(
    key: str, saved: str, given: str, saved_keys: Sequence[str], given_keys: Sequence[str]
) -> list[str]:
    """Compare the class of a part that is no module, and the names of :class:`Values`.

    A class that was renamed is taken if its state has the keys that were saved. Classes of torch
    are not renamed, and one may take the state of another one for its own.
    """
    if saved == given:
        is_other = given == VALUES and set(saved_keys) != set(given_keys)
        return [f"{key}: its values are others{_other_keys('', saved_keys, given_keys)}"] * is_other
    if set(saved_keys) == set(given_keys) and not (_is_torchs(saved) and _is_torchs(given)):
        return []
    return [
        f"{key}: saved as {saved}, given as {given}{_other_keys('keys', saved_keys, given_keys)}"
    ]


def why_parts_are_others(saved: Names, given: Names, *, is_partial: bool) -> dict[str, list[str]]:
    """Compare what :func:`described` says of parts; by the name of each what differs.

    Groups of one of torch's optimizers must have the keys that were saved; optimizers of another
    class may add keys while they train. The parameters of an optimizer must be in the order that
    they were saved in.
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
        is_module = before == now == MODULE
        keys = [[] if is_module else _keys(names[key]) for names in (saved, given)]
        lines, more = [], {*keys[1]} - {*keys[0]}
        groups = [[*(names[key] or {})] for names in (saved, given)]
        if _sort(before) != _sort(now):
            lines = [f"{key}: saved as {before}, given as {now}"]
        elif before != now or (before == VALUES and not is_partial):
            lines = _why_other_class(key, before, now, *keys)
        if ORDER in about[0][key] and ORDER in about[1][key]:
            lines += _why_other_order(key, *({*of_parts[key][ORDER]} for of_parts in about))
            if not lines and set(groups[0]) != set(groups[1]):
                how = _other_keys("", *groups)
                lines = [f"{key}: its param_groups divide the parameters otherwise{how}"]
            elif not lines and ({*keys[1]} ^ {*keys[0]} if _is_torchs(before) else more):
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


def _is_torchs(kind: str) -> bool:
    """Return whether a kind of a part is a class of torch."""
    return kind.partition(" ")[2].startswith("torch.")


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
