"""Parts of a training state that are resumed, for a program that has changed since it saved.

Whether tensors fit is found where they are filled. Here it is what has no tensors: the names of the
parts, their classes, and the parameter groups of optimizers. All that does not fit is one error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from localckpt.checkpointer.parts import EPOCHS, RNG, ModulePart, Values
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.options import PrivateRule
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.names import ABOUT, CLASS, KEYS, MODULE, ORDER, OURS, Names
from localckpt.state_dict.replicated import Replicated, without_marker

VALUES = f"part {Values.__module__}.{Values.__qualname__}"
"""Kind of the parts whose names are all that is to be resumed."""
_SHOWN = 8
_UNNAMED = "one of no module"


@dataclass(slots=True)
class Selection:
    """Arguments of :meth:`Checkpointer.resume`, and what is loaded by them once it is chosen.

    Parts, values and rules have the names that they were saved under. ``everything`` has the parts
    that are not loaded, too; ``named`` must be among those that were saved; ``gone`` are parts and
    values that are not loaded.
    """

    step: int | None
    only: Collection[str] | None
    skip: Collection[str]
    rename: Mapping[str, str] | None
    partial: bool
    allow_dtype_change: bool
    parts: Mapping[str, Any] = field(init=False)
    everything: Mapping[str, Any] = field(init=False)
    private: Mapping[str, PrivateRule] = field(init=False)
    named: frozenset[str] = field(init=False)
    gone: dict[str, None] = field(init=False)

    def __post_init__(self) -> None:
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise CheckpointingException(
                f"step={self.step!r}: give the number of a step that was saved, which is not "
                f"negative"
            )
        for name, given in (("only", self.only), ("skip", self.skip)):
            if isinstance(given, str) or not all(isinstance(key, str) for key in given or ()):
                raise CheckpointingException(
                    f"{name}={given!r}: give a list of names of parts, as {name}=['model']"
                )
        if self.only is not None and not self.only:
            raise CheckpointingException("only= names no part: give the names of those to load")
        if self.only is not None and self.skip:
            raise CheckpointingException("give only= or skip=, not both")
        rename = {} if self.rename is None else self.rename
        names = (*rename.keys(), *rename.values()) if isinstance(rename, Mapping) else (rename,)
        are_texts = all(isinstance(name, str) for name in names)
        if not are_texts or len({*rename.values()}) < len(rename):
            raise CheckpointingException(
                f"rename={rename!r}: give the name of each part now by the name that it was saved "
                f"under, as rename={{'net': 'model'}}"
            )
        self.only = None if self.only is None else sorted({*self.only})
        self.skip, self.rename = sorted({*self.skip}), dict(sorted(rename.items()))

    @property
    def texts(self) -> dict[str, str]:
        return {one.name: repr(getattr(self, one.name)) for one in fields(self) if one.init}

    @property
    def is_whole(self) -> bool:
        """True if all is to be as it was saved, but for dtypes."""
        return self.only is None and not (self.skip or self.rename or self.partial)

    def choose(
        self,
        parts: Mapping[str, Any],
        private: Mapping[str, PrivateRule],
        given: Collection[str],
    ) -> None:
        """Choose parts of this rank's state; ``given`` has the names of those of all ranks."""
        rename = self.rename or {}
        for name, keys in (("only", self.only or ()), ("rename", rename.values())):
            if unknown := sorted({*keys} - {*given}):
                raise MismatchError(
                    f"{name}= has {', '.join(map(repr, unknown))}, and no part of the training "
                    f"state is called so: there are {', '.join(sorted(given))}. Nothing was changed"
                )
        chosen = {
            key: _partial(part) if self.partial else part
            for key, part in parts.items()
            if (self.only is None or key in self.only) and key not in self.skip
        }
        self.parts = self._by_saved_names(chosen)
        self.everything = self._by_saved_names({**parts, **chosen})
        self.private = self._by_saved_names(private)
        self.named = frozenset({*self.skip, *rename} - {*given})
        self.gone = dict.fromkeys(key for key in self.everything if key not in self.parts)

    def _by_saved_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        olds = {new: old for old, new in (self.rename or {}).items()}
        found = {}
        for key, value in values.items():
            part = prefix_in(key, olds)
            found[key if part is None else olds[part] + key[len(part) :]] = value
        return found

    @property
    def is_empty(self) -> bool:
        """True after a load that has filled no part of those that the program has given."""
        given = {*self.everything} - {EPOCHS, RNG}
        return given <= self.gone.keys() and bool(given)

    def lets_go(self, name: str) -> bool:
        """Return whether a part, or a value of one, may be on one side only; by its saved name."""
        if (key := prefix_in(name, self.parts)) is not None:
            is_module = isinstance(without_marker(self.parts[key]), ModulePart)
            may_go = self.partial and (name == key or is_module)
        else:
            # Saved, and not to be loaded.
            skipped = {*self.skip, *(self.everything.keys() - self.parts.keys())}
            is_skipped = prefix_in(name, skipped) is not None
            may_go = is_skipped or self.only is not None or self.partial
        if may_go and prefix_in(name, self.gone) is None:
            self.gone[name] = None
        return may_go


def _partial(part: Any) -> Any:
    value = without_marker(part)
    if not isinstance(value, ModulePart):
        return part
    partial = ModulePart(value.module, is_partial=True)
    return Replicated(partial, part.ranks) if isinstance(part, Replicated) else partial


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
    return kind.partition(" ")[2].startswith("torch.")


def _cut(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"and {more} more"] if more > 0 else list(lines)


def _sort(kind: str) -> str:
    return kind.partition(" ")[0]


def _other_keys(what: str, saved: Sequence[str], given: Sequence[str]) -> str:
    sides = (
        ("saved, not given", [key for key in saved if key not in given]),
        ("given, not saved", [key for key in given if key not in saved]),
    )
    listed = [f"{side}: {', '.join(_cut(keys))}" for side, keys in sides if keys]
    return f" ({' '.join([what, '; '.join(listed)]).strip()})" if listed else ""
