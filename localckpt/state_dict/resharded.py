"""Tensors of a state that is filled with parts of saved shards, whatever ranks saved them."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from localckpt.errors import MismatchError
from localckpt.memory.host_memory import memory_at
from localckpt.memory.tensor_bytes import copy_values, is_host_run
from localckpt.state_dict.basic import PlainState, TensorAwareStateDict
from localckpt.state_dict.direct_runs import RunTarget
from localckpt.state_dict.global_view import Job, boxes_of, named
from localckpt.state_dict.regions import Region, local_starts, whole
from localckpt.state_dict.replicated import without_markers
from localckpt.state_dict.saved_shard import integer_view, narrowed
from localckpt.state_dict.skeleton import collection_paused, take_tensors
from localckpt.state_dict.values import Unit, placed, root_of

__all__ = ["Filling", "WantedTensor", "find_wanted", "with_values"]


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

    @cached_property
    def memory(self) -> memoryview | None:
        """Bytes of the tensor, in the order of its items, if they are one run of host memory."""
        local = self.tensor.detach()
        if not local.nbytes or not is_host_run(local):
            return None
        return memory_at(local.data_ptr(), local.nbytes)

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
        if values.dtype == torch.uint8 and target.itemsize > 1:
            values = integer_view(values, target.itemsize, sizes)
        with torch.no_grad():
            copy_values(target, values.view(target.dtype))
        return math.prod(sizes)


class Filling:
    """Filling of tensors, by several threads; counts what each has got.

    Args:
        expected: Tensors with the numbers of items that each is to get.
    """

    def __init__(self, expected: Sequence[tuple[WantedTensor, int]]) -> None:
        self._left = {id(wanted): count for wanted, count in expected}
        self._wanted = [wanted for wanted, _ in expected]
        self._lock = threading.Lock()

    def fill(
        self,
        wanted: WantedTensor,
        first: Sequence[int],
        sizes: Sequence[int],
        values: torch.Tensor,
    ) -> None:
        """Fill a part of a tensor; see :meth:`WantedTensor.fill`."""
        self.count(wanted, wanted.fill(first, sizes, values))

    def count(self, wanted: WantedTensor, items: int) -> None:
        """Note that a tensor has got so many items."""
        with self._lock:
            self._left[id(wanted)] -= items

    def target(self, wanted: WantedTensor) -> RunTarget:
        """Return a tensor as one that bytes may be read straight into."""
        return _Target(self, wanted)

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


@dataclass(frozen=True)
class _Target:
    _filling: Filling
    _wanted: WantedTensor

    @property
    def region(self) -> Region:
        return self._wanted.region

    @property
    def memory(self) -> memoryview | None:
        return self._wanted.memory

    def filled(self, nbytes: int) -> None:
        self._filling.count(self._wanted, nbytes // self._wanted.tensor.itemsize)


@collection_paused()
def find_wanted(state: Any) -> list[WantedTensor]:
    """Find the tensors of a state that can be filled; those of which no part is known are whole."""
    tensors = take_tensors(state, arrays=False).tensors
    names, tellers = named(state, tensors)
    boxes = boxes_of(tellers, tensors, Job(0, ()))
    wanted = []
    for number, tensor in enumerate(tensors):
        if tensor.is_meta:
            continue
        box = boxes.get(number)
        if box is not None:
            wanted.append(WantedTensor(box.key, box.shape, box.runs, tensor))
        elif (key := names.get(id(tensor))) is not None:
            shape = tuple(tensor.shape)
            wanted.append(WantedTensor(key, shape, whole(shape), tensor))
    return wanted


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
            f"place {error} for a value that was saved"
        ) from error
    if isinstance(state, PlainState):
        return PlainState(root)
    result = copy.copy(state)
    if "state_dict" in vars(state):
        vars(result)["state_dict"] = root
    else:
        vars(result).update(root)
    return result
