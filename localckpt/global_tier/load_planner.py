"""torch's load planner, for checkpoints of very many chunks, running no code from files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from localckpt.errors import MismatchError
from localckpt.global_tier.objects import load_object
from localckpt.global_tier.overlaps import create_read_items_for_chunk_list
from localckpt.global_tier.torch_dcp import (
    create_chunk_list,
    create_read_items,
    format_version,
)

__all__ = ["ReshardingLoadPlanner", "give", "read_here"]


class ReshardingLoadPlanner(DefaultLoadPlanner):
    """Loads a state with any sharding from a checkpoint with any other.

    Args:
        allow_partial_load: Leave values of the state that the checkpoint has not as they are; else
            they are an error.
        safe_globals: Classes and functions that objects may name, beyond torch's own.
    """

    def __init__(
        self, *, allow_partial_load: bool = False, safe_globals: Iterable[Any] = ()
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
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
        """What this rank reads.

        Raises:
            MismatchError: The checkpoint does not fit; it lists everything that does not.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        saved = self.metadata.state_dict_metadata
        if format_version(self.metadata) is None and saved.keys() - self.state_dict.keys():
            # Maybe saved before torch 2.4, with other names for what is nested.
            return super().create_local_plan()
        wrong, items = [], []
        for name, value in self.state_dict.items():
            described = saved.get(name)
            if described is None:
                if not self.allow_partial_load:
                    wrong.append(f"{name} is not in the checkpoint")
                continue
            if isinstance(value, torch.Tensor) != isinstance(described, TensorStorageMetadata):
                kinds = ("an object", "a tensor")
                wrong.append(
                    f"{name} is {kinds[isinstance(value, torch.Tensor)]}, and was saved as "
                    f"{kinds[isinstance(described, TensorStorageMetadata)]}"
                )
                continue
            if isinstance(described, TensorStorageMetadata) and value.size() != described.size:
                wrong.append(f"{name} has shape {tuple(value.size())}, not {tuple(described.size)}")
                continue
            if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                # This rank has no part in it.
                continue
            if isinstance(described, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(name, described, create_chunk_list(value))
            else:
                items += create_read_items(name, described, value)
        if wrong:
            shown = "; ".join(wrong[:8]) + f"; and {len(wrong) - 8} more" * (len(wrong) > 8)
            raise MismatchError(
                f"the state does not fit the checkpoint: {shown}. Nothing was read. To leave "
                f"values that are not in the checkpoint as they are, pass allow_partial_load=True"
            )
        return LoadPlan(items)

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


def read_here(
    state_dict: dict[str, Any], reader: StorageReader, planner: LoadPlanner
) -> dict[str, Any]:
    """What ``dcp.load`` reads on one rank; what goes wrong is raised as it is, and asks nobody.

    Args:
        state_dict: Its tensors are filled in place.
        reader, planner: Made for this load.

    Returns:
        The state that was loaded, for :func:`give`.
    """
    # In the same order on all ranks.
    state = {
        name: value.state_dict() if isinstance(value := state_dict[name], Stateful) else value
        for name in sorted(state_dict, key=str)
    }
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return state


def give(state_dict: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Put what was loaded into the state. ``Stateful`` values take it, maybe by collectives."""
    for name, value in loaded.items():
        if isinstance(owner := state_dict[name], Stateful):
            owner.load_state_dict(value)
        else:
            state_dict[name] = value
