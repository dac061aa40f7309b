"""Description of a training state on shared storage, which is read before anything is filled.

The names of the values on shared storage are::

    <module>.<name>                          parameters and buffers
    <optimizer>.state.<parameter>.<name>     what is there, of the parameters that have a state
    <optimizer>.param_groups
    localckpt.world_size
    localckpt.parts.<part>                   kind of each part
    localckpt.placed.<optimizer>             states that are not sharded as their parameters are
    localckpt.of_rank.<rank>                 image of what belongs to a rank: other parts, buffers
    localckpt.tensors.<rank>.<part>.<name>   modules and optimizers of a rank, by ``private=``
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from localckpt.checkpointer.optimizer_names import Path
from localckpt.checkpointer.parts import OURS
from localckpt.errors import MismatchError
from localckpt.global_tier.load import FillOptions, OpenCheckpoint
from localckpt.global_tier.metadata import set_element

__all__ = [
    "BUFFERS",
    "IMAGE",
    "OF_RANK",
    "PARTS",
    "PLACED",
    "TENSORS",
    "WORLD_SIZE",
    "SavedState",
]

WORLD_SIZE, PARTS, PLACED = "world_size", "parts", "placed"
OF_RANK, TENSORS, BUFFERS = "of_rank", "tensors", "buffers"

IMAGE = "localckpt image"
"""First of a pair; the second is the image of what is saved so, since torch cannot load it."""


class SavedState:
    """State of a training loop in a checkpoint that is open.

    Attributes:
        world_size: Number of ranks that have saved it.
        kinds: Kinds of the parts of all ranks, by name.
        rank: Number of the saved rank whose own values this rank takes.
        is_resized: Whether another number of ranks has saved it.
    """

    def __init__(
        self, checkpoint: OpenCheckpoint, unpack: Callable[[bytes], Any], rank: int, world_size: int
    ) -> None:
        self._checkpoint = checkpoint
        self._unpack = unpack
        self._below: dict[Path, dict[Path, Any]] = {}
        for name, path in checkpoint.paths.items():
            depth = 4 if path[:2] == (OURS, TENSORS) else 1
            self._below.setdefault(path[:depth], {})[path[depth:]] = checkpoint.saved[name]
        if (OURS,) not in self._below:
            raise MismatchError(
                f"{checkpoint.found.folder.path} was not saved by a Checkpointer: load it with "
                f"GlobalCheckpointManager, or dcp.load. Nothing was changed"
            )
        about = self._read((OURS,), lambda path: path[0] in (WORLD_SIZE, PARTS, PLACED))
        self.world_size, self.kinds = int(about[WORLD_SIZE]), dict(about.get(PARTS, {}))
        self._placed = about.get(PLACED, {})
        self.rank, self.is_resized = rank % self.world_size, world_size != self.world_size

    def placed(self, key: str) -> str:
        """Return what :meth:`NamedOptimizer.placed` returned for an optimizer."""
        return str(self._placed.get(key, "[]"))

    def is_of_ranks(self, key: str) -> bool:
        """Return whether each rank has saved a module or an optimizer of its own."""
        return any(path[:2] == (OURS, TENSORS) and path[3] == key for path in self._below)

    def place(self, key: str) -> Path:
        """Return the place of a module or an optimizer that this rank loads."""
        return (OURS, TENSORS, str(self.rank), key) if self.is_of_ranks(key) else (key,)

    def below(self, key: str) -> Mapping[Path, Any]:
        """Return the descriptions of a part's values, by their paths in its state."""
        return self._below.get(self.place(key), {})

    @cached_property
    def own(self) -> dict[str, Any]:
        """Values of the rank whose number is :attr:`rank`: other parts, and buffers by module."""
        return self._of_rank(self.rank)

    def private_of(self, rank: int, keys: Collection[str]) -> dict[str, Any]:
        """Read what belongs to a rank that has saved, and keep nothing of it.

        Of a module of all ranks these are the buffers.
        """
        of_rank = self._of_rank(rank)
        found = {key: v for key, v in (of_rank[BUFFERS] | of_rank[PARTS]).items() if key in keys}
        for path in self._below:
            if path[:3] == (OURS, TENSORS, str(rank)) and path[3] in keys:
                found[str(path[3])] = self.value(self._read(path, lambda _: True))
        return found

    def groups(self, key: str) -> list[dict[str, Any]]:
        """Read the parameter groups of an optimizer."""
        found = self._read(self.place(key), lambda path: path[0] == "param_groups")
        return list(found.get("param_groups", []))

    def odd(self, key: str) -> dict[str, Any]:
        """Read the tensors of a module that were saved as images."""
        objects = {
            path
            for path, described in self.below(key).items()
            if not isinstance(described, TensorStorageMetadata)
        }
        found = self._read(self.place(key), objects.__contains__) if objects else {}
        values = {name: self.value(value) for name, value in found.items()}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def value(self, loaded: Any) -> Any:
        """Return a value that was loaded, with images replaced by what they hold."""
        if isinstance(loaded, dict):
            return {key: self.value(member) for key, member in loaded.items()}
        if isinstance(loaded, list):
            return [self.value(member) for member in loaded]
        if isinstance(loaded, tuple) and len(loaded) == 2 and loaded[0] == IMAGE:
            return self._unpack(loaded[1])
        return loaded

    def path(self, name: str) -> Path:
        """Return the path of a value in the state that was saved."""
        return self._checkpoint.paths[name]

    def compare(self, state: dict[str, Any], options: FillOptions) -> tuple[list[str], list[str]]:
        """Compare a state on this rank alone, as :meth:`OpenCheckpoint.compare`, by plain names."""
        lines, lacking = self._checkpoint.compare(state, options)
        paths = (self.path(name) for name in lacking)
        plain = (path[3:] if path[:2] == (OURS, TENSORS) else path for path in paths)
        return lines, [".".join(map(str, path)) for path in plain]

    def fill(self, state: dict[str, Any], options: FillOptions) -> None:
        """Fill a state; all ranks call it. Raises as :meth:`OpenCheckpoint.fill`."""
        self._checkpoint.fill(state, options)

    def _of_rank(self, rank: int) -> dict[str, Any]:
        image = self._read((OURS,), lambda path: path == (OF_RANK, str(rank)))
        return dict(self._unpack(image[OF_RANK][str(rank)]))

    def _read(self, place: Path, is_wanted: Callable[[Path], bool]) -> dict[str, Any]:
        """Read small values on this rank alone."""
        state: dict[str, Any] = {}
        for path, described in self._below.get(place, {}).items():
            if is_wanted(path):
                value: Any = b""
                if isinstance(described, TensorStorageMetadata):
                    value = torch.empty(described.size, dtype=described.properties.dtype)
                set_element(state, (*place, *path), value)
        self._checkpoint.read(state)
        for key in place:
            state = state.get(str(key), {})
        return state
