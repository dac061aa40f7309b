"""Items of a checkpoint on shared storage that one rank's image has.

The keys are those that DCP's planner gives the same state, and the chunks are those of the image's
table of boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from localckpt.errors import MismatchError, RestoreError
from localckpt.global_tier.metadata import create_write_items
from localckpt.global_tier.misdescribed import why_misdescribed
from localckpt.state_dict.basic import BasicTensorAwareStateDict
from localckpt.state_dict.boxes import Box, RankSet
from localckpt.state_dict.global_view import shard_runs
from localckpt.state_dict.lazy_image import LazyImage
from localckpt.state_dict.skeleton import take_tensors
from localckpt.state_dict.value_digests import digest_of

__all__ = ["ImageItems", "Place", "RankPlan"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MEGATRON = "megatron.core.dist_checkpointing.mapping"
# Values that need no walk through what they hold.
_LEAVES = (int, float, bool, str, bytes, type(None))


class Place(NamedTuple):
    """Place of one item's values in an image.

    Attributes:
        number: Number of the tensor.
        part: First index and end along each dimension of the tensor; ``None`` for all of it.
    """

    number: int
    part: tuple[tuple[int, int], ...] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the item's part of the tensor, contiguous."""
        tensor = tensor.detach()
        for dim, (start, end) in enumerate(self.part or ()):
            tensor = tensor.narrow(dim, start, end - start)
        return tensor.contiguous()


@dataclass
class RankPlan:
    """Items that one rank's image has.

    Attributes:
        plan: The items, as DCP's planner would list them.
        digests: Digests of the values that the image does not say to be equal on other ranks.
        ranks: Ranks on which the image says that a part of a global tensor is equal.
    """

    plan: SavePlan
    digests: dict[MetadataIndex, str] = field(default_factory=dict)
    ranks: dict[MetadataIndex, RankSet] = field(default_factory=dict)


class ImageItems:
    """Items of one rank's image, and their values.

    Args:
        image: The image; not used after the constructor, but for its digests.

    Raises:
        MismatchError: The state is no dict, so DCP has no keys for it. Or DCP has no form for a
            DTensor of it.
        CorruptShardError, RestoreError, UnsafeGlobalError: As for :class:`LazyImage`.

    Attributes:
        planner: Planner that knows the objects of the state by their keys; its tensors have no
            data.
        places: Places of the tensors in the image; other items are objects, whose values are in
            memory.
        plan: The items.
    """

    def __init__(self, image: LazyImage) -> None:
        self._saved_by = image.identity.rank
        self.planner = DefaultSavePlanner()
        self.places: dict[MetadataIndex, Place] = {}
        self._world_size = image.identity.world_size
        self._items: list[WriteItem] = []
        self._ranks: dict[MetadataIndex, RankSet] = {}
        # Items with values that other ranks need not have.
        self._own: set[MetadataIndex] = set()
        self._numbers: dict[int, int] = {}
        self._stored = {n for n, entry in enumerate(image.entries) if entry.slot is not None}
        self._rebuild(image)
        for key, value in self.planner.state_dict.items():
            self._add(key, value, image)
        self.plan = SavePlan(self._items, planner_data=self.planner.mappings)

    def rank_plan(self, image: LazyImage, before_read: Callable[[], None]) -> RankPlan:
        """The items with the digests of their values, read from the image.

        Args:
            image: The image.
            before_read: Called before each piece is read: may raise what ends the drain.
        """
        own = {}
        if self._world_size > 1:
            own = {index: self.digest(index, image, before_read) for index in self._own}
        return RankPlan(self.plan, own, self._ranks)

    # The state, with values for what is saved as an object.

    def _rebuild(self, image: LazyImage) -> None:
        filled = image.arrays
        try:
            self._take(*image.rebuild(filled))
        except RestoreError:
            # An object looks at the values of tensors while it is made.
            filled = set(range(len(image.entries)))
            self._take(*image.rebuild(filled))
        needed = {n for value in self._objects() for n in self._tensors_in(value)}
        if not needed <= filled:
            self._take(*image.rebuild(filled | needed))

    def _take(self, state: Any, tensors: Sequence[torch.Tensor]) -> None:
        if isinstance(state, BasicTensorAwareStateDict):
            state = state.state_dict
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

    def _objects(self) -> Iterator[Any]:
        for value in self.planner.state_dict.values():
            if self._tensors_of(value) is None and type(value) not in _LEAVES:
                yield value

    def _tensors_in(self, value: Any) -> Iterator[int]:
        for tensor in take_tensors(value).tensors:
            if (number := self._numbers.get(id(tensor))) is not None:
                yield number

    def _tensors_of(self, value: Any) -> list[int] | None:
        """Numbers of the plain tensors that hold a tensor's values; ``None`` for an object."""
        if isinstance(value, DTensor):
            inner = [value._local_tensor]
        elif isinstance(value, ShardedTensor):
            inner = [shard.tensor for shard in value.local_shards()]
        else:
            inner = [value]
        if not all(type(tensor) in _PLAIN for tensor in inner):
            return None
        numbers = [n for t in inner if (n := self._numbers.get(id(t))) is not None]
        has_data = len(numbers) == len(inner) and self._stored.issuperset(numbers)
        return numbers if has_data else None

    # Items.

    def _add(self, key: str, value: Any, image: LazyImage) -> None:
        numbers = self._tensors_of(value)
        if isinstance(value, DTensor) and numbers:
            box = image.box_of(numbers[0]) or self._computed_box(key, value)
            if box is not None and box.shape != tuple(value.shape):
                raise RestoreError(
                    f"{key} of rank {self._saved_by} is a DTensor of shape {list(value.shape)}, "
                    f"and the image's table of boxes says {list(box.shape)}: another program has "
                    f"written it. Nothing was drained"
                )
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
        items = create_write_items(key, value)
        self._items += items
        if numbers is None:
            self._own |= {item.index for item in items}
            return
        for item, number in zip(items, numbers, strict=True):
            self.places[item.index] = Place(number)
            # Shards of a ShardedTensor are nowhere else.
            if not isinstance(value, ShardedTensor) and not self._is_on_all(image.box_of(number)):
                self._own.add(item.index)

    def _is_on_all(self, box: Box | None) -> bool:
        return box is not None and (box.ranks is None or len(box.ranks) == self._world_size)

    def _computed_box(self, key: str, value: DTensor) -> Box | None:
        """Compute the box of a DTensor that the image has none for, as format 1 has none.

        Returns:
            The box, which does not name the ranks with equal values; ``None`` if the rank that
            saved it is not in the tensor's mesh.

        Raises:
            MismatchError: The rank has another part than DCP would say.
        """
        if (why := why_misdescribed(value)) is not None:
            raise MismatchError(
                f"{key} of rank {self._saved_by} is a DTensor of which "
                f"torch.distributed.checkpoint would describe another part: {why}. Save what its "
                f"redistribute() or full_tensor() gives. Nothing was drained"
            )
        mesh, shape = value.device_mesh, tuple(value.shape)
        # A mesh is pickled with the place of the rank that saves it.
        if (coordinate := mesh.get_coordinate()) is None:
            return None
        runs = shard_runs(shape, mesh.shape, coordinate, value.placements)
        return None if runs is None else Box(key, shape, runs, None)

    def _add_box(self, key: str, value: DTensor, box: Box, number: int) -> None:
        properties = TensorProperties.create_from_tensor(value.to_local())
        for offsets, sizes, part in _chunks(box):
            index = MetadataIndex(key, torch.Size(offsets))
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, properties, torch.Size(box.shape))
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self.places[index] = Place(number, part)
            # A part without items has the same place on all ranks that have none.
            if 0 in sizes:
                continue
            if box.ranks is None:
                self._own.add(index)
            else:
                self._ranks[index] = box.ranks

    # What other ranks may have otherwise.

    def digest(
        self, index: MetadataIndex, image: LazyImage, before_read: Callable[[], None]
    ) -> str:
        """Digest of an item's values, read from the image.

        Args:
            index: The item.
            image: The image.
            before_read: As for :meth:`rank_plan`.
        """
        before_read()
        place = self.places.get(index)
        if place is None:
            # It has its tensors, and nothing stands for others.
            return digest_of(self.planner.lookup_object(index), str)
        entry = image.entries[place.number]
        shape = entry.shape
        if place.part is not None:
            shape = tuple(end - start for start, end in place.part)
        hasher = xxhash.xxh3_64(f"{entry.dtype} {shape}".encode())
        if place.part is not None:
            hasher.update(digest_of(place.of(image.tensor(place.number)), str).encode())
        elif (run := image.run_of(place.number)) is None:
            hasher.update(digest_of(image.tensor(place.number), str).encode())
        else:
            for part in image.read(*run):
                hasher.update(part)
                before_read()
        return hasher.hexdigest()


def _chunks(
    box: Box,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...] | None]]:
    """Yield the parts of a box that are one range along each dimension.

    Yields:
        Offsets in the global tensor, sizes, and the place in the local tensor. A part without
        items begins where the tensor ends, as torch has it, and so where no other part does.
    """
    is_whole = all(len(runs) == 1 for runs in box.runs)
    placed = []
    for runs, size in zip(box.runs, box.shape, strict=True):
        begin, along = 0, []
        for start, count in runs:
            along.append((start if count else size, count, (begin, begin + count)))
            begin += count
        placed.append(along)
    for chosen in product(*placed):
        yield (
            tuple(start for start, _, _ in chosen),
            tuple(count for _, count, _ in chosen),
            None if is_whole else tuple(part for _, _, part in chosen),
        )


# On one rank, for all.
