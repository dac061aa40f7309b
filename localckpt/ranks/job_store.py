"""The job's key-value store and the ranks of a group, as torch tells them at the moment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Standing:
    """This process in a process group, as torch tells it at the moment. Comparing sends nothing.

    ``rank`` is -1 outside of the group; ``version`` changes when members are changed in place.
    """

    rank: int
    size: int
    version: str = ""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Standing:
        """Look at a process group; ``None`` for that of all ranks."""
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialised"
        version = ""
        # Other backends may draw a new handle at each look.
        if getattr(group, "supports_reconfigure", False) and group.name() == "gloo":
            version = group.get_reconfigure_handle()  # type: ignore[attr-defined]
        return cls(group.rank(), group.size(), version)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks (of the job) that work together, and the job's store as this process sees it.

    ``made_for`` is this process in the job and in the group at the time.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Store | None
    process_group: dist.ProcessGroup | None = None
    made_for: tuple[Standing, Standing] | None = None

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup | None = None, ranks: Sequence[int] | None = None
    ) -> Members:
        """Find the ranks of a process group; without torch.distributed a process is alone."""
        if not (dist.is_available() and dist.is_initialized()):
            world = os.environ.get("WORLD_SIZE", "1")
            if world.isdecimal() and int(world) > 1:
                raise MismatchError(
                    f"the launcher has started {world} ranks (WORLD_SIZE), and torch.distributed "
                    f"is not initialised, so each would save as if it were alone: call "
                    f"torch.distributed.init_process_group() before the manager is made. If this "
                    f"process is to work alone, unset WORLD_SIZE"
                )
            return cls(0, (0,), None)
        members = group_ranks(process_group) if ranks is None else list(ranks)
        if dist.get_rank() not in members:
            raise MismatchError(
                f"rank {dist.get_rank()} is not among the ranks {list(members)} that are to work "
                f"together: make it on those alone"
            )
        made_for = Standing.of(), Standing.of(process_group)
        rank = members.index(dist.get_rank())
        return cls(rank, tuple(members), default_store(), process_group, made_for)


def group_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """Ranks of a process group in the job; ``None`` for that of all ranks."""
    if group is None or group is dist.group.WORLD:
        # torch's list of its ranks is that of the beginning, also when they were changed.
        return list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(group)


def default_store() -> Store:
    # torch has no public accessor for it; this is the one place that asks.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def common_store() -> Store | None:
    """Return the store that all lives of the job share with processes beside it, if there is one.

    A launcher, torch, and each new process group put their names before the keys of the job's
    store; who reaches it by its address has none of these.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
