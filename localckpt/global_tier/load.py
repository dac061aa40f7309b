"""Loads: all ranks agree on a checkpoint, each reads what it lacks, and all take it together.

The planner is torch's, for checkpoints of very many chunks, and runs no code from files.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from localckpt.errors import (
    CorruptShardError,
    MismatchError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.global_tier.committed import Committed, Found
from localckpt.global_tier.metadata import (
    create_chunk_list,
    create_read_items,
    format_version,
)
from localckpt.global_tier.misdescribed import why_misdescribed
from localckpt.global_tier.overlaps import create_read_items_for_chunk_list
from localckpt.global_tier.save_plan import require_same
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.global_tier.write_items import load_object
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks

__all__ = ["Loads", "ReshardingLoadPlanner"]

logger = logging.getLogger(__name__)

OpenReader = Callable[[Found], CachedMetadataFileSystemReader]


class Loads:
    """The loads of one manager. All ranks make the same calls.

    Args:
        session_id: The training run.
        committed: Its checkpoints, which the first rank sees for all.
        ranks: Those of the job.
        open_reader: Returns the storage reader of a checkpoint.
    """

    def __init__(
        self, session_id: str, committed: Committed, ranks: Ranks, open_reader: OpenReader
    ) -> None:
        self._session_id = session_id
        self._committed = committed
        self._ranks = ranks
        self._open_reader = open_reader

    def find(self, iteration: int | None = None) -> Found | None:
        """The newest checkpoint; the arguments and errors are those of :meth:`Committed.find`."""
        return self._find(iteration, lambda: self._committed.find(iteration))

    def _find(self, iteration: int | None, find: Callable[[], Found | None]) -> Found | None:
        """Call ``find`` on the first rank, which sees the checkpoints for all."""

        def look(tags: list[Any]) -> list[Any] | None:
            require_same(tags, self._ranks.global_ranks)
            found = find()
            return None if found is None else found.to_json()

        found = self._ranks.act("find a checkpoint", lambda: [self._session_id, iteration], look)
        return None if found is None else Found.from_json(self._committed.path, found)

    def _find_other(self, failed: Found, newest: Found, deadline: Deadline) -> Found | None:
        """Find, on the first rank, the checkpoint to try after one that could not be loaded.

        Args:
            failed: The checkpoint that could not be loaded.
            newest: The newest that was tried.
            deadline: End of the time in which a newer one is tried.

        Raises:
            NoReplicasAvailableError: At the deadline there is still a newer one.
        """
        found = self._committed.find()
        if found is None or found.folder.version <= newest.folder.version:
            return self._committed.find(older_than=failed.folder.version)
        # A job goes on there, and pruned what was being read.
        if deadline.left_s == 0:
            raise NoReplicasAvailableError(
                f"for {deadline.timeout_s:g} s every checkpoint under {self._committed.path} was "
                f"pruned before it was read, the last one iteration {failed.folder.iteration}, and "
                f"{found.folder.iteration} is the newest now: have the job keep more of them "
                f"(keep_last), or load with a longer timeout"
            )
        return found

    def iterations(self) -> list[int]:
        """Iterations of all checkpoints, in the order in which a restart tries them."""

        def look(tags: list[Any]) -> list[int]:
            require_same(tags, self._ranks.global_ranks)
            return self._committed.iterations()

        return self._ranks.act("find all checkpoints", lambda: [self._session_id, "all"], look)

    def load_newest(
        self, state_dict: dict[str, Any], iteration: int | None, allow_partial_load: bool
    ) -> Found:
        """Fill a state from the newest checkpoint that is not damaged, or from one iteration.

        One that a job prunes meanwhile makes way for the newest that is there then.

        Returns:
            The checkpoint.

        Raises:
            NoReplicasAvailableError: There is no such checkpoint.
            CorruptShardError, StorageError: It is damaged, or cannot be read, and no older one may
                take its place.
        """
        deadline = Deadline.after(self._ranks.timeout_s)
        found = newest = self.find(iteration)
        while found is not None and newest is not None:
            newest = max(newest, found, key=lambda tried: tried.folder.version)
            try:
                self._load(found, state_dict, allow_partial_load)
            except (CorruptShardError, StorageError) as error:
                # With a partial load, values of both would be left.
                if iteration is not None or allow_partial_load:
                    raise
                logger.error(
                    "iteration %d cannot be loaded, trying another one: %s",
                    found.folder.iteration,
                    error,
                )
            else:
                return found
            found = self._find(iteration, partial(self._find_other, found, newest, deadline))
        raise NoReplicasAvailableError(self._why_none(iteration, is_first=newest is None))

    def _load(self, found: Found, state_dict: dict[str, Any], is_partial: bool) -> None:
        began = time.monotonic()
        reader = self._open_reader(found)
        planner = ReshardingLoadPlanner(
            allow_partial_load=is_partial, safe_globals=reader.safe_globals
        )
        loaded: dict[str, Any] = {}

        def read() -> None:
            with record_function("localckpt.global.load"):
                loaded.update(_read(state_dict, reader, planner))

        # While all are here, since they share it.
        reader.read_metadata()
        self._ranks.act(f"load iteration {found.folder.iteration}", read, lambda _: None)
        _give(state_dict, loaded)
        nbytes, seconds = reader.nbytes_read / 1e9, time.monotonic() - began
        logger.info(
            "loaded %s: read %.3f GB in %.2f s (%.2f GB/s)",
            *(found.folder.path, nbytes, seconds, nbytes / seconds),
        )

    def _why_none(self, iteration: int | None, *, is_first: bool) -> str:
        if not is_first:
            return f"no checkpoint under {self._committed.path} can be loaded; see the errors above"
        if iteration is not None:
            return f"there is no checkpoint of iteration {iteration} under {self._committed.path}"
        return (
            f"there is no checkpoint under {self._committed.path}: load() only if find_latest() is "
            f"not -1"
        )


def _read(
    state_dict: dict[str, Any],
    reader: CachedMetadataFileSystemReader,
    planner: ReshardingLoadPlanner,
) -> dict[str, Any]:
    """Read what ``dcp.load`` reads on one rank, without asking others; the state for :func:`_give`.

    Tensors of ``state_dict`` are filled in place.
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


def _give(state_dict: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Put what was loaded into the state. ``Stateful`` values take it, maybe by collectives."""
    for name, value in loaded.items():
        if isinstance(owner := state_dict[name], Stateful):
            owner.load_state_dict(value)
        else:
            state_dict[name] = value


class ReshardingLoadPlanner(DefaultLoadPlanner):
    """Planner of loads of a state with any sharding from a checkpoint with any other.

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
        """Plan the reads of this rank.

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
            if isinstance(value, DTensor) and (why := why_misdescribed(value)) is not None:
                wrong.append(f"{name} is a DTensor that cannot be filled: {why}")
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
