"""Loads: all ranks agree on a checkpoint, compare it with their states, and read it together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan
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
from localckpt.global_tier.load_planner import FIT, ReshardingLoadPlanner
from localckpt.global_tier.save_plan import require_same
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.lineage import Lineage
from localckpt.memory.tensor_bytes import byte_span, copy_values, integer_view, storage_address
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks, shaped

__all__ = ["LoadOptions", "Loads", "OpenCheckpoint"]

logger = logging.getLogger(__name__)

_SHOWN = 10
_ALIGNMENT = 16

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

    def find(self, iteration: int | None = None, left_by: Lineage | None = None) -> Found | None:
        """The newest checkpoint; the arguments and errors are those of :meth:`Committed.find`."""
        return self._find(iteration, lambda: self._committed.find(iteration, left_by=left_by))

    def _find(self, iteration: int | None, find: Callable[[], Found | None]) -> Found | None:
        """Call ``find`` on the first rank, which sees the checkpoints for all."""

        def look(tags: list[Any]) -> list[Any] | None:
            require_same(tags, self._ranks.global_ranks)
            found = find()
            return None if found is None else found.to_json()

        def read(found: Any) -> Found | None:
            return None if found is None else Found.from_json(self._committed.path, found)

        tag = [self._session_id, iteration]
        return self._ranks.act("find a checkpoint", lambda: tag, look, read=read)  # type: ignore[return-value]

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
                f"{found.folder.iteration} is the newest now: have the job keep more of them, or "
                f"let the load take longer"
            )
        return found

    def iterations(self, left_by: Lineage | None) -> list[int]:
        """Iterations of all checkpoints; see :meth:`Committed.iterations`."""

        def look(tags: list[Any]) -> list[int]:
            require_same(tags, self._ranks.global_ranks)
            return self._committed.iterations(left_by)

        tag = [self._session_id, "all"]
        return self._ranks.act("find all checkpoints", lambda: tag, look, read=shaped([int]))

    def open(self, found: Found) -> OpenCheckpoint:
        """Read what a checkpoint holds; all ranks call it."""
        return OpenCheckpoint(found, self._open_reader(found), self._ranks)

    def load_newest(
        self, state_dict: dict[str, Any], iteration: int | None, options: LoadOptions
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
                self.open(found).fill(state_dict, options)
            except (CorruptShardError, StorageError) as error:
                # With a partial load, values of both would be left.
                if iteration is not None or options.is_partial:
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

    def _why_none(self, iteration: int | None, *, is_first: bool) -> str:
        if not is_first:
            return f"no checkpoint under {self._committed.path} can be loaded; see the errors above"
        if iteration is not None:
            return f"there is no checkpoint of iteration {iteration} under {self._committed.path}"
        return (
            f"there is no checkpoint under {self._committed.path}: load() only if find_latest() is "
            f"not -1"
        )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What may differ between a state and the checkpoint that fills it.

    Attributes:
        is_partial: Whether values may be in one of them only; they are logged, and stay as they
            are.
        allow_dtype_change: Whether tensors may have other dtypes; their values are converted.
        let_go: Tells by its name whether a saved value need not be in the state of any rank.
        besides: By name, tensors that the caller fills after the load, and the values for them.
    """

    is_partial: bool = False
    allow_dtype_change: bool = False
    let_go: Callable[[str], bool] = lambda name: False
    besides: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class OpenCheckpoint:
    """Checkpoint whose metadata all ranks have read.

    Args:
        found: The checkpoint.
        reader: Its storage reader.
        ranks: The ranks of the job.

    Attributes:
        found: The checkpoint.
        saved: Descriptions of the saved values, by name.
        paths: Keys on the way to each value in the state that was saved, by name.

    Raises:
        CorruptShardError, StorageError: The metadata is damaged, or cannot be read.
        PeerLostError: The rank that reads it did not answer in time.
    """

    def __init__(self, found: Found, reader: CachedMetadataFileSystemReader, ranks: Ranks) -> None:
        self.found = found
        self._reader = reader
        self._ranks = ranks
        # While all are here, since they share it.
        metadata = reader.read_metadata()
        self.saved = metadata.state_dict_metadata
        self.paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}

    def fill(self, state_dict: dict[str, Any], options: LoadOptions) -> None:
        """Fill a state in place; all ranks call it.

        Raises:
            MismatchError: The state does not fit the checkpoint, on some rank; nothing is changed.
            CorruptShardError, StorageError: It is damaged, or cannot be read; the state may be
                partly filled. As every error it is raised on every rank.
        """
        began = time.monotonic()
        iteration = self.found.folder.iteration
        names = [name for name in sorted(self.saved) if not options.let_go(name)]
        planned: list[_Planned] = []

        def plan() -> str | None:
            planned.append(self._plan(state_dict, options))
            given = planned[0].planner.state_dict
            self._require_apart(given, options)
            return _packed_bits([name in given for name in names])

        judge = partial(_judge_given, names, options.is_partial)
        unwanted = self._ranks.decide(
            f"compare the state with iteration {iteration}", plan, judge, read=shaped([str])
        )
        self._log_partial(unwanted, planned[0].planner.state_dict)

        def read() -> None:
            with record_function("localckpt.global.load"):
                planned[0].read(self._reader)

        self._ranks.act(f"load iteration {iteration}", read, lambda _: None)
        _give(state_dict, planned[0].state)
        nbytes, seconds = self._reader.nbytes_read / 1e9, time.monotonic() - began
        logger.info(
            "loaded %s: read %.3f GB in %.2f s (%.2f GB/s)",
            *(self.found.folder.path, nbytes, seconds, nbytes / seconds),
        )

    def compare(
        self, state_dict: dict[str, Any], options: LoadOptions
    ) -> tuple[list[str], list[str]]:
        """Compare a state with the checkpoint on this rank alone, and read nothing.

        Returns:
            What does not fit, in words; and the names of the saved values that this rank does not
            give, and that are not let go.
        """
        _, planner = self._set_up(state_dict, options)
        lines, given = planner.differences(), planner.state_dict
        try:
            self._require_apart(given, options)
        except MismatchError as error:
            lines.append(error.text)
        lacking = (name for name in self.saved if name not in given and not options.is_partial)
        return lines, [name for name in lacking if not options.let_go(name)]

    def read(self, state_dict: dict[str, Any]) -> None:
        """Fill a state of plain values on this rank alone; the other ranks are not asked.

        Raises:
            MismatchError, CorruptShardError, StorageError: As :meth:`fill`, on this rank.
        """
        planned = self._plan(state_dict, LoadOptions())
        planned.read(self._reader)
        _give(state_dict, planned.state)

    def _plan(self, state_dict: dict[str, Any], options: LoadOptions) -> _Planned:
        """Plan what ``dcp.load`` reads on one rank."""
        state, planner = self._set_up(state_dict, options)
        self._reader.set_up_storage_reader(self._reader.read_metadata(), is_coordinator=True)
        local = self._reader.prepare_local_plan(planner.create_local_plan())
        return _Planned(state, planner, planner.finish_plan(local))

    def _set_up(
        self, state_dict: dict[str, Any], options: LoadOptions
    ) -> tuple[dict[str, Any], ReshardingLoadPlanner]:
        planner = ReshardingLoadPlanner(
            allow_partial_load=options.is_partial,
            allow_dtype_change=options.allow_dtype_change,
            safe_globals=self._reader.safe_globals,
        )
        # In the same order on all ranks.
        state = {
            name: value.state_dict() if isinstance(value := state_dict[name], Stateful) else value
            for name in sorted(state_dict, key=str)
        }
        planner.set_up_planner(state, self._reader.read_metadata())
        return state, planner

    def _require_apart(self, given: Mapping[str, Any], options: LoadOptions) -> None:
        """Refuse tensors that share memory, unless it can hold what was saved of both.

        Raises:
            MismatchError: One would overwrite another. Nothing is changed.
        """
        besides = options.besides
        for one, other in _sharing_memory({**given, **{n: own for n, (own, _) in besides.items()}}):
            if any(name not in besides and name not in self.saved for name in (one, other)):
                continue
            values = {n: _empty_like(given[n]) for n in (one, other) if n not in besides}
            self._plan(values, options).read(self._reader)
            pairs = [
                besides[n] if n in besides else (_local(given[n]), _local(values[n]))
                for n in (one, other)
            ]
            if not _hold_both(*pairs):
                raise MismatchError(
                    f"{one} and {other} share memory now, as tied weights do, and were saved with "
                    f"different values, of which one would overwrite the other. Nothing was "
                    f"changed: make the state as it was when it was saved"
                )

    def _log_partial(self, unwanted: Sequence[str], given: Mapping[str, Any]) -> None:
        absent = sorted(given.keys() - self.saved.keys())
        if self._ranks.is_root and (unwanted or absent):
            logger.warning(
                "iteration %d is loaded in part; saved, not given: %s; given, not saved: %s",
                *(self.found.folder.iteration, _listed(unwanted), _listed(absent)),
            )


@dataclass(frozen=True, slots=True)
class _Planned:
    """Load of one rank: the state with the states of its ``Stateful`` values, and the plan."""

    state: dict[str, Any]
    planner: ReshardingLoadPlanner
    plan: LoadPlan

    def read(self, reader: CachedMetadataFileSystemReader) -> None:
        reader.read_data(self.plan, self.planner).wait()


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
    spans = []
    for name, value in state.items():
        tensor = _local(value) if isinstance(value, torch.Tensor) else None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        assert tensor is not None
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            first, last = byte_span(tensor)
            start = storage_address(tensor)
            spans.append((str(tensor.device), start + first, start + last, name))
    found = []
    device, end, holder = "", 0, ""
    for on, start, stop, name in sorted(spans):
        if on == device and start < end:
            found.append((holder, name))
        if on != device or stop >= end:
            device, end, holder = on, stop, name
    return found


def _hold_both(*pairs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return whether tensors that share memory can have their values at the same time.

    Args:
        pairs: A tensor, which is not changed, and the value for it.
    """
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


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the shape and the sharding of another one, in memory of its own."""
    empty = torch.empty_like(_local(value).detach(), memory_format=torch.contiguous_format)
    if not isinstance(value, DTensor):
        return empty
    return DTensor.from_local(
        *(empty, value.device_mesh, value.placements),
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _give(state_dict: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Put what was loaded into the state. ``Stateful`` values take it, maybe by collectives."""
    for name, value in loaded.items():
        if isinstance(owner := state_dict[name], Stateful):
            owner.load_state_dict(value)
        else:
            state_dict[name] = value
