"""Parts of a training state that are resumed, for a program that has changed since it saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from localckpt.checkpointer.parts import EPOCHS, RNG, ModulePart
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.options import PrivateRule
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.replicated import Replicated, without_marker

__all__ = ["PartsToLoad", "Selection"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Arguments of ``Checkpointer.resume``: the checkpoint, and how what was saved may differ.

    Attributes:
        step: Step of the checkpoint; ``None`` for the newest.
        only: Names of the parts to load; ``None`` for all.
        skip: Names of parts that stay as they are, or were saved and are let go.
        rename: By the name that a part was saved under, its name now.
        is_partial: Whether a part, or a value of a module, may be saved or given alone.
        converts: Whether values are converted to the dtypes of the tensors that they fill.
    """

    step: int | None = None
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    rename: Mapping[str, str] = field(default_factory=dict)
    is_partial: bool = False
    converts: bool = False

    @classmethod
    def of(
        cls,
        step: int | None,
        only: Collection[str] | None,
        skip: Collection[str],
        rename: Mapping[str, str] | None,
        *,
        is_partial: bool,
        converts: bool,
    ) -> Selection:
        """Check the arguments of a caller; raises CheckpointingException."""
        if step is not None and (type(step) is not int or step < 0):
            raise CheckpointingException(
                f"step={step!r}: give the number of a step that was saved, which is not negative"
            )
        for name, given in (("only", only), ("skip", skip)):
            if isinstance(given, str) or not all(isinstance(key, str) for key in given or ()):
                raise CheckpointingException(
                    f"{name}={given!r}: give a list of names of parts, as {name}=['model']"
                )
        if only is not None and not only:
            raise CheckpointingException("only= names no part: give the names of those to load")
        if only is not None and skip:
            raise CheckpointingException("give only= or skip=, not both")
        rename = {} if rename is None else rename
        names = (*rename.keys(), *rename.values()) if isinstance(rename, Mapping) else (rename,)
        are_texts = all(isinstance(name, str) for name in names)
        if not are_texts or len({*rename.values()}) < len(rename):
            raise CheckpointingException(
                f"rename={rename!r}: give the name of each part now by the name that it was saved "
                f"under, as rename={{'net': 'model'}}"
            )
        chosen = None if only is None else frozenset(only)
        return cls(step, chosen, frozenset(skip), dict(rename), is_partial, converts)

    @property
    def texts(self) -> dict[str, str]:
        """Texts of the arguments, to compare them with those of other ranks."""
        only = "None" if self.only is None else repr(sorted(self.only))
        rename = repr(dict(sorted(self.rename.items())))
        return {
            "step": repr(self.step),
            "only": only,
            "skip": repr(sorted(self.skip)),
            "rename": rename,
            "partial": repr(self.is_partial),
            "allow_dtype_change": repr(self.converts),
        }

    @property
    def is_whole(self) -> bool:
        """True if all is to be as it was saved, but for dtypes."""
        return self == Selection(step=self.step, converts=self.converts)

    def by_saved_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by key prefix with the names that parts were saved under."""
        olds = {new: old for old, new in self.rename.items()}
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
        """Choose parts of this rank's state.

        Args:
            parts: The parts.
            private: Rules for values that differ between ranks.
            given: Names of the parts of all ranks.

        Raises:
            MismatchError: A name that must be that of a part is none.
        """
        for name, keys in (("only", self.only or ()), ("rename", self.rename.values())):
            if unknown := sorted({*keys} - {*given}):
                raise MismatchError(
                    f"{name}= has {', '.join(map(repr, unknown))}, and no part of the training "
                    f"state is called so: there are {', '.join(sorted(given))}. Nothing was changed"
                )
        chosen = {
            key: _partial(part) if self.is_partial else part
            for key, part in parts.items()
            if (self.only is None or key in self.only) and key not in self.skip
        }
        return PartsToLoad(
            self.by_saved_names(chosen),
            self.by_saved_names({**parts, **chosen}),
            self.by_saved_names(private),
            frozenset({*self.skip, *self.rename} - {*given}),
            self,
        )


class PartsToLoad:
    """Parts of one rank's state that a load fills, by the names that they were saved under.

    Args:
        parts: The parts.
        everything: All parts of the state.
        private: Rules for values that differ between ranks.
        named: Names of other parts that must have been saved.
        selection: The caller's arguments.

    Attributes:
        gone: Names of the parts and values that are not loaded.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        everything: Mapping[str, Any],
        private: Mapping[str, PrivateRule],
        named: frozenset[str],
        selection: Selection,
    ) -> None:
        self.parts = parts
        self.everything = everything
        self.private = private
        self.named = named
        self.is_whole = selection.is_whole
        self.is_partial, self.converts = selection.is_partial, selection.converts
        self._takes_some = selection.only is not None
        self._skipped = {*selection.skip, *(everything.keys() - parts.keys())}
        self.gone = {key: None for key in everything if key not in parts}

    @property
    def is_empty(self) -> bool:
        """True after a load that has filled no part of those that the program has given."""
        given = {*self.everything} - {EPOCHS, RNG}
        return given <= self.gone.keys() and bool(given)

    def lets_go(self, name: str) -> bool:
        """Return whether a part, or a value of one, may be on one side only; by its saved name."""
        may_go = self._may_go(name)
        if may_go and prefix_in(name, self.gone) is None:
            self.gone[name] = None
        return may_go

    def _may_go(self, name: str) -> bool:
        key = prefix_in(name, self.parts)
        if key is None:
            # Saved, and not to be loaded.
            is_left = self._takes_some or prefix_in(name, self._skipped) is not None
            return is_left or self.is_partial
        is_module = isinstance(without_marker(self.parts[key]), ModulePart)
        return self.is_partial and (name == key or is_module)


def _partial(part: Any) -> Any:
    value = without_marker(part)
    if not isinstance(value, ModulePart):
        return part
    partial = ModulePart(value.module, is_partial=True)
    return Replicated(partial, part.ranks) if isinstance(part, Replicated) else partial
