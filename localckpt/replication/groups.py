"""Groups of ranks that hold each other's replicas, and a process group as plain facts.

``parse_group_sequence`` and ``check_failure_domains`` are pure functions of numbers and names;
``GroupWrapper`` answers questions about a group of ranks, and makes the groups of a list.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist

from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    SameMachineReplicationException,
)
from localckpt.failure_texts import ranks_named
from localckpt.ranks.job_store import group_ranks
from localckpt.ranks.ranks import MANAGER, Ranks, refused_together
from localckpt.replication.placement import domains_problem, require_integer

_NAMED_AT_MOST, _SAID_AT_MOST = 8, 200


class GroupWrapper:
    """A process group and this rank's place in it.

    Args:
        group: The group; ``None`` for the default group, or for a world of one when
            torch.distributed is not initialised.

    Raises:
        MismatchError: This rank is not a member.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        """The wrapped group; ``None`` for ranks that have none."""
        self.ranks: list[int] = [0]
        """The members' ranks in the job, in the order of their ranks in the group."""
        self.my_global_rank = 0
        self.backend = ""
        """The backend of each device type as torch writes it, such as ``cpu:gloo,cuda:nccl``."""
        if dist.is_available() and dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.my_global_rank = dist.get_rank()
            if self.group is None or dist.get_rank(self.group) < 0:
                self._refuse(
                    f"rank {self.my_global_rank} is not a member of the process group it was given"
                )
                return
            self.ranks = group_ranks(self.group)
            self.backend = dist.get_backend_config(self.group)
        elif group is not None:
            raise CheckpointingException(
                "a process group was given, and torch.distributed is not initialised"
            )
        self.supported_devices = _devices_of(self.backend)
        """Device types whose memory can be sent point to point."""

    def _refuse(self, why: str) -> None:
        # The others go on to make their manager.
        with refused_together(MANAGER):
            raise MismatchError(why)

    @classmethod
    def wrap(cls, group: GroupWrapper | dist.ProcessGroup | None) -> GroupWrapper:
        return group if isinstance(group, GroupWrapper) else cls(group)

    @classmethod
    def of_ranks(cls, ranks: Sequence[int]) -> GroupWrapper:
        """Ranks of the job, this one among them, that need no process group."""
        group = cls()
        group.group, group.ranks = None, list(ranks)
        group.supported_devices = frozenset({"cpu"})
        return group

    @classmethod
    def from_list_of_groups(
        cls,
        groups: Sequence[Sequence[int]],
        *,
        timeout_s: float = 300.0,
        backend: str | None = None,
    ) -> GroupWrapper:
        """Make a group for each list of ranks; all ranks of the job call it with the same lists.

        Args:
            groups: Every rank of the job, once.
            timeout_s: Deadline of operations on the groups, in seconds.
            backend: As ``torch.distributed.new_group`` takes it.

        Returns:
            The group that this rank is in. Destroying it is up to the caller.

        Raises:
            MismatchError: The lists do not name every rank of the job once.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise CheckpointingException(
                "groups of ranks can be made once torch.distributed is initialised; "
                "call torch.distributed.init_process_group() first"
            )
        ranks = Ranks("groups", timeout_s=timeout_s)
        try:
            ranks.decide(
                "make groups of ranks",
                lambda: _checked_partition(groups, ranks.world_size),
                lambda said: require_same("groups", dict(enumerate(said))),
            )
        finally:
            ranks.close()
        mine: dist.ProcessGroup | None = None
        for members in sorted(map(list, groups)):
            group = dist.new_group(members, timedelta(seconds=timeout_s), backend)
            if dist.get_rank() in members:
                mine = group
        return cls(mine)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def my_group_rank(self) -> int:
        return self.ranks.index(self.my_global_rank)

    def get_group_rank(self, global_rank: int) -> int:
        """Return the place in this group of a rank of the job; MismatchError if it has none."""
        if global_rank not in self.ranks:
            raise MismatchError(f"rank {global_rank} is not in the group of ranks {self.ranks}")
        return self.ranks.index(global_rank)

    def get_global_rank(self, group_rank: int) -> int:
        """Return the rank in the job of a member; MismatchError if there is no such place."""
        if not 0 <= group_rank < len(self.ranks):
            raise MismatchError(f"the group of ranks {self.ranks} has no member {group_rank}")
        return self.ranks[group_rank]


def default_replication_jump() -> int:
    """The number of ranks on a node, so that consecutive members of a clique are on other nodes."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.cuda.device_count() or 1


def parse_group_sequence(
    replication_jump: int, replication_factor: int, world_size: int
) -> list[list[int]]:
    """The cliques: ranks that hold each other's replicas.

    Ranks that are ``replication_jump`` apart stand in one lane, and each lane is cut into cliques
    of ``replication_factor`` consecutive members. Where a lane does not divide, its last cliques
    are larger, so every shard has at least ``replication_factor`` copies.

    Args:
        replication_jump: Distance of consecutive members; most often the number of ranks on a node.
        replication_factor: Copies of each shard, the owner's included.
        world_size: Ranks in the job.

    Returns:
        Every rank once, in sorted cliques.

    Raises:
        CheckpointingException: An argument is out of range.
        MismatchError: The job has too few ranks. It says which values would do.
    """
    check_replication_params(replication_jump, replication_factor)
    require_integer("world_size", world_size, 1)
    if world_size // replication_jump < replication_factor:
        raise MismatchError(
            f"replication_jump={replication_jump} with replication_factor={replication_factor} "
            f"needs {replication_jump * replication_factor} ranks, and the job has {world_size}. "
            + _what_fits(replication_jump, replication_factor, world_size)
        )
    cliques: list[list[int]] = []
    for first in range(replication_jump):
        lane = list(range(first, world_size, replication_jump))
        count = len(lane) // replication_factor
        smaller, larger_ones = divmod(len(lane), count)
        start = 0
        for number in range(count):
            stop = start + smaller + (number >= count - larger_ones)
            cliques.append(lane[start:stop])
            start = stop
    return sorted(cliques)


def check_replication_params(replication_jump: int, replication_factor: int) -> None:
    """Refuse numbers that no job can have; raises CheckpointingException."""
    require_integer("replication_jump", replication_jump, 1)
    require_integer("replication_factor", replication_factor, 1)
    if replication_factor == 1:
        raise CheckpointingException(
            "replication_factor=1 keeps no replica of any shard; use 2 or more, "
            "or pass repl_strategy=None to save without replication"
        )


def check_failure_domains(cliques: Sequence[Sequence[int]], domains: Sequence[str]) -> None:
    """Refuse cliques that would lose a shard with its replica, and name a jump that works."""
    clashes = [(clique, ranks) for clique in cliques for ranks in _clashes(clique, domains)]
    if not clashes:
        return
    named = [f"ranks {ranks} of clique {list(clique)}" for clique, ranks in clashes]
    if len(named) > _NAMED_AT_MOST:
        named[_NAMED_AT_MOST:] = [f"and {len(named) - _NAMED_AT_MOST} more"]
    raise SameMachineReplicationException(
        f"replicas would be lost together with the shards they copy, since these share a failure "
        f"domain: {'; '.join(named)}. {_cure(min(n for n in map(len, cliques) if n > 1), domains)}"
    )


def _clashes(clique: Sequence[int], domains: Sequence[str]) -> list[list[int]]:
    by_domain = sorted(clique, key=lambda rank: (domains[rank], rank))
    shared = (list(ranks) for _, ranks in groupby(by_domain, key=lambda rank: domains[rank]))
    return [ranks for ranks in shared if len(ranks) > 1]


def _cure(factor: int, domains: Sequence[str]) -> str:
    if problem := domains_problem(domains, factor, "failure domain"):
        return problem[0].upper() + problem[1:]
    for jump in range(1, len(domains) // factor + 1):
        cliques = parse_group_sequence(jump, factor, len(domains))
        if not any(_clashes(clique, domains) for clique in cliques):
            return f"replication_jump={jump} with replication_factor={factor} works here."
    return (
        f"No replication_jump works for replication_factor={factor} with the ranks placed as they "
        f"are; place the same number of ranks on each node, or give the strategy explicit groups."
    )


def _what_fits(jump: int, factor: int, world_size: int) -> str:
    if world_size == 1:
        return "A single rank has no peer: pass repl_strategy=None."
    fits = []
    if world_size // factor >= 1:
        fits.append(f"replication_jump up to {world_size // factor} (with this replication_factor)")
    if world_size // jump >= 2:
        fits.append(f"replication_factor up to {world_size // jump} (with this replication_jump)")
    if not fits:
        fits.append(f"replication_jump=1 with replication_factor up to {world_size}")
    return f"What fits: {', or '.join(fits)}."


def _checked_partition(groups: Sequence[Sequence[int]], world_size: int) -> str:
    """Check that groups hold each rank once; return them in words, or a digest of many."""
    times = Counter(rank for ranks in groups for rank in ranks)
    faults = {
        "in no group": [rank for rank in range(world_size) if not times[rank]],
        "in more than one place": [rank for rank, count in times.items() if count > 1],
        "not in the job": [rank for rank in times if not 0 <= rank < world_size],
    }
    wrong = [f"{what}: {sorted(ranks)}" for what, ranks in faults.items() if ranks]
    if wrong:
        raise MismatchError(
            f"the groups must hold each of the job's {world_size} ranks once; "
            f"ranks {'; ranks '.join(wrong)}"
        )
    said = repr(sorted(map(list, groups)))
    return said if len(said) < _SAID_AT_MOST else hashlib.sha256(said.encode()).hexdigest()


def _devices_of(config: str) -> frozenset[str]:
    """Device types in a backend configuration; gloo is listed for CUDA, but cannot send from it."""
    if not config:
        return frozenset({"cpu"})
    pairs = (entry.split(":", 1) for entry in config.split(","))
    return frozenset(
        device for device, backend in pairs if device == "cpu" or backend != dist.Backend.GLOO
    )


def require_same(what: str, values: Mapping[int, str]) -> None:
    if len(set(values.values())) == 1:
        return
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    said = "; ".join(f"{value} on {ranks_named(ranks)}" for value, ranks in ranks_of.items())
    raise MismatchError(
        f"ranks that replicate together must agree on {what}: {said}. Nothing was sent, and what "
        f"was saved before stands. Let all ranks call it with the same {what}."
    )
