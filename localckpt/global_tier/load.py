"""Loads: all ranks compare a checkpoint with their states, and read it together.

The planner is torch's, which says all that does not fit, and runs no code from files.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from localckpt.errors import MismatchError
from localckpt.global_tier.drain_items import why_misdescribed
from localckpt.global_tier.folders import SharedCheckpoint
from localckpt.global_tier.shared_reads import TeamRead
from localckpt.global_tier.staging import load_object
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.memory.tensor_bytes import byte_span, copy_values, integer_view, storage_address
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.state_dict.resharded import is_expanded
from localckpt.state_dict.targets import listed, overlapping_spans

logger = logging.getLogger(__name__)

_SHOWN = 10
_ALIGNMENT = 16
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
        # A release of torch before 2.9 tells no version.
        is_old = getattr(self.metadata, "version", None) is None
        if is_old and saved.keys() - self.state_dict.keys():
            # Maybe saved before torch 2.4, with other names for what is nested.
            return super().create_local_plan()
        wrong = []
        for name, value in self.state_dict.items():
            if (described := saved.get(name)) is not None:
                if (why := self._why_unfit(value, described)) is not None:
                    wrong.append(f"{name} {why}")
            elif not self.allow_partial_load:
                wrong.append(f"{name} is not in the checkpoint")
        if wrong:
            raise MismatchError(
                f"the state does not fit the checkpoint: {listed(wrong)}. Nothing was read"
            ).advised("fit", FIT)
        return create_default_local_load_plan(
            self.state_dict, self.metadata, strict=not self.allow_partial_load
        )

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
        if not self.flatten_state_dict:
            self.state_dict[name] = loaded
            return
        *path, last = self.mappings[name]
        container: Any = self.original_state_dict
        for key in path:
            container = container[self._key_in(container, key)]
        container[self._key_in(container, last)] = loaded

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


def fill(
    state_dict: dict[str, Any],
    found: SharedCheckpoint,
    reader: CachedMetadataFileSystemReader,
    ranks: Ranks,
    *,
    is_partial: bool,
    allow_dtype_change: bool,
) -> None:
    """Fill a state in place; all ranks call it, and raise the same errors.

    After a MismatchError nothing is changed; after another error the state may be partly filled.
    """
    began = time.monotonic()
    iteration = found.folder.iteration
    # While all are here, since they share it.
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    saved = metadata.state_dict_metadata
    names = sorted(saved)
    new_planner = partial(
        ReshardingLoadPlanner,
        allow_partial_load=is_partial,
        allow_dtype_change=allow_dtype_change,
        safe_globals=reader.safe_globals,
    )
    planner = new_planner()
    plans: list[LoadPlan] = []
    # Names of given values that differed between ranks: the data files have the first rank's.
    first_ranks: list[str] = []

    def read_apart(values: dict[str, Any]) -> None:
        apart = new_planner()
        apart.set_up_planner(values, metadata)
        reader.read_data(apart.create_local_plan(), apart).wait()

    def compare() -> str | None:
        # In the same order on all ranks.
        state = {
            name: value.state_dict() if isinstance(value := state_dict[name], Stateful) else value
            for name in sorted(state_dict, key=str)
        }
        planner.set_up_planner(state, metadata)
        plans.append(planner.create_local_plan())
        first_ranks.extend(name for name in found.record.unequal if name in planner.state_dict)
        if first_ranks and not is_partial:
            raise MismatchError(
                f"the ranks that saved {found.folder.path} had different values of "
                f"{_listed(first_ranks)}: its data files have the first rank's, and the image of "
                f"each rank its own, which a Checkpointer resumes from. Nothing was read. "
                f"partial=True gives every rank the first rank's"
            )
        _require_apart({n: v for n, v in planner.state_dict.items() if n in saved}, read_apart)
        return _packed_bits([name in planner.state_dict for name in names])

    judge = partial(_judge_given, names, is_partial)
    what = f"compare the state with iteration {iteration}"
    unwanted = ranks.decide(what, compare, judge, read=shaped([str]))
    absent = sorted(planner.state_dict.keys() - saved.keys())
    if ranks.is_root and (unwanted or absent):
        logger.warning(
            "iteration %d is loaded in part; saved, not given: %s; given, not saved: %s",
            *(iteration, _listed(unwanted), _listed(absent)),
        )
    if first_ranks:
        # Of what this rank gives, which other ranks may not.
        logger.warning(
            "rank %d has loaded what the first rank of those that saved iteration %d had of %s",
            *(ranks.rank, iteration, _listed(first_ranks)),
        )

    nbytes = 0

    def read_items(items: list[ReadItem]) -> None:
        nonlocal nbytes
        with record_function("localckpt.global.load"):
            reader.read_data(LoadPlan(items), planner).wait()
        nbytes += reader.nbytes_read

    what = f"iteration {iteration}"
    TeamRead(plans[0], planner, reader.storage_data, ranks, what, read_items).read()
    # ``Stateful`` values take theirs, maybe by collectives.
    for name, value in planner.original_state_dict.items():
        if isinstance(owner := state_dict[name], Stateful):
            owner.load_state_dict(value)
        else:
            state_dict[name] = value
    seconds = time.monotonic() - began
    logger.info(
        "loaded %s: read %.3f GB in %.2f s (%.2f GB/s)",
        *(found.folder.path, nbytes / 1e9, seconds, nbytes / 1e9 / seconds),
    )


def _require_apart(given: Mapping[str, Any], read: Callable[[dict[str, Any]], None]) -> None:
    """Refuse tensors that share memory, unless it can hold what was saved of both."""
    for one, other in _sharing_memory(given):
        values = {
            name: torch.empty_like(given[name], memory_format=torch.contiguous_format)
            for name in (one, other)
        }
        read(values)
        if not _hold_both(*((_local(given[name]), _local(values[name])) for name in values)):
            raise MismatchError(
                f"{one} and {other} share memory now, as tied weights do, and were saved with "
                f"different values, of which one would overwrite the other. Nothing was "
                f"changed: make the state as it was when it was saved"
            )


def _judge_given(names: list[str], is_partial: bool, given_by: Sequence[str | None]) -> list[str]:
    """Find the saved values that no rank gives; raises MismatchError unless that is allowed."""
    if None in given_by:
        return []
    given = 0
    for bits in given_by:
        given |= int(bits or "0", 16)
    lacking = [name for number, name in enumerate(names) if not given >> number & 1]
    if lacking and not is_partial:
        raise MismatchError(
            f"the checkpoint has {len(lacking)} values that the state has not: {_listed(lacking)}. "
            f"Nothing was read"
        ).advised("fit", FIT)
    return lacking


def _packed_bits(given: Sequence[bool]) -> str | None:
    """Return whether each value is given, as hexadecimal digits; ``None`` where all are."""
    if all(given):
        return None
    return f"{int(''.join('01'[is_given] for is_given in reversed(given)), 2):x}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + f" and {more} more" * (more > 0) or "nothing"


def _sharing_memory(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names of tensors that share memory, in pairs that connect all of them."""
    spans: dict[torch.device, list[tuple[int, int, str]]] = {}
    for name, value in state.items():
        tensor = _local(value)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            first, last = byte_span(tensor)
            start = storage_address(tensor)
            spans.setdefault(tensor.device, []).append((start + first, start + last, name))
    return [pair for on_device in spans.values() for pair in overlapping_spans(on_device)]


def _hold_both(*pairs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return whether tensors that share memory can have the values paired with them at once."""
    spans = [byte_span(tensor) for tensor, _ in pairs]
    tensor = pairs[0][0]
    start = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    memory = torch.empty(
        max(stop for _, stop in spans) - start, dtype=torch.uint8, device=tensor.device
    )
    views, wanted = [], []
    for tensor, value in pairs:
        offset = tensor.storage_offset() - start // tensor.itemsize
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())
        view = view.conj() if tensor.is_conj() else view
        view = torch._neg_view(view) if tensor.is_neg() else view
        # Like every load; the caller has asked for it where dtypes differ.
        value = value.detach().to(tensor.device, tensor.dtype)
        copy_values(view, value)
        views.append(view)
        wanted.append(value)
    return all(map(_are_equal, views, wanted))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits."""
    return torch.equal(
        *(integer_view(t.resolve_conj().resolve_neg().contiguous()) for t in (one, other))
    )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
