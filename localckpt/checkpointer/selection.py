"""Parts of a training state that are resumed, for a program that has changed since it saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from localckpt.checkpointer.parts import EPOCHS, RNG, ModulePart
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.options import PrivateRule
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.replicated import Replicated, without_marker


@dataclass(slots=True)
class Selection:
    """Arguments of :meth:`Checkpointer.resume`, under their names there; lists are sorted.

    Raises:
        CheckpointingException: An argument makes no sense.
    """

    step: int | None
    only: Collection[str] | None
    skip: Collection[str]
    rename: Mapping[str, str] | None
    partial: bool
    allow_dtype_change: bool

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
        """Texts of the arguments, to compare them with those of other ranks."""
        return {one.name: repr(getattr(self, one.name)) for one in fields(self)}

    @property
    def is_whole(self) -> bool:
        """True if all is to be as it was saved, but for dtypes."""
        return self.only is None and not (self.skip or self.rename or self.partial)

    def by_saved_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by key prefix with the names that parts were saved under."""
        olds = {new: old for old, new in (self.rename or {}).items()}
        found = {}
        for key, value in values.items():
            part = prefix_in(key, olds)
            found[key if part is None else olds[part] + key[len(part) :]] = value
        return found

    def of_parts(
        self,
        parts: Mapping[str, Any],
        private: Mapping[str, PrivateRule],
        given: Collection[str],
    ) -> PartsToLoad:
        """Choose parts of this rank's state."""
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
        return PartsToLoad(
            self,
            self.by_saved_names(chosen),
            self.by_saved_names({**parts, **chosen}),
            self.by_saved_names(private),
            frozenset({*self.skip, *rename} - {*given}),
        )


@dataclass(frozen=True, slots=True)
class PartsToLoad:
    """Parts of one rank's state that a load fills, by the names that they were saved under.

    Attributes:
        named: Names that must be among those that were saved.
        gone: Names of the parts and values that are not loaded.
    """

    selection: Selection
    parts: Mapping[str, Any]
    everything: Mapping[str, Any]
    private: Mapping[str, PrivateRule]
    named: frozenset[str]
    gone: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gone.update(dict.fromkeys(key for key in self.everything if key not in self.parts))

    @property
    def is_empty(self) -> bool:
        """True after a load that has filled no part of those that the program has given."""
        given = {*self.everything} - {EPOCHS, RNG}
        return given <= self.gone.keys() and bool(given)

    def lets_go(self, name: str) -> bool:
        """Return whether a part, or a value of one, may be on one side only; by its saved name."""
        key, selection = prefix_in(name, self.parts), self.selection
        if key is not None:
            is_module = isinstance(without_marker(self.parts[key]), ModulePart)
            may_go = selection.partial and (name == key or is_module)
        else:
            # Saved, and not to be loaded.
            skipped = {*selection.skip, *(self.everything.keys() - self.parts.keys())}
            is_skipped = prefix_in(name, skipped) is not None
            may_go = is_skipped or selection.only is not None or selection.partial
        if may_go and prefix_in(name, self.gone) is None:
            self.gone[name] = None
        return may_go


def _partial(part: Any) -> Any:
    value = without_marker(part)
    if not isinstance(value, ModulePart):
        return part
    partial = ModulePart(value.module, is_partial=True)
    return Replicated(partial, part.ranks) if isinstance(part, Replicated) else partial
