"""An image that is read part by part, for what needs its bytes and not its state in memory.

The state is rebuilt around tensors without data; single tensors, and ranges of bytes, are read when
they are asked for. Every block is verified before a byte of it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from localckpt.ids import ShardIdentity
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import copy_values
from localckpt.state_dict.assembly import find_pieces
from localckpt.state_dict.boxes import Box
from localckpt.state_dict.image_parts import ImageParts
from localckpt.state_dict.parts import SlotPart
from localckpt.state_dict.restore import ImageReader, make_tensor
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused, insert_tensors
from localckpt.state_dict.source import ShardSource
from localckpt.state_dict.tensor_table import ARRAY, TableEntry

__all__ = ["LazyImage"]


class LazyImage:
    """One image, whose tensors stay where they are; used by one thread.

    Args:
        source: Source of the image's bytes; the caller closes it.
        allowed: Allow-list for the skeleton.
        expect: Identity that the image must have.
        open_mate: Opens the image of another rank, which holds parts of tensors that this one
            lacks; the caller closes it.

    Raises:
        CorruptShardError: The image is damaged, or is not the expected one.
        UnsafeGlobalError: The skeleton names something that is not allowed.
        RestoreError: The bytes are good, but this program cannot rebuild the state.

    Attributes:
        entries: Tensors by number.
        boxes: Parts of global tensors that they are, by number; other tensors are private.
    """

    @collection_paused()
    def __init__(
        self,
        source: ShardSource,
        allowed: SafeGlobals,
        expect: ShardIdentity,
        open_mate: Callable[[int], ShardSource],
    ) -> None:
        reader = ImageReader(source, allowed, expect)
        self._header = reader.header
        self._allowed = allowed
        self._skeleton = reader.checked_skeleton()[0]
        self.entries, self.boxes, divided = reader.tables
        self._parts = reader.parts
        # By the name of a divided slot, the places of its parts in the images of all ranks.
        self._pieces: dict[str, list[tuple[ImageParts, int, int, SlotPart]]] = {}
        mates: dict[int, ImageReader] = {}
        for rank in reader.mates:
            identity = expect.checkpoint.shard(rank, expect.session_id)
            mates[rank] = ImageReader(open_mate(rank), allowed, identity, reader)
        for name, part in divided.items():
            self._pieces[name] = [_place(reader, name, part)]
        tables = {rank: mate.tables for rank, mate in mates.items()}
        for rank, pieces in find_pieces(reader.tables, expect.rank, tables).items():
            for number, name, part in pieces:
                slot = self.entries[number].slot or ""
                self._pieces[slot].append(_place(mates[rank], name, part))

    @property
    def identity(self) -> ShardIdentity:
        """Identity of the shard, with its lineage."""
        return self._header.identity

    @property
    def arrays(self) -> set[int]:
        """Numbers of the tensors that are numpy arrays in the state."""
        return {n for n, entry in enumerate(self.entries) if entry.kind == ARRAY}

    @collection_paused()
    def rebuild(self, filled: Collection[int]) -> tuple[Any, list[torch.Tensor]]:
        """Rebuild the state.

        Args:
            filled: Numbers of the tensors that are to have their values, in host memory. The others
                are on the meta device.

        Returns:
            The state, and its tensors by number.

        Raises:
            CorruptShardError, StorageError: As for :meth:`read`.
            RestoreError: An object cannot be made, perhaps because it needs values of a tensor.
        """
        tensors = [
            self.tensor(number) if number in filled else _without_data(entry)
            for number, entry in enumerate(self.entries)
        ]
        return insert_tensors(self._skeleton, tensors.__getitem__, self._allowed), tensors

    def tensor(self, number: int) -> torch.Tensor:
        """Read one tensor into new host memory; raises as :meth:`read`."""
        entry = self.entries[number]
        if entry.slot is None:
            return make_tensor(entry, {})
        if entry.slot in self._pieces:
            return self._assembled(entry, entry.slot)
        slot = self._header.slots[entry.slot]
        base = torch.empty(slot.nbytes, dtype=torch.uint8)
        memory = memory_at(base.data_ptr(), slot.nbytes)
        self._parts.read_into(self._header.data_start + slot.offset, memory)
        return make_tensor(entry, {slot.name: base})

    def run_of(self, number: int) -> tuple[int, int] | None:
        """The bytes of a tensor's values in order, as a range of the image.

        Returns:
            First byte and end; ``None`` if the values lie in another order or in several images,
            or have no data.
        """
        entry = self.entries[number]
        if entry.slot is None or entry.slot in self._pieces or not _is_contiguous(entry):
            return None
        offset = 0 if entry.view is None else entry.view[0]
        start = self._header.data_start + self._header.slots[entry.slot].offset + offset
        return start, start + math.prod(entry.shape) * entry.torch_dtype().itemsize

    def _assembled(self, entry: TableEntry, name: str) -> torch.Tensor:
        """Read a tensor whose parts are in several images."""
        base = torch.empty(entry.reach_nbytes(), dtype=torch.uint8)
        tensor = make_tensor(entry, {name: base})
        for parts, start, nbytes, part in self._pieces[name]:
            if not nbytes:
                continue
            target = part.of(tensor.detach())
            flat = torch.empty(nbytes, dtype=torch.uint8)
            parts.read_into(start, memory_at(flat.data_ptr(), nbytes))
            copy_values(target, flat.view(target.dtype).view(target.shape))
        return tensor

    def start_of(self, number: int) -> int:
        """First byte in the image of the slot of a tensor that has data."""
        name = self.entries[number].slot
        assert name is not None, "it has data"
        return self._header.data_start + self._header.slots[name].offset

    def box_of(self, number: int) -> Box | None:
        """The part of a global tensor that a tensor is; ``None`` for a private one."""
        return self.boxes.get(number)

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield a range of bytes before the digests; each part is valid until the next is asked.

        Raises:
            CorruptShardError: A block is damaged; no byte of it is given.
            StorageError: The medium failed.
        """
        return self._parts.pieces(start, stop)


def _place(reader: ImageReader, name: str, part: SlotPart) -> tuple[ImageParts, int, int, SlotPart]:
    slot = reader.header.slots[name]
    return reader.parts, reader.header.data_start + slot.offset, slot.nbytes, part


def _without_data(entry: TableEntry) -> torch.Tensor:
    if entry.slot is None:
        return make_tensor(entry, {})
    base = torch.empty(entry.reach_nbytes(), dtype=torch.uint8, device="meta")
    return make_tensor(entry, {entry.slot: base})


def _is_contiguous(entry: TableEntry) -> bool:
    if entry.view is None or 0 in entry.shape:
        return True
    expected = 1
    for size, stride in zip(reversed(entry.shape), reversed(entry.view[1]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
