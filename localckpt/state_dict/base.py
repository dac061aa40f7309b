"""The interface between a trainer's state and the checkpoint managers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["TensorAwareStateDict"]

_NVRX_CLASS = "nvidia_resiliency_ext.checkpointing.local.base_state_dict.TensorAwareStateDict"


class TensorAwareStateDict(ABC):
    """A state whose tensors can be taken out, moved and put back.

    It is *hollow* while its tensors are out. The managers find tensors in any object by themselves
    and need none of these methods; they are for code that works with states directly. Subclasses of
    NVRx's class of this name count as subclasses of this one.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        if cls is not TensorAwareStateDict:
            return NotImplemented
        bases = {f"{base.__module__}.{base.__qualname__}" for base in other.__mro__}
        return True if _NVRX_CLASS in bases else NotImplemented

    @abstractmethod
    def pop_tensors(self) -> list[torch.Tensor]:
        """Take all tensors out and remember their shape, dtype and device; makes it hollow."""

    @property
    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, in the order of :meth:`pop_tensors`."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors are out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back, in the order of :meth:`pop_tensors`."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put uninitialised tensors of the remembered shape, dtype and device back."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace each tensor by its copy in host memory."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move each tensor back to the device it came from."""
