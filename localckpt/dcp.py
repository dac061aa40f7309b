"""Checkpoints on the nodes for programs that call torch.distributed.checkpoint's save and load.

Its planner divides a state into items, and says what each rank reads of them. Here the items of a
rank become the state of one save of the nodes' manager, and a load fills parts of global tensors.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from localckpt.checkpointer.tiers import NodeManager, NodeTier, SharedTier
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.global_tier import metadata as descriptions
from localckpt.global_tier.drain_items import ImageItems, merge_plans
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.global_tier.staging import ItemReader, load_object, require_loadable
from localckpt.managers.manager import CheckpointManager
from localckpt.managers.restoring import LoadOptions, Survey
from localckpt.state_dict.basic import PlainState, wrapped
from localckpt.state_dict.names import OBJECTS, OURS, PATHS
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.replicated import Chunk
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import TargetRules, listed

logger = logging.getLogger(__name__)

# Drains that fail in a row before a save raises the error of the last one.
_MOST_FAILURES = 3


class _OfNodes:
    """Iteration and ranks of a writer or a reader."""

    _iteration: int | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint: the number at the end of the path is its iteration."""
        path = os.fspath(checkpoint_id or "").rstrip("/")
        number = re.search(r"[0-9]+$", path)
        if path and number is None:
            raise CheckpointingException(
                f"checkpoint_id={path!r} names no iteration: give a path that ends with the number "
                f"of the step, as 'step-100'. Nothing was done"
            )
        self._iteration = None if number is None else int(number[0])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: torch finds this class for no path."""
        return False

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan


def _require_ranks(
    manager: NodeManager, rank: int | None, plans: Sequence[Any] | None = None
) -> None:
    """Check that torch was called by the ranks of the manager."""
    mine, size = manager.rank, manager.world_size
    if rank not in (None, mine) or (plans is not None and len(plans) != size):
        who = f"as rank {rank}" if plans is None else f"by {len(plans)} ranks"
        raise MismatchError(
            f"torch.distributed.checkpoint was called {who}, and the manager of the nodes is "
            f"rank {mine} of {size}: give both the same process_group, and leave out "
            f"no_dist=True. Nothing was done"
        )


class NodeStorageWriter(_OfNodes, StorageWriter):
    """Writer for ``dcp.save`` and ``dcp.async_save`` that saves on the nodes.

    The number at the end of ``checkpoint_id`` is the iteration, above that of the save before.

    Args:
        nodes: Manager of the nodes' checkpoints, which stays the caller's to close. For
            ``AsyncCheckpointerType.PROCESS`` a function that makes it, and that can be pickled: the
            process that saves makes it at its first save.
        shared: Manager of shared storage, made with ``local=`` that of the nodes, to which
            checkpoints are drained behind training; it stays the caller's to close.
        shared_every: Of so many saves one is drained.
    """

    def __init__(
        self,
        nodes: NodeManager | Callable[[], NodeManager],
        *,
        shared: GlobalCheckpointManager | None = None,
        shared_every: int = 1,
    ) -> None:
        if shared_every < 1 or not (shared is None or isinstance(nodes, CheckpointManager)):
            raise CheckpointingException(
                f"shared_every={shared_every} has to be at least 1, and shared= goes with the "
                f"manager of the nodes, not with a function that makes it"
            )
        self._nodes, self._every, self._saves = nodes, shared_every, 0
        # Bytes of objects that were found to be loadable, by their names.
        self._made_before: dict[str, Any] = {}
        self._made = nodes if isinstance(nodes, CheckpointManager) else None
        self._tiers: tuple[NodeTier, SharedTier] | None = None
        if shared is not None:
            how = shared.timeout, _MOST_FAILURES
            own = NodeTier(self.manager, *how)
            self._tiers = own, SharedTier(shared, own, *how)
        self._name = uuid.uuid4().hex

    def __reduce__(self) -> Any:
        if isinstance(self._nodes, CheckpointManager):
            raise CheckpointingException(
                "a manager of the nodes cannot go to another process: for "
                "AsyncCheckpointerType.PROCESS give NodeStorageWriter a function that makes it, "
                "as functools.partial(LocalCheckpointManager, '/local/checkpoints')"
            )
        return _writer_here, (self._name, self._nodes, self._iteration)

    @property
    def manager(self) -> NodeManager:
        """Manager of the nodes' checkpoints; a function that makes it is called once."""
        if self._made is None:
            assert not isinstance(self._nodes, CheckpointManager), "else it is made"
            self._made = self._nodes()
        return self._made

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        """Check that all ranks of the manager save one iteration together."""
        if self._iteration is None or not use_collectives:
            raise CheckpointingException(
                "the nodes keep checkpoints of all ranks by number: give dcp.save a checkpoint_id "
                "that ends with the step, as 'step-100', and leave out use_collectives=False. "
                "Nothing was saved"
            )
        _require_ranks(self.manager, kwargs.get("rank"))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that as many ranks save as the manager has."""
        _require_ranks(self.manager, None, plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the items of this rank together with all other ranks; raises as ``save``."""
        assert self._iteration is not None, "set_up_storage_writer has looked"
        try:
            state: Any = self._state_of(plan, planner)
        except Exception as error:  # noqa: BLE001 - raised by save() on all ranks
            # They are on their way to save(), and would wait there for this rank.
            state = _Items(error)
        self.manager.save(state, self._iteration)
        self._saves += 1
        if self._tiers is not None:
            nodes, shared = self._tiers
            shared.finalize(None, blocking=False)
            nodes.begun = nodes.newest = self._iteration
            if self._saves % self._every == 0:
                shared.drain(self._iteration, None)
        return _done([])

    def _state_of(self, plan: SavePlan, planner: SavePlanner) -> PlainState:
        """Make the state of a save of the items: a chunk of each tensor, and of objects' bytes."""
        items = ItemReader(self.manager.safe_globals)
        chunks: dict[str, Chunk] = {}
        objects: list[str] = []
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            value: Any = items.read(item, planner)
            key = name if name not in chunks else f"{name}#{len(chunks)}"
            if data is None:
                if self._made_before.get(name) != value:
                    require_loadable(name, BytesIO(value), self.manager.safe_globals)
                    self._made_before[name] = value
                made = torch.frombuffer(bytearray(value), dtype=torch.uint8)
                chunks[key] = Chunk(made, name, tuple(made.shape), (0,))
                objects.append(name)
            elif isinstance(value, torch.Tensor):
                # Each of tied parameters is a tensor by itself, which shares the memory.
                place = tuple(data.size), tuple(data.chunk.offsets)
                chunks[key] = Chunk(value.detach(), name, *place)
            else:
                raise CheckpointingException(
                    f"{name} is a tensor of a class of its own, or of another dtype or shape than "
                    f"was planned, and its parts cannot be loaded: save its dense values"
                )
        known = getattr(planner, "mappings", {})
        paths = {chunk.key: known.get(chunk.key, (chunk.key,)) for chunk in chunks.values()}
        return PlainState({OURS: {PATHS: paths, OBJECTS: objects}, **chunks})

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: all ranks have agreed that the checkpoint is complete."""

    def close(self) -> None:
        """Wait for drains, and close a manager that was made here; all ranks call it."""
        for tier in self._tiers or ():
            tier.finalize(None, blocking=True)
            tier.leave()
        if self._made is not None and self._made is not self._nodes:
            self._made.close()
            self._made = None


_WRITERS: dict[str, NodeStorageWriter] = {}
"""Writers of a process that saves for a trainer, which sends a writer with each save."""


def _writer_here(
    name: str, nodes: Callable[[], NodeManager], iteration: int | None
) -> NodeStorageWriter:
    writer = _WRITERS.setdefault(name, NodeStorageWriter(nodes))
    writer._iteration = iteration
    return writer


class _Items:
    """Items of a rank that could not be had: a state that cannot be saved, nor loaded into."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        raise self._error


class NodeStorageReader(_OfNodes, StorageReader):
    """Reader for ``dcp.load`` of what a :class:`NodeStorageWriter` has saved on the nodes.

    The number at the end of ``checkpoint_id`` is the iteration; without it the newest checkpoint is
    loaded.

    Args:
        nodes: Manager of the nodes' checkpoints, made with ``elastic=True`` if another number of
            ranks may have saved. What it saves next goes on from what was loaded.
        partial: Whether the state may lack what was saved. Else that is a MismatchError, where
            torch says nothing. What is not saved is torch's own error.
        allow_dtype_change: Whether values are converted to the dtypes of the tensors that they
            fill. Else another dtype is a MismatchError, where torch says nothing.
    """

    def __init__(
        self, nodes: NodeManager, *, partial: bool = False, allow_dtype_change: bool = False
    ) -> None:
        self.manager = nodes
        self._is_partial, self._converts = partial, allow_dtype_change
        self._metadata, self._found = Metadata({}), -1
        self._failure: CheckpointingException | None = None

    def read_metadata(self) -> Metadata:
        """Describe the checkpoint, together with all other ranks, from its images."""
        self._failure, self._metadata = None, Metadata({})
        try:
            plans: dict[int, descriptions.RankPlan] = {}
            survey = Survey(partial(_look, plans), lambda: descriptions.pack(plans), self._merged)
            self._found, text = self.manager.survey(survey, self._iteration)
            allowed = SafeGlobals(self.manager.safe_globals)
            self._metadata = descriptions.read_metadata(base64.b64decode(text), allowed)
        except CheckpointingException as error:
            # torch takes an error here for a checkpoint that each rank has described by itself.
            self._failure = error
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raise what :meth:`read_metadata` has found; raises as ``load``, on every rank."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        _require_ranks(self.manager, kwargs.get("rank"))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: refuse what was saved and is wanted by no rank."""
        _require_ranks(self.manager, None, plans)
        wanted = {item.storage_index.fqn for plan in plans for item in plan.items}
        saved = self._metadata.state_dict_metadata
        # No rank reads anything of a tensor without items.
        left = [n for n in saved if n not in wanted and 0 not in getattr(saved[n], "size", ())]
        if left:
            what = f"iteration {self._found} has {listed(sorted(left))}"
            if not self._is_partial:
                raise MismatchError(
                    f"{what}, and the state to load into has not. Nothing was changed. "
                    f"NodeStorageReader(partial=True) leaves such values out"
                )
            logger.warning("left out, as partial=True allows: %s", what)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors together with all other ranks; raises as ``load``.

        After an error they may be partly filled.
        """
        targets: dict[int, torch.Tensor] = {}
        chunks: dict[int, Chunk] = {}
        into: Any = chunks
        try:
            for number, item in enumerate(plan.items):
                if item.type != LoadItemType.BYTE_IO:
                    targets[number] = planner.resolve_tensor(item)
                chunks[number] = self._chunk(item, targets.get(number))
        except Exception as error:  # noqa: BLE001 - raised by load_as() on all ranks
            into = _Items(error)
        rules = TargetRules(is_partial=True)
        options = LoadOptions(wrapped(into), into, rules=rules, is_elastic=True, only_chunks=True)
        self.manager.load_as(options, self._found)
        for number, item in enumerate(plan.items):
            values, target = chunks[number].data, targets.get(number)
            if target is None:
                stream = BytesIO(values.numpy().tobytes())
                # The planner runs what is in the bytes: they are read before without that.
                load_object(item.storage_index.fqn, stream, self.manager.safe_globals)
                stream.seek(0)
                planner.load_bytes(item, stream)
                continue
            if values.dtype is not target.dtype:
                target.detach().copy_(values)
            planner.commit_tensor(item, target)
        return _done(None)

    def _merged(self, reports: Sequence[bytes]) -> str:
        """Merge the plans of all images, on the root; returns text of the metadata of all."""
        allowed = SafeGlobals(self.manager.safe_globals)
        told = (descriptions.unpack(report, dict, allowed) for report in reports)
        plans = {shard: plan for of_rank in told for shard, plan in of_rank.items()}
        merged = merge_plans([plan for _, plan in sorted(plans.items())])
        # Tensors of one shape, sharded alike, have one list, which is pickled once.
        lists: dict[tuple[Any, ...], Any] = {}
        for saved in merged.metadata.state_dict_metadata.values():
            if isinstance(saved, TensorStorageMetadata):
                key = tuple((chunk.offsets, chunk.sizes) for chunk in saved.chunks)
                saved.chunks = lists.setdefault(key, saved.chunks)
        sizes = (
            WriteResult(item.index, 0, descriptions.StorageInfo("-", 0, item.bytes_io_data.nbytes))
            for plan in merged.plans
            for item in plan.items
            if item.bytes_io_data is not None
        )
        pickled, _ = descriptions.pickled_metadata(merged.metadata, sizes)
        return base64.b64encode(pickled).decode()

    def _chunk(self, item: ReadItem, target: torch.Tensor | None) -> Chunk:
        """Return the chunk to fill for an item: new memory where the target cannot be it."""
        name, begins = item.storage_index.fqn, item.storage_index.offset
        saved: Any = self._metadata.state_dict_metadata[name]
        if target is None or begins is None:
            nbytes = self._metadata.storage_data[MetadataIndex(name)].length
            return Chunk(torch.empty(nbytes, dtype=torch.uint8), name, (nbytes,), (0,))
        values, dtype = target.detach(), saved.properties.dtype
        if values.shape != item.lengths or values.is_meta:
            raise MismatchError(
                f"{name} is to get {list(item.lengths)} items, and the tensor on {values.device} "
                f"has {list(values.shape)} for them. Nothing was changed"
            )
        if values.dtype is not dtype:
            if not self._converts:
                raise MismatchError(
                    f"{name} was saved as {dtype}, and the tensor to fill is {values.dtype}. "
                    f"Nothing was changed. NodeStorageReader(allow_dtype_change=True) converts"
                )
            values = torch.empty(values.shape, dtype=dtype, device=values.device)
        offsets = tuple(map(sum, zip(begins, item.storage_offsets, strict=True)))
        return Chunk(values, name, tuple(saved.size), offsets)


def _look(plans: dict[int, descriptions.RankPlan], image: ImageReader) -> None:
    items = ImageItems(image, ItemReader())
    if not items.is_planned:
        raise MismatchError(
            f"{image.identity} was not saved by a NodeStorageWriter: load it with what has saved "
            f"it. Nothing was changed"
        )
    plans[image.identity.rank] = items.rank_plan(image, lambda: None)


def _done(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done
