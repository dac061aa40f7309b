"""Planner of loads: torch's, which says all that does not fit, and runs no code from files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from localckpt.errors import MismatchError
from localckpt.global_tier.drain_items import why_misdescribed
from localckpt.global_tier.metadata import create_read_items, format_version
from localckpt.global_tier.write_items import load_object
from localckpt.state_dict.resharded import is_expanded

FIT = (
    "Give all that was saved, or load with partial=True (of a planner: allow_partial_load=True), "
    "which leaves out what only one side has; allow_dtype_change=True converts values"
)
"""Advice on the topic ``fit``, on a state that is not as it was saved."""


class ReshardingLoadPlanner(DefaultLoadPlanner):
    """Planner of loads of a state with any sharding from a checkpoint with any other.

    Args:
        allow_partial_load: Leave values of the state that the checkpoint has not as they are; else
            they are an error.
        allow_dtype_change: Convert values to the dtypes of the state's tensors; else another dtype
            is an error.
        safe_globals: Classes and functions that objects may name, beyond torch's own.
    """

    def __init__(
        self,
        *,
        allow_partial_load: bool = False,
        allow_dtype_change: bool = False,
        safe_globals: Iterable[Any] = (),
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._allow_dtype_change = allow_dtype_change
        self._safe_globals = tuple(safe_globals)
        # Keys of dicts of the state by their text.
        self._keys: dict[int, dict[str, Any]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state that is to be filled; tensors on the meta device are made."""
        if not (dist.is_available() and dist.is_initialized()):
            # torch makes them on the device of the default group.
            _make_meta_tensors(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank.

        Raises:
            MismatchError: The checkpoint does not fit; it lists everything that does not.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        saved = self.metadata.state_dict_metadata
        if format_version(self.metadata) is None and saved.keys() - self.state_dict.keys():
            # Maybe saved before torch 2.4, with other names for what is nested.
            return super().create_local_plan()
        if wrong := self.differences():
            shown = "; ".join(wrong[:8]) + f"; and {len(wrong) - 8} more" * (len(wrong) > 8)
            raise MismatchError(
                f"the state does not fit the checkpoint: {shown}. Nothing was read"
            ).advised("fit", FIT)
        items = []
        for name, value in self.state_dict.items():
            described = saved.get(name)
            if described is None:
                continue
            if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                # This rank has no part in it.
                continue
            items += create_read_items(name, described, value)
        return LoadPlan(items)

    def differences(self) -> list[str]:
        """Say of each value of the state that cannot be filled why that is so."""
        assert self.metadata is not None, "set_up_planner comes first"
        saved, wrong = self.metadata.state_dict_metadata, []
        for name, value in self.state_dict.items():
            if (described := saved.get(name)) is not None:
                if (why := self._why_unfit(value, described)) is not None:
                    wrong.append(f"{name} {why}")
            elif not self.allow_partial_load:
                wrong.append(f"{name} is not in the checkpoint")
        return wrong

    def _why_unfit(self, value: Any, described: Any) -> str | None:
        """Say why a value cannot be filled with what was saved; ``None`` if it can."""
        is_tensor = isinstance(described, TensorStorageMetadata)
        if isinstance(value, torch.Tensor) != is_tensor:
            kinds = ("an object", "a tensor")
            return f"is {kinds[not is_tensor]}, and was saved as {kinds[is_tensor]}"
        if not isinstance(value, torch.Tensor):
            return None
        if value.size() != described.size:
            return f"has shape {tuple(value.size())}, not {tuple(described.size)}"
        saved_dtype = described.properties.dtype
        if value.dtype is not saved_dtype and not self._allow_dtype_change:
            return f"is {value.dtype}, and was saved as {saved_dtype}"
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                return None
            why = why_misdescribed(value)
            return None if why is None else f"is a DTensor that cannot be filled: {why}"
        if type(value) in (torch.Tensor, torch.nn.Parameter) and is_expanded(value):
            return "is expanded: several of its elements are one, and cannot be filled"
        return None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state; nothing but values is made from a file.

        Raises:
            UnsafeGlobalError: It names a class that is not allowed.
        """
        name = read_item.dest_index.fqn
        loaded = load_object(name, value, self._safe_globals)
        if self.flatten_state_dict:
            self._put(self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    def _put(self, path: tuple[str | int, ...], value: Any) -> None:
        """Replace a value of the state that is filled."""
        container: Any = self.original_state_dict
        for key in path[:-1]:
            container = container[self._key_in(container, key)]
        container[self._key_in(container, path[-1])] = value

    def _key_in(self, container: Any, key: str | int) -> Any:
        """The key that torch names so: its names know the text of keys only."""
        if not isinstance(container, Mapping) or key in container:
            return key
        known = self._keys.get(id(container))
        if known is None:
            known = self._keys[id(container)] = {str(real): real for real in container}
        return known[str(key)]


def _make_meta_tensors(values: dict[Any, Any] | list[Any]) -> None:
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, torch.Tensor) and value.is_meta:
            values[key] = torch.empty_like(value, device="cpu")
        elif isinstance(value, dict | list):
            _make_meta_tensors(value)
