"""A TensorAwareStateDict for states made of nested dicts, lists, tuples and dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.state_dict.base import TensorAwareStateDict
from localckpt.state_dict.containers import map_tensors, named_tensors
from localckpt.state_dict.stateful import own_states

__all__ = ["BasicTensorAwareStateDict", "PlainState", "unwrapped", "wrapped"]


@dataclass(frozen=True, slots=True)
class _Hollow:
    """Stands where a tensor was taken out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """Wraps any nesting of dict, list, tuple, named tuple and dataclass; tensors on any device.

    The containers that were given are never changed: where tensors are replaced, the containers
    around them are copied first. A tensor that stands in several places is taken out once for each.

    Args:
        state_dict: The state; read it back from the attribute of the same name.
    """

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._devices: list[str] | None = None

    def to_state_dict(self) -> Any:
        """The wrapped state."""
        return self.state_dict

    def pop_tensors(self) -> list[torch.Tensor]:
        tensors = list(self.tensors)
        self.state_dict = map_tensors(
            self.state_dict, lambda t: _Hollow(tuple(t.shape), t.dtype, str(t.device))
        )
        self._is_hollow = True
        return tensors

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        self._refuse_hollow()
        return (tensor for _, tensor in named_tensors(self.state_dict))

    @property
    def is_hollow(self) -> bool:
        return self._is_hollow

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        if not self._is_hollow:
            raise CheckpointingException("this state has its tensors: pop_tensors() comes first")
        tensors = list(tensor_data)
        places = self._count(_Hollow)
        if len(tensors) != places:
            raise MismatchError(f"{len(tensors)} tensors given for {places} places")
        remaining = iter(tensors)
        self.state_dict = map_tensors(self.state_dict, lambda _: next(remaining), _Hollow)
        self._is_hollow = False

    def init_tensors(self) -> None:
        if not self._is_hollow:
            raise CheckpointingException("this state has its tensors: pop_tensors() comes first")
        self.state_dict = map_tensors(
            self.state_dict,
            lambda h: torch.empty(h.shape, dtype=h.dtype, device=h.device),
            _Hollow,
        )
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._refuse_hollow()
        if self._devices is None:
            self._devices = [str(tensor.device) for tensor in self.tensors]
        self.state_dict = map_tensors(
            self.state_dict,
            lambda t: t.detach().to("cpu", non_blocking=non_blocking, copy=True),
        )

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self._refuse_hollow()
        if self._devices is None:
            return
        devices = iter(self._devices)
        self.state_dict = map_tensors(
            self.state_dict, lambda t: t.to(next(devices), non_blocking=non_blocking)
        )
        self._devices = None

    def remember_devices(self, original: BasicTensorAwareStateDict) -> None:
        """Let :meth:`restore_tensor_device` move the tensors to where ``original`` has its own."""
        self._devices = [str(tensor.device) for tensor in original.tensors]

    def _refuse_hollow(self) -> None:
        if self._is_hollow:
            raise CheckpointingException(
                "this state is hollow: its tensors were popped and not inserted again"
            )

    def _count(self, leaf: type) -> int:
        found: list[Any] = []
        map_tensors(self.state_dict, found.append, leaf)
        return len(found)


class PlainState(BasicTensorAwareStateDict):
    """What a manager wraps a plain object in; whoever loads it gets the plain object again."""


def wrapped(state: Any) -> TensorAwareStateDict:
    """What a user gave to save, or to load into, as the managers handle it."""
    return state if isinstance(state, TensorAwareStateDict) else PlainState(own_states(state))


def unwrapped(state: Any) -> Any:
    """What :func:`wrapped` was given."""
    return state.state_dict if isinstance(state, PlainState) else state
