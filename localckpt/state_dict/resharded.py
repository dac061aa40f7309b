"""Tensors of a state that is filled with parts of saved shards, whatever ranks saved them."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from localckpt.errors import MismatchError
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import (
    copy_values,
    integer_view,
    is_flat,
    is_host_run,
    narrowed,
)
from localckpt.state_dict.basic import PlainState, TensorAwareStateDict
from localckpt.state_dict.global_view import Job, boxes_of, named
from localckpt.state_dict.regions import (
    Region,
    cuts_of,
    flat_rectangles,
    local_starts,
    volume,
    whole,
)
from localckpt.state_dict.replicated import without_markers
from localckpt.state_dict.runs import PartReceiver, Reservation, RowRuns
from localckpt.state_dict.skeleton import collection_paused, find_tensors
from localckpt.state_dict.source import scatter
from localckpt.state_dict.targets import find_overlaps
from localckpt.state_dict.values import Unit, placed, root_of

__all__ = [
    "FilledPart",
    "Filling",
    "WantedTensor",
    "beside",
    "find_wanted",
    "is_expanded",
    "overlapping_keys",
    "require_one",
    "take_values",
    "with_values",
]


@dataclass(frozen=True, eq=False)
class WantedTensor:
    """Tensor that is to be filled, as a part of a global tensor.

    Attributes:
        key: Key of the global tensor.
        shape: Shape of the global tensor.
        region: Elements of it that the tensor has.
        tensor: The tensor.
    """

    key: str
    shape: tuple[int, ...]
    region: Region
    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def run_of(self, part: Region, row_runs: RowRuns) -> memoryview | None:
        """Return the bytes of a part of the tensor; ``None`` if they are no run of host memory."""
        local = self.tensor
        rows = row_runs.find(self.region, part)
        if rows is None or not (nbytes := local.nbytes) or not is_host_run(local):
            return None
        _, count = row_runs.find(self.region, self.region) or rows
        row_nbytes = nbytes // count
        return memory_at(local.data_ptr() + rows[0] * row_nbytes, rows[1] * row_nbytes)

    def fill(self, first: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> int:
        """Copy a rectangle of the global tensor into the tensor.

        Args:
            first, sizes: The rectangle.
            values: Its values, as integers of the item's size or as bytes.

        Returns:
            Number of items.

        Raises:
            ValueError: The rectangle is not one that the tensor has.
        """
        starts = local_starts(self.region, first, sizes)
        local = self.tensor.detach()
        extra = len(self.region) - local.dim()
        if extra:
            local = local[(None,) * extra]
        target = narrowed(local, starts, sizes)
        if values.dtype == torch.uint8:
            values = integer_view(values, target.itemsize).view(tuple(sizes))
        with torch.no_grad():
            copy_values(target, values.view(target.dtype))
        return math.prod(sizes)


class Filling:
    """Filling of this rank's tensors, by several threads; counts what each has got.

    Args:
        rank: This rank.
        expected: Tensors with the numbers of items that each is to get.
    """

    def __init__(self, rank: int, expected: Sequence[tuple[WantedTensor, int]]) -> None:
        self.rank = rank
        self.row_runs = RowRuns()
        self._left = {id(wanted): count for wanted, count in expected}
        self._wanted = [wanted for wanted, _ in expected]
        self._lock = threading.Lock()

    def reserve(self, runs: Sequence[tuple[PartReceiver, int, int]]) -> Reservation:
        """Return where runs go that are read straight into tensors."""
        memory, counts = [], []
        for part, offset, nbytes in runs:
            assert isinstance(part, FilledPart), "it is this rank's"
            assert part.memory is not None, "it takes runs"
            memory.append(part.memory[offset : offset + nbytes])
            counts.append((part.tensors[0], nbytes))

        def done() -> None:
            for wanted, nbytes in counts:
                self.count(wanted, nbytes // wanted.tensor.itemsize)

        return Reservation(memory, done)

    def count(self, wanted: WantedTensor, items: int) -> None:
        """Note that a tensor has got so many items."""
        with self._lock:
            self._left[id(wanted)] -= items

    def require_full(self) -> None:
        """Check that every tensor has got as many items as it is to get.

        Raises:
            MismatchError: One has not.
        """
        if odd := [wanted.key for wanted in self._wanted if self._left[id(wanted)]]:
            raise MismatchError(
                f"{len(odd)} tensors were not filled as planned, {odd[0]!r} among them. They may "
                f"be partly filled; load again"
            )


class FilledPart:
    """Part of this rank's tensors that is filled; a :class:`PartReceiver`.

    Args:
        filling: Filling that the part belongs to.
        tensors: The tensors: all that are the same part of one global tensor.
        region: Elements of the global tensor that the part is.

    Attributes:
        memory: Bytes of the part, if it is one run of one tensor in host memory.
    """

    def __init__(self, filling: Filling, tensors: Sequence[WantedTensor], region: Region) -> None:
        self.channel = filling
        self.tensors = tensors
        self._region = region
        self.memory = None
        if len(tensors) == 1:
            self.memory = tensors[0].run_of(region, filling.row_runs)

    def takes_direct(self, nbytes: int) -> bool:
        """Return whether the part is one run of memory."""
        return self.memory is not None

    def take_run(self, offset: int, data: memoryview) -> None:
        """Fill bytes of the part, whose items stand row by row.

        Raises:
            ValueError: The part does not have so many bytes, or not in whole items.
        """
        itemsize = self.tensors[0].tensor.itemsize
        end = offset + len(data)
        if end > volume(self._region) * itemsize or offset % itemsize or end % itemsize:
            raise ValueError(f"bytes {offset}:{end} are no items of {self.tensors[0].key!r}")
        if self.memory is not None:
            scatter(data, [self.memory[offset:end]])
            self.channel.count(self.tensors[0], len(data) // itemsize)
        elif len(data):
            flat = integer_view(torch.frombuffer(data, dtype=torch.uint8), itemsize)
            self._take_items(offset // itemsize, flat)

    def take_cut(self, first: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        """Fill a rectangle of the part; see :meth:`WantedTensor.fill`."""
        for wanted in self.tensors:
            self.channel.count(wanted, wanted.fill(first, sizes, values))

    def _take_items(self, begin: int, items: torch.Tensor) -> None:
        shape = [sum(count for _, count in runs) for runs in self._region]
        done = 0
        for starts, sizes in flat_rectangles(shape, begin, begin + len(items)):
            count = math.prod(sizes)
            rectangle = items[done : done + count].view(sizes)
            done += count
            for cut in cuts_of(self._region, self._region, starts, sizes):
                inside = [a - b for a, b in zip(cut.local, starts, strict=True)]
                self.take_cut(cut.first, cut.sizes, narrowed(rectangle, inside, cut.sizes))


@collection_paused()
def find_wanted(state: Any) -> list[WantedTensor]:
    """Find the tensors of a state that can be filled; those of which no part is known are whole.

    Raises:
        MismatchError: Two of them have one path.
    """
    tensors = find_tensors(state)
    names, tellers = named(state, tensors)
    boxes = boxes_of(tellers, tensors, Job(0, ()))
    wanted = []
    private: set[str] = set()
    for number, tensor in enumerate(tensors):
        if tensor.is_meta:
            continue
        box = boxes.get(number)
        if box is not None:
            wanted.append(WantedTensor(box.key, box.shape, box.runs, tensor))
        elif (key := names.get(id(tensor))) is not None:
            require_one(key, private)
            shape = tuple(tensor.shape)
            wanted.append(WantedTensor(key, shape, whole(shape), tensor))
    return wanted


def beside(
    wanted: Sequence[WantedTensor], saved_as: Mapping[str, str], expanded: Collection[str]
) -> tuple[list[WantedTensor], list[tuple[WantedTensor, torch.Tensor]]]:
    """Put new tensors in the places of those that are expanded, or were saved in another dtype.

    Args:
        wanted: Tensors to fill.
        saved_as: Names of saved dtypes by key.
        expanded: Keys of tensors that were saved expanded.

    Returns:
        The tensors to fill; and pairs of a tensor and the new one whose values it then takes.

    Raises:
        MismatchError: Items of a tensor share memory, and were saved apart.
    """
    result, pairs = [], []
    for one in wanted:
        dtype, given = saved_as.get(one.key, one.dtype), one.tensor
        if is_expanded(given) and one.key not in expanded:
            raise MismatchError(
                f"the state to load into was left as it is: items of {one.key!r} share memory, as "
                f"expand() makes them, and were saved apart. Give a clone() of it"
            )
        if dtype != one.dtype or is_expanded(given):
            values = torch.empty(given.shape, dtype=getattr(torch, dtype), device=given.device)
            pairs.append((one, values))
            one = replace(one, tensor=values)
        result.append(one)
    return result, pairs


def take_values(pairs: Iterable[tuple[WantedTensor, torch.Tensor]]) -> None:
    """Give tensors the values of others, which are filled.

    Raises:
        MismatchError: Items that share memory in a tensor, as ``expand()`` makes them, have
            different values.
    """
    # Else tensors that were made in inference mode could not be changed.
    with torch.inference_mode():
        for one, values in pairs:
            given = one.tensor
            for dim, (size, stride) in enumerate(zip(given.shape, given.stride(), strict=True)):
                if size > 1 and not stride:
                    first, items = values.narrow(dim, 0, 1), integer_view(values)
                    if not torch.equal(items, integer_view(first).expand_as(items)):
                        raise MismatchError(
                            f"items of {one.key!r} share memory, as expand() makes them, and were "
                            f"saved with different values. Other tensors are filled. Give a "
                            f"clone() of it"
                        )
                    given, values = given.narrow(dim, 0, 1), first
            if given.dtype == values.dtype:
                copy_values(given, values)
            else:
                given.copy_(values)


def require_one(key: str, found: set[str]) -> None:
    """Note the path of a tensor.

    Raises:
        MismatchError: It is the path of another one, too.
    """
    if key in found:
        raise MismatchError(
            f"{key!r} is the path of two tensors, as keys with dots in them, or numbers beside "
            f"their texts, make it: only as many ranks as have saved them, with the same sharding, "
            f"can load them. Nothing was changed. Save them under other keys"
        )
    found.add(key)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether items of a tensor share memory."""
    return tensor.layout is torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def overlapping_keys(wanted: Sequence[WantedTensor]) -> list[tuple[str, str]]:
    """Return the keys of tensors that share memory, in pairs."""
    return find_overlaps((w.key, w.tensor) for w in wanted if is_flat(w.tensor))


def with_values(state: TensorAwareStateDict, units: Sequence[Unit]) -> Any:
    """Return a state with saved values in their places; its own containers are not changed.

    Args:
        state: The state, wrapped, with tensors that are filled in place.
        units: The values.

    Raises:
        MismatchError: The state has no place for a value.
    """
    try:
        root = placed(without_markers(root_of(state)), units)
    except LookupError as error:
        raise MismatchError(
            f"the state to load into differs from the saved one, and was left as it is: it has no "
            f"place for {error}, a value that was saved. Give a state whose containers are at "
            f"least those of the saved one"
        ) from error
    if isinstance(state, PlainState):
        return PlainState(root)
    result = copy.copy(state)
    if "state_dict" in vars(state):
        vars(result)["state_dict"] = root
    else:
        vars(result).update(root)
    return result
