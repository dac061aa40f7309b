"""Wrapper of a process group with the collectives of NVRx's ``GroupWrapper``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from localckpt.errors import MismatchError
from localckpt.replication.groups import GroupWrapper as _GroupWrapper

__all__ = ["GroupWrapper", "ProcessGroupLike", "zip_strict"]

_OF_MEMBERS = {"group", "ranks", "my_global_rank", "backend", "supported_devices"}


class GroupWrapper(_GroupWrapper):
    """Process group and this rank's position in it.

    Args:
        group: As for :class:`localckpt.GroupWrapper`. Ranks outside of it may wrap it, too, as with
            NVRx: using it there is a MismatchError.
    """

    def _refuse(self, why: str) -> None:
        vars(self).clear()
        self._refusal = why

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not there.
        if name in _OF_MEMBERS and "_refusal" in vars(self):
            raise MismatchError(self._refusal)
        raise AttributeError(name)

    @classmethod
    def from_list_of_groups(cls, groups: Sequence[Any], **options: Any) -> _GroupWrapper:
        """As :meth:`localckpt.GroupWrapper.from_list_of_groups`, also of process groups."""
        mine = [group for group in groups if isinstance(group, dist.ProcessGroup)]
        return cls(mine[0]) if mine else super().from_list_of_groups(groups, **options)

    def all_gather_object(self, my_obj: Any) -> list[Any]:
        """Gather an object of each member, in the order of the members' ranks in the group."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, my_obj, group=self.group)
        return gathered

    def all_gather_batch(
        self, my_tensors: Sequence[torch.Tensor], target_device: Any = None
    ) -> list[list[torch.Tensor]]:
        """Gather the tensors of each member, in the order of the members' ranks in the group.

        Args:
            my_tensors: Tensors of this rank, on a device that the group's backend supports. Members
                may differ in number, shapes and dtypes.
            target_device: Device of the result; ``None`` for the device of the member's tensors.
        """
        shapes = self.all_gather_object(
            [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in my_tensors]
        )
        gathered: list[list[torch.Tensor]] = []
        for member, theirs in enumerate(shapes):
            is_mine = member == self.my_group_rank
            gathered.append([])
            for number, (shape, dtype, device) in enumerate(theirs):
                if is_mine:
                    tensor = my_tensors[number].detach().contiguous()
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(tensor, src=self.get_global_rank(member), group=self.group)
                gathered[-1].append(tensor if target_device is None else tensor.to(target_device))
        return gathered


ProcessGroupLike = dist.ProcessGroup | GroupWrapper


def zip_strict(*iterables: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
    """Zip iterables that must be equally long."""
    return zip(*iterables, strict=True)
