"""Items of a checkpoint on shared storage that one rank's image has, and the files they go to.

The keys are those that DCP's planner gives the same state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from localckpt.errors import MismatchError, RestoreError
from localckpt.global_tier.data_files import file_nbytes
from localckpt.global_tier.images import ItemPlace, envelope_name, envelope_of
from localckpt.global_tier.metadata import RankPlan, create_write_items
from localckpt.global_tier.staging import FileLayout, ItemReader, frame_of, lay_out_in_order
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import is_number, narrowed
from localckpt.state_dict.basic import BasicTensorAwareStateDict
from localckpt.state_dict.boxes import Box, RankSet, Rectangle, local_starts, rectangles_of
from localckpt.state_dict.global_view import has_other_order, shard_runs
from localckpt.state_dict.names import ABOUT, CLASS, MODULE, OBJECTS, ORDER, OURS, PATHS
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.skeleton import collection_paused, take_tensors
from localckpt.state_dict.values import digest_of

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MEGATRON = "megatron.core.dist_checkpointing.mapping"
# Values that need no walk through what they hold.
_LEAVES = (int, float, bool, str, bytes, type(None))

# Writes a file of some name, of some bytes or of any number, with a content.
WriteFile = Callable[[str, int | None, Callable[[], Iterable[bytes | memoryview]]], None]


class ImageItems:
    """Items of one rank's image, and their values, which each method reads from it anew.

    ``planner`` knows the objects of the state; the ``places`` of tensors are in the image.
    """

    @collection_paused()
    def __init__(self, image: ImageReader, objects: ItemReader) -> None:
        self._saved_by = image.identity.rank
        self.lineage = image.identity.lineage
        self._reader = objects
        self.planner = DefaultSavePlanner()
        self.places: dict[MetadataIndex, ItemPlace] = {}
        self._world_size = image.identity.world_size
        self._items: list[WriteItem] = []
        self._ranks: dict[MetadataIndex, RankSet] = {}
        # Items that other ranks may have otherwise, also where the image says they are equal.
        self._own: set[MetadataIndex] = set()
        self._numbers: dict[int, int] = {}
        self._is_of_loop = False
        # Of a state that a planner has divided: the tensors with the bytes that it made of objects.
        self._made: dict[MetadataIndex, int] = {}
        self._objects: frozenset[str] = frozenset()
        self._stored = {n for n, entry in enumerate(image.entries) if entry.slot is not None}
        self._rebuild(image)
        for key, value in self.planner.state_dict.items():
            self._add(key, value, image)
        if self.is_planned:
            for number, box in image.tables.boxes.items():
                self._add_planned(box, number)
        self.plan = SavePlan(self._items, planner_data=self.planner.mappings)

    @property
    def is_planned(self) -> bool:
        """True for items that a planner has made before the save, whose keys are in the boxes."""
        return not self.planner.flatten_state_dict

    def rank_plan(self, image: ImageReader, before_read: Callable[[], None]) -> RankPlan:
        """The items with the digests of their values; ``before_read`` may raise what ends it."""
        compared = self._own if self._world_size > 1 else ()
        digests = {index: self._digest(index, image, before_read) for index in compared}
        return RankPlan(self.plan, digests, self._ranks)

    def _rebuild(self, image: ImageReader) -> None:
        filled = image.arrays
        try:
            self._take(*image.rebuild(filled))
        except RestoreError:
            # An object looks at the values of tensors while it is made.
            filled = set(range(len(image.entries)))
            self._take(*image.rebuild(filled))
        needed = {
            self._numbers[id(tensor)]
            for value in self.planner.state_dict.values()
            if self._tensors_of(value) is None and type(value) not in _LEAVES
            for tensor in take_tensors(value).tensors
            if id(tensor) in self._numbers
        }
        if not needed <= filled:
            self._take(*image.rebuild(filled | needed))

    def _take(self, state: Any, tensors: Sequence[torch.Tensor]) -> None:
        if isinstance(state, BasicTensorAwareStateDict):
            state = state.state_dict
        if isinstance(state, dict) and isinstance(about := state.get(OURS), dict):
            if PATHS in about:
                self._objects, state = frozenset(about[OBJECTS]), {}
                self.planner = DefaultSavePlanner(flatten_state_dict=False)
                self.planner.mappings = about[PATHS]
            else:
                self._is_of_loop, state = True, _for_others(state, about.get(ABOUT, {}))
        if not isinstance(state, dict):
            raise MismatchError(
                f"the state is a {type(state).__name__}, and the keys of a checkpoint on shared "
                f"storage are those of a dict: save a dict on the nodes"
            )
        # The tensors stay alive, so that their ids are their own.
        self._kept = tensors
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        try:
            self.planner.set_up_planner(state)
        except ValueError as error:
            # Keys with dots in them, or that are no text.
            raise MismatchError(
                f"torch.distributed.checkpoint has one key for two values of the state ({error}): "
                f"give one of them another key. Nothing was drained"
            ) from error

    def _tensors_of(self, value: Any) -> list[int] | None:
        """Numbers of the plain tensors that hold a tensor's values; ``None`` for an object."""
        if isinstance(value, DTensor):
            inner = [value._local_tensor]
        elif isinstance(value, ShardedTensor):
            inner = [shard.tensor for shard in value.local_shards()]
        else:
            inner = [value]
        numbers = [self._numbers.get(id(t), -1) if type(t) in _PLAIN else -1 for t in inner]
        return numbers if self._stored.issuperset(numbers) else None

    def _add(self, key: str, value: Any, image: ImageReader) -> None:
        numbers = self._tensors_of(value)
        if isinstance(value, DTensor) and numbers:
            box = self._box_of(key, value, image.tables.boxes.get(numbers[0]))
            if box is not None:
                self._add_box(key, value, box, numbers[0])
            return
        if type(value).__module__ == _MEGATRON:
            raise MismatchError(
                f"{key} is a {type(value).__name__} of Megatron-Core, which "
                f"torch.distributed.checkpoint does not know: it would be an object, and no part "
                f"of a tensor. Megatron-Core's own dist_checkpointing saves it to shared storage. "
                f"Nothing was drained"
            )
        is_odd = isinstance(value, torch.Tensor) and not (numbers and is_number(value.dtype))
        if is_odd and self._is_of_loop:
            # torch.distributed.checkpoint would not return it as it was: the image does.
            return
        items = create_write_items(key, value)
        self._items += items
        if numbers is None:
            self._own |= {item.index for item in items}
            return
        for item, number in zip(items, numbers, strict=True):
            self.places[item.index] = ItemPlace(number)
            if isinstance(value, ShardedTensor):
                self._ranks[item.index] = RankSet.of([self._saved_by])
                if len(value.metadata().shards_metadata) == self._world_size:
                    continue
            self._own.add(item.index)

    def _box_of(self, key: str, value: DTensor, box: Box | None) -> Box | None:
        """The part that an image has of a DTensor; ``None`` if its rank is not in the mesh."""
        if box is None:
            if (why := why_misdescribed(value)) is not None:
                raise MismatchError(
                    f"{key} of rank {self._saved_by} is a DTensor of which "
                    f"torch.distributed.checkpoint would describe another part: {why}. Save what "
                    f"its redistribute() or full_tensor() gives. Nothing was drained"
                )
            # A mesh is pickled with the place of the rank that saves it.
            if value.device_mesh.get_coordinate() is None:
                return None
        if box is None or box.ranks is None or box.shape != tuple(value.shape):
            raise RestoreError(
                f"{key} of rank {self._saved_by} is a DTensor of shape {list(value.shape)}, and "
                f"the image's table of boxes says {None if box is None else list(box.shape)}: "
                f"another program has written it. Nothing was drained"
            )
        return box

    def _add_planned(self, box: Box, number: int) -> None:
        if box.key not in self._objects:
            self._add_box(box.key, self._kept[number], box, number)
            return
        index, data = MetadataIndex(box.key), BytesIOWriteData(box.shape[0])
        self._items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=data))
        self._made[index] = number

    def _add_box(self, key: str, value: Any, box: Box, number: int) -> None:
        local = value.to_local() if isinstance(value, DTensor) else value
        properties = TensorProperties.create_from_tensor(local)
        for (offsets, sizes), part in _chunks(box):
            index = MetadataIndex(key, torch.Size(offsets))
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, properties, torch.Size(box.shape))
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self.places[index] = ItemPlace(number, part)
            # A part without items has the same place on all ranks that have none.
            if 0 not in sizes and box.ranks is not None:
                self._ranks[index] = box.ranks
                # Ranks that are not of this mesh may have the same part, too.
                if len(box.ranks) > 1 or value.device_mesh.size() < self._world_size:
                    self._own.add(index)

    def _digest(
        self, index: MetadataIndex, image: ImageReader, before_read: Callable[[], None]
    ) -> str:
        before_read()
        place = self.places.get(index)
        if place is None:
            # It has its tensors, and nothing stands for others.
            return digest_of(self.planner.lookup_object(index), str)
        entry = image.entries[place.number]
        shape = entry.shape if place.part is None else place.part.sizes
        hasher = xxhash.xxh3_64(f"{entry.dtype} {shape}".encode())
        for piece in _values(image, place):
            hasher.update(piece)
            before_read()
        return hasher.hexdigest()

    def write(
        self, image: ImageReader, plan: SavePlan, unequal: Collection[str], write: WriteFile
    ) -> tuple[list[WriteResult], int]:
        """Write items and the envelope of the image; return their places and its size.

        ``write`` gets the size of a file that need not be written again; pickles of equal objects
        may differ.
        """
        # By its owner, so that an attempt on another rank goes on with the same files.
        starts = {
            number: image.start_of(place.number)
            for number, item in enumerate(plan.items)
            if (place := self.places.get(item.index)) is not None
        }
        results: list[WriteResult] = []
        for file in lay_out_in_order(plan, starts, f"__{self._saved_by}_"):
            contents = {number: self._object(image, plan.items[number]) for number in file.others}
            nbytes = None if contents else file_nbytes(file.nbytes)
            write(file.name, nbytes, partial(self._content, image, plan, file, contents))
            results += file.results(plan, contents)
        own = {item.index for item in plan.items}
        places = self.places.items()
        there = {i: place for i, place in places if i in own or i.fqn not in unequal}
        content_nbytes, content = envelope_of(image, there)
        nbytes = file_nbytes(content_nbytes)
        write(envelope_name(self._saved_by), nbytes, content)
        return results, nbytes

    def _content(
        self,
        image: ImageReader,
        plan: SavePlan,
        file: FileLayout,
        contents: Mapping[int, memoryview],
    ) -> Iterator[bytes | memoryview]:
        at = 0
        for slot in file.slots:
            yield bytes(slot.offset - at)
            yield slot.frame.head
            yield from _values(image, self.places[plan.items[slot.number].index])
            yield slot.frame.tail
            at = slot.end
        yield from contents.values()

    def _object(self, image: ImageReader, item: WriteItem) -> memoryview:
        if (number := self._made.get(item.index)) is not None:
            return memoryview(image.tensor(number).numpy().tobytes())
        value = self._reader.read(item, self.planner)
        if isinstance(value, torch.Tensor):
            head, tail = frame_of(value.dtype, value.shape)
            value = value.contiguous()
            return memoryview(head + bytes(memory_at(value.data_ptr(), value.nbytes)) + tail)
        return value


def _values(image: ImageReader, place: ItemPlace) -> Iterator[memoryview]:
    run = image.run_of(place.number)
    if run is not None and place.part is None:
        yield from image.pieces(*run)
    else:
        tensor = image.tensor(place.number).detach()
        if place.part is not None:
            tensor = narrowed(tensor, *place.part)
        tensor = tensor.contiguous()
        yield memory_at(tensor.data_ptr(), tensor.nbytes)


def _for_others(state: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what other programs load of a state that a training loop saved.

    That is its modules, and its optimizers with the names of parameters in place of their numbers:
    those in the optimizer's module, or with the module before them where there are several.
    """
    modules = {key: state[key] for key, names in about.items() if MODULE in names[CLASS]}
    optimizers = {}
    for key, names in about.items():
        if ORDER in names and {"state", "param_groups"} <= state[key].keys():
            (order,) = names[ORDER]
            texts = order.split("\n")
            of_one = (m for m in modules if all(text.startswith(f"{m}.") for text in texts))
            prefix = "" if (module := next(of_one, None)) is None else f"{module}."
            name = {n: text.removeprefix(prefix) or str(n) for n, text in enumerate(texts)}
            optimizers[key] = {
                **state[key],
                "state": {name.get(k, k): value for k, value in state[key]["state"].items()},
                "param_groups": [
                    {**group, "params": [name.get(n, n) for n in group["params"]]}
                    for group in state[key]["param_groups"]
                ],
            }
    return modules | optimizers


def _chunks(box: Box) -> Iterator[tuple[Rectangle, Rectangle | None]]:
    """Yield the parts of a box without gaps, and their places in a tensor that has several."""
    is_whole = all(len(runs) == 1 for runs in box.runs)
    for offsets, sizes in rectangles_of(box.runs):
        part = None if is_whole else Rectangle(local_starts(box.runs, offsets, sizes), sizes)
        # A part without items begins where the tensor ends, as torch has it.
        pairs = zip(offsets, sizes, box.shape, strict=True)
        begins = tuple(start if count else size for start, count, size in pairs)
        yield Rectangle(begins, sizes), part


def why_misdescribed(value: DTensor) -> str | None:
    """Say why the part that a rank has of a DTensor is not the one that would be described."""
    if any(placement.is_partial() for placement in value.placements):
        return "it has a Partial placement: each rank has terms of a sum"
    if has_other_order(value):
        return "its shard_order is not the order of the dimensions of its mesh"
    mesh, shape = value.device_mesh, tuple(value.shape)
    if (coordinate := mesh.get_coordinate()) is None:
        return None
    runs = shard_runs(shape, mesh.shape, coordinate, value.placements)
    if runs is None:
        return f"its placements {value.placements} are not known"
    if any(len(along) > 1 for along in runs):
        return "this rank has several runs of its rows or columns, and one would be described"
    sizes = [sum(count for _, count in along) for along in runs]
    local = list(value._local_tensor.shape)
    if local != sizes:
        return f"its placements give a local tensor of shape {sizes}, and it has one of {local}"
    return None


class Merged(NamedTuple):
    """Plans of all ranks, in which each value is written once; ``unequal`` keys differ on ranks."""

    plans: list[SavePlan]
    metadata: Metadata
    unequal: list[str]


def choose_readers(
    lacking: Sequence[int], readable: Sequence[Collection[int]]
) -> dict[int, list[int]]:
    """Choose ranks to read the shards that the nodes of their own ranks lack, where any can."""
    # The others have a shard of their own to read.
    loads = [int(rank not in lacking) for rank in range(len(readable))]
    chosen: dict[int, list[int]] = {}
    for owner in lacking:
        able = [rank for rank, shards in enumerate(readable) if owner in shards]
        if able:
            reader = min(able, key=lambda rank: (loads[rank], rank))
            loads[reader] += 1
            chosen.setdefault(reader, []).append(owner)
    return chosen


def merge_plans(parts: Sequence[RankPlan]) -> Merged:
    """Merge the plans of all ranks, in rank order; a pure function."""
    firsts, diverged = _firsts_of_unequal(parts), _diverged(parts)
    plans = [
        replace(
            part.plan,
            items=[
                item
                for item in part.plan.items
                if item.type == WriteItemType.SHARD or firsts.get(item.index.fqn, rank) == rank
            ],
        )
        for rank, part in enumerate(parts)
    ]
    try:
        finals, metadata = DefaultSavePlanner().create_global_plan(plans)
    except ValueError as error:
        raise MismatchError(
            f"the parts that ranks have of a tensor overlap, or do not make it up: {error}. "
            f"Nothing was drained"
        ) from error
    return Merged(finals, metadata, sorted({*firsts, *diverged}))


def _firsts_of_unequal(parts: Sequence[RankPlan]) -> dict[str, int | None]:
    """Find keys whose values differ, and the first rank that has each of them.

    No rank is the first to have a value that is under the key of a global tensor of others.
    """
    found: dict[str, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    sharded: set[str] = set()
    for rank, part in enumerate(parts):
        for item in part.plan.items:
            if item.type == WriteItemType.SHARD:
                sharded.add(item.index.fqn)
            else:
                found[item.index.fqn][rank] = (part.digests.get(item.index), item.type)
    return {
        key: None if key in sharded else min(values)
        for key, values in found.items()
        if len(set(values.values())) > 1 or key in sharded
    }


def _diverged(parts: Sequence[RankPlan]) -> set[str]:
    """Find keys of global tensors of which ranks differ that the image says are equal.

    If parts of one name differ that are on meshes of their own, they are of two tensors, which is a
    MismatchError.
    """
    sets: dict[MetadataIndex, list[tuple[int, RankSet]]] = {}
    diverged: set[str] = set()
    for rank, part in enumerate(parts):
        for index, ranks in part.ranks.items():
            digest = part.digests.get(index)
            known = sets.setdefault(index, [])
            first = next((first for first, owners in known if rank in owners), None)
            if first is not None:
                if digest != parts[first].digests.get(index):
                    diverged.add(index.fqn)
                continue
            known.append((rank, ranks))
            first = known[0][0]
            if first != rank and (digest is None or digest != parts[first].digests.get(index)):
                raise MismatchError(
                    f"{index.fqn} at {list(index.offset or ())} is on ranks {first} and {rank}, "
                    f"and their values differ: two global tensors have one name. Give one of them "
                    f"another key. Nothing was drained"
                )
    return diverged


def fingerprint(merged: Merged) -> str:
    """Digest of what is written where, the same for the same images."""

    def row(item: WriteItem) -> tuple[Any, ...]:
        name, data = (item.index.fqn, item.index.offset, item.type.name), item.tensor_data
        return name if data is None else (*name, data.chunk.sizes, data.properties.dtype)

    rows = [[row(item) for item in plan.items] for plan in merged.plans]
    return xxhash.xxh3_128_hexdigest(repr(rows).encode())
