"""Wrappers of a state: the interface between a trainer's state and the managers.

As in torch.distributed.checkpoint, a *stateful* value (anything with ``state_dict`` and
``load_state_dict``) at the top level of a dict is saved as its ``state_dict()``, and gets
``load_state_dict()`` called when a checkpoint is loaded into the dict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import torch

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.state_dict.containers import joined, map_tensors, named_tensors
from localckpt.state_dict.replicated import Replicated, without_marker
from localckpt.state_dict.stateful import (
    Freedom,
    freedom_of,
    is_place,
    load_module_state,
    load_optimizer,
    module_state,
)

_NVRX_CLASS = "nvidia_resiliency_ext.checkpointing.local.base_state_dict.TensorAwareStateDict"


class TensorAwareStateDict(ABC):
    """State whose tensors can be taken out, moved and put back.

    A state is *hollow* while its tensors are out. The methods are for code that works with states
    directly; the managers find tensors in any object without them. Subclasses of NVRx's class of
    the same name count as subclasses of this class.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        if cls is not TensorAwareStateDict:
            return NotImplemented
        bases = {f"{base.__module__}.{base.__qualname__}" for base in other.__mro__}
        return True if _NVRX_CLASS in bases else NotImplemented

    @abstractmethod
    def pop_tensors(self) -> list[torch.Tensor]:
        """Take all tensors out, and remember their shapes, dtypes and devices."""

    @property
    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors in the order of :meth:`pop_tensors`."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """True while the tensors are out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back, in the order of :meth:`pop_tensors`."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put uninitialised tensors of the remembered shapes, dtypes and devices back."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace each tensor by its copy in host memory."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move each tensor back to the device that it was copied from."""

    def values(self) -> ValuesView[Any]:
        """Return the values of this object's attributes, as NVRx's class does."""
        return vars(self).values()


@dataclass(frozen=True, slots=True)
class _Hollow:
    """Placeholder of a tensor that was taken out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """Wrapper of nested dicts, lists, tuples, named tuples and dataclasses with tensors.

    The wrapped containers are never changed: methods that replace tensors copy the containers
    around them. A tensor in several places is taken out once for each place.

    Args:
        state_dict: The state; read it back from the attribute of the same name.
    """

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._devices: list[str] | None = None

    def to_state_dict(self) -> Any:
        """Return the wrapped state."""
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
        tensors, places = list(tensor_data), self._places()
        if len(tensors) != len(places):
            raise MismatchError(f"{len(tensors)} tensors given for {len(places)} places")
        remaining = iter(tensors)
        self.state_dict = map_tensors(self.state_dict, lambda _: next(remaining), _Hollow)
        self._is_hollow = False

    def init_tensors(self) -> None:
        self.insert_tensors(
            torch.empty(h.shape, dtype=h.dtype, device=h.device) for h in self._places()
        )

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
        """Make :meth:`restore_tensor_device` move tensors to the devices of ``original``'s."""
        self._devices = [str(tensor.device) for tensor in original.tensors]

    def _places(self) -> list[_Hollow]:
        if not self._is_hollow:
            raise CheckpointingException("this state has its tensors: pop_tensors() comes first")
        places: list[_Hollow] = []
        map_tensors(self.state_dict, places.append, _Hollow)
        return places

    def _refuse_hollow(self) -> None:
        if self._is_hollow:
            raise CheckpointingException(
                "this state is hollow: its tensors were popped and not inserted again"
            )


class PlainState(BasicTensorAwareStateDict):
    """Wrapper that a manager puts around a plain object, and removes at loading."""


def wrapped(state: Any) -> TensorAwareStateDict:
    """Wrap a state that is to be saved, or loaded into, unless it is a wrapper already."""
    return state if isinstance(state, TensorAwareStateDict) else PlainState(own_states(state))


def unwrapped(state: Any) -> Any:
    """Undo :func:`wrapped`."""
    return state.state_dict if isinstance(state, PlainState) else state


def is_stateful(value: Any) -> bool:
    """Return whether a value has ``state_dict()`` and ``load_state_dict()``."""
    kind = type(value)
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def stateful_keys(state: Any) -> list[Any]:
    """Return the keys of a dict's stateful values; empty for anything but a dict."""
    if not isinstance(state, dict):
        return []
    return [key for key, value in state.items() if is_stateful(without_marker(value))]


def freedom_in(state: Any) -> Freedom:
    """Return which values of a dict are free: those of its stateful values."""
    below: set[str] = set()
    shapes: set[str] = set()
    for key in stateful_keys(state):
        free = freedom_of(without_marker(state[key]))
        below.update(joined((key, name)) if name else str(key) for name in free.below)
        shapes.update(joined((key, name)) for name in free.shapes)
    return Freedom(frozenset(below), frozenset(shapes))


def places_in(state: Any) -> frozenset[str]:
    """Return keys of stateful values that are a rank's place in the data, and not the job's."""
    return frozenset(
        str(key)
        for key in stateful_keys(state)
        if not isinstance(state[key], Replicated) and is_place(state[key])
    )


def own_states(state: Any) -> Any:
    """Replace each stateful value by its ``state_dict()``, in a copy of the dict."""
    keys = stateful_keys(state)
    if not keys:
        return state
    return {**state, **{key: _own_state(state[key]) for key in keys}}


def _own_state(value: Any) -> Any:
    if isinstance(value, Replicated):
        return Replicated(_own_state(value.value), value.ranks)
    return module_state(value) if isinstance(value, torch.nn.Module) else value.state_dict()


def give_states(into: Any, loaded: Any, left: Container[str] = ()) -> Any:
    """Load states into the stateful values of ``into``; return ``loaded`` with these in it."""
    for key in stateful_keys(into):
        if isinstance(loaded, Mapping) and key in loaded:
            value = without_marker(into[key])
            if str(key) in left:
                pass
            elif isinstance(value, torch.nn.Module):
                load_module_state(value, loaded[key])
            elif isinstance(value, torch.optim.Optimizer):
                load_optimizer(value, loaded[key])
            else:
                value.load_state_dict(loaded[key])
            loaded[key] = value  # type: ignore[index]
    return loaded
