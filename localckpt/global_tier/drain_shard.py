"""One shard in a drain, on the rank that reads it: its items, and the files that they go to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from localckpt.global_tier.drain_files import DrainFiles, lay_out_in_order
from localckpt.global_tier.drain_items import ImageItems, RankPlan
from localckpt.global_tier.drain_plan import own_key
from localckpt.global_tier.messages import Written
from localckpt.global_tier.metadata import StorageInfo
from localckpt.global_tier.staging import FileLayout, Slot
from localckpt.global_tier.write_items import ItemReader, frame_of
from localckpt.lineage import Lineage
from localckpt.memory.host_memory import memory_at
from localckpt.state_dict.lazy_image import LazyImage
from localckpt.state_dict.skeleton import collection_paused
from localckpt.storage.kept_shard import KeptShard

__all__ = ["DrainedShard"]


class DrainedShard:
    """One shard; :meth:`plan` comes before :meth:`write`.

    Args:
        shard: The shard, of this rank or of another one whose node lacks it.
        objects: Reads the objects beside the tensors.

    Attributes:
        lineage: Lineage of the epoch that saved it; known once it is planned.
    """

    def __init__(self, shard: KeptShard, objects: ItemReader) -> None:
        self.lineage: Lineage | None = None
        self._shard = shard
        self._owner = shard.identity.rank
        self._objects = objects
        self._suffix = own_key("", self._owner)
        self._items: ImageItems | None = None

    # The items.

    def plan(self, before_read: Callable[[], None]) -> RankPlan:
        """List the items.

        Args:
            before_read: Called before each piece that is read: may raise what ends the drain.

        Raises:
            MismatchError: The state has no keys of DCP, or a DTensor that DCP cannot describe.
            Exception: As :meth:`KeptShard.use`.
        """

        def list_items(image: LazyImage) -> tuple[ImageItems, RankPlan]:
            self.lineage = image.identity.lineage
            with collection_paused():
                items = ImageItems(image)
            return items, items.rank_plan(image, before_read)

        self._items, plan = self._shard.use(list_items)
        return plan

    def digests(
        self, indices: Sequence[MetadataIndex], before_read: Callable[[], None]
    ) -> dict[MetadataIndex, str]:
        """Digests of the values of some items; the arguments and errors are those of :meth:`plan`.

        Args:
            indices: The items.
        """
        items = self._the_items
        return self._shard.use(
            lambda image: {index: items.digest(index, image, before_read) for index in indices}
        )

    # Their values.

    def write(self, plan: SavePlan, files: DrainFiles) -> Written:
        """Write the items that are this shard's to write; raises as :meth:`KeptShard.use`."""
        return self._shard.use(lambda image: self._write(image, plan, files))

    def _write(self, image: LazyImage, plan: SavePlan, files: DrainFiles) -> Written:
        starts = {
            number: image.start_of(self._the_items.places[key].number)
            for number, item in enumerate(plan.items)
            if (key := self._place_key(item)) is not None
        }
        results: list[WriteResult] = []
        sizes: dict[str, int] = {}
        # By its owner, so that an attempt on another rank goes on with the same files.
        for file in lay_out_in_order(plan, starts, f"__{self._owner}_"):
            if file.slots:
                sizes[file.name] = files.write_tensors(
                    file, lambda slot: self._values(image, plan.items[slot.number], slot)
                )
                places = [(slot.number, slot.offset, slot.end - slot.offset) for slot in file.slots]
            else:
                places = self._write_objects(plan, files, file, sizes)
            results += [
                WriteResult(plan.items[number].index, nbytes, StorageInfo(file.name, at, nbytes))
                for number, at, nbytes in places
            ]
        return Written(results, sizes)

    def _write_objects(
        self, plan: SavePlan, files: DrainFiles, file: FileLayout, sizes: dict[str, int]
    ) -> list[tuple[int, int, int]]:
        others = [self._object(plan.items[number]) for number in file.others]
        sizes[file.name] = files.write_objects(file, others)
        places, end = [], 0
        for number, content in zip(file.others, others, strict=True):
            places.append((number, end, len(content)))
            end += len(content)
        return places

    def _object(self, item: WriteItem) -> memoryview:
        """Bytes of an object, as a save of the state would write them."""
        planner, key = self._the_items.planner, item.index.fqn
        plain = key.removesuffix(self._suffix)
        if key not in planner.state_dict and plain in planner.state_dict:
            planner.state_dict[key] = planner.state_dict[plain]
        value = self._objects.read(item, planner)
        if isinstance(value, torch.Tensor):
            head, tail = frame_of(value.dtype, value.shape)
            return memoryview(head + bytes(_memory_of(value.contiguous())) + tail)
        return value

    def _values(self, image: LazyImage, item: WriteItem, slot: Slot) -> Iterator[memoryview]:
        key = self._place_key(item)
        assert key is not None
        place = self._the_items.places[key]
        if not slot.nbytes:
            return
        run = image.run_of(place.number)
        if run is not None and place.part is None:
            yield from image.read(*run)
            return
        tensor = place.of(image.tensor(place.number))
        yield _memory_of(tensor)

    def _place_key(self, item: WriteItem) -> MetadataIndex | None:
        """Index under which the place of an item's tensor is known; ``None`` for an object."""
        places, index = self._the_items.places, item.index
        if index in places:
            return index
        plain = MetadataIndex(index.fqn.removesuffix(self._suffix), index.offset)
        return plain if plain in places and index.fqn.endswith(self._suffix) else None

    @property
    def _the_items(self) -> ImageItems:
        assert self._items is not None, "it is planned"
        return self._items


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return memory_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else memoryview(b"")
