"""Which file each item of a rank goes into, and where: pure functions of the save plan."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from localckpt.errors import CheckpointingException
from localckpt.global_tier.framing import Frame
from localckpt.global_tier.torch_dcp import DATA_SUFFIX
from localckpt.state_dict.layout import PAGE_NBYTES, round_up

__all__ = ["FileLayout", "Slot", "item_nbytes", "lay_out_files", "split_by_size_and_type"]

# Values of this size begin on a page: copies between memory that is not aligned alike take longer.
_PAGE_ALIGNED_NBYTES = 256 << 10
_ALIGNMENT = 64


class Slot(NamedTuple):
    """One tensor in a file.

    Attributes:
        number: Of its item in the plan.
        offset: Where its frame begins in the file.
        data: Where its values begin.
        nbytes: Of its values.
        frame: What stands around them.
    """

    number: int
    offset: int
    data: int
    nbytes: int
    frame: Frame

    @property
    def end(self) -> int:
        return self.data + self.nbytes + len(self.frame.tail)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file of a rank.

    Attributes:
        name: Of the file.
        slots: The tensors, by offset.
        others: Numbers of the items that follow them, whose sizes are known when they are saved.
        nbytes: Of the slots together.
    """

    name: str
    slots: tuple[Slot, ...]
    others: tuple[int, ...]
    nbytes: int


def lay_out_files(
    plan: SavePlan,
    frame_of: Callable[[WriteItem], Frame | None],
    *,
    prefix: str,
    bins: int,
    separation_hint: str | None = None,
) -> tuple[FileLayout, ...]:
    """Divide a rank's items among files, and place them there.

    Args:
        plan: The items.
        frame_of: The frame of an item; ``None`` for what is saved as a run of bytes.
        prefix: Begins the names of this rank's files.
        bins: How many files of about the same size there are.
        separation_hint: Items whose names begin with it go to as many files of their own.

    Raises:
        CheckpointingException: The hint cannot be part of a file's name.
    """
    if separation_hint is not None and (not separation_hint or "/" in separation_hint):
        raise CheckpointingException(
            f"separation_hint is {separation_hint!r}; it begins the names of files, so it must "
            f"be neither empty nor hold a '/'"
        )
    numbers = {id(item): number for number, item in enumerate(plan.items)}
    groups: dict[str, list[WriteItem]] = {"": []}
    for item in plan.items:
        apart = separation_hint is not None and item.index.fqn.startswith(separation_hint)
        groups.setdefault(separation_hint if apart and separation_hint else "", []).append(item)
    files: list[FileLayout] = []
    for group, items in groups.items():
        for bucket in split_by_size_and_type(bins, items):
            if bucket:
                name = f"{group}{prefix}{len(files)}{DATA_SUFFIX}"
                files.append(_place(name, bucket, numbers, frame_of))
    return tuple(files)


def split_by_size_and_type(bins: int, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide items into bins of about the same number of bytes: the largest first, each to the
    bin that has least; what is no tensor goes to the bins in turn.
    """
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    others = [item for item in items if item.type == WriteItemType.BYTE_IO]
    for i, item in enumerate(others):
        buckets[i % bins].append(item)
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    tensors.sort(key=item_nbytes, reverse=True)
    sizes = [(0, i) for i in range(bins)]
    for item in tensors:
        size, i = sizes[0]
        buckets[i].append(item)
        heapq.heapreplace(sizes, (size + item_nbytes(item), i))
    return buckets


def item_nbytes(item: WriteItem) -> int:
    """Bytes of the part of a tensor that an item is, not of the whole tensor."""
    data = item.tensor_data
    assert data is not None, "only tensors have a size before they are saved"
    return math.prod(data.chunk.sizes) * dtype_of(item).itemsize


def dtype_of(item: WriteItem) -> torch.dtype:
    """The dtype of a tensor's item."""
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _place(
    name: str,
    bucket: Sequence[WriteItem],
    numbers: dict[int, int],
    frame_of: Callable[[WriteItem], Frame | None],
) -> FileLayout:
    slots: list[Slot] = []
    others: list[int] = []
    end = 0
    for item in bucket:
        number, frame = numbers[id(item)], frame_of(item)
        if frame is None:
            others.append(number)
            continue
        nbytes = item_nbytes(item)
        alignment = PAGE_NBYTES if nbytes >= _PAGE_ALIGNED_NBYTES else _ALIGNMENT
        data = round_up(end + len(frame.head), alignment)
        slots.append(Slot(number, data - len(frame.head), data, nbytes, frame))
        end = slots[-1].end
    return FileLayout(name, tuple(slots), tuple(others), end)
