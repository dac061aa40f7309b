"""Options and outcome of a load, and the error of one that no other copy would cure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from localckpt.errors import CheckpointingException, RestoreError
from localckpt.failure_texts import described, with_class
from localckpt.ids import Checkpoint
from localckpt.options import PrivateRule
from localckpt.state_dict.basic import TensorAwareStateDict, freedom_in, wrapped
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.targets import STRICT, TargetRules, Targets, find_targets


class Survey(NamedTuple):
    """Look at each image of a checkpoint, report of a rank on all it has seen, root's judge."""

    look: Callable[[ImageReader], None]
    report: Callable[[], bytes]
    judge: Callable[[list[bytes]], Any]


@dataclass(frozen=True)
class LoadOptions:
    """Options of one load, for its state."""

    into: TensorAwareStateDict | None = None
    given: Any = field(default=None, compare=False)
    """``into`` as the caller gave it."""
    map_location: str | torch.device | None = None
    rules: TargetRules = STRICT
    """Ways in which what was saved may differ from ``into``."""
    private: Mapping[str, PrivateRule] | None = None
    """Rules for values of single ranks, by key prefix; ``None`` for those of the manager."""
    fills: bool = True
    """Whether the state is filled; if not, this rank sends what others lack, and is compared."""
    is_elastic: bool = False
    """Whether the shards are not those of the ranks, even if there are as many."""

    only_chunks: bool = False
    """Whether tensors that have boxes are all that is loaded, by whatever ranks they were saved."""
    survey: Survey | None = None
    """What is done with the images in place of a load, if that is given."""

    @cached_property
    def targets(self) -> Targets | None:
        """The tensors of ``into``; raises as :func:`find_targets`."""
        return None if self.into is None else find_targets(self.into, self.rules)

    @classmethod
    def of(
        cls,
        into: Any,
        map_location: str | torch.device | None = None,
        rules: TargetRules = STRICT,
        private: Mapping[str, PrivateRule] | None = None,
    ) -> LoadOptions:
        """Return the options; the rules get the freedom that the values of ``into`` have."""
        rules = replace(rules, free=freedom_in(into))
        return cls(None if into is None else wrapped(into), into, map_location, rules, private)


@dataclass(frozen=True)
class Loaded:
    """Shard that was read and verified; stateful values at keys of ``left`` stay as they are."""

    checkpoint: Checkpoint
    state: Any
    nbytes: int
    came_from: str
    left: frozenset[str] = frozenset()


def incurable(error: Exception) -> CheckpointingException:
    """Return the error to raise on all ranks for one that no other copy would cure."""
    if isinstance(error, CheckpointingException) and not isinstance(error, RestoreError):
        return error
    # Else memory ran out, or the caller's own objects raised: the bytes were not at fault.
    text = f"the state cannot be rebuilt: {with_class(error)}"
    if isinstance(error, RestoreError):
        text = described(error)
    refusal = RestoreError(
        f"{text}. The bytes are those that were saved: nothing was renamed or removed, and no "
        f"older checkpoint was taken instead. Load with the classes, the libraries and the memory "
        f"that the state needs",
        getattr(error, "class_name", None),
        getattr(error, "path", None),
    )
    refusal.__cause__ = error
    return refusal
