"""Who sends which shard to whom when ranks lack shards that others hold.

Pure functions of plain data: every rank computes the same plan from the same records. Nothing is
moved here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from localckpt.errors import NoReplicasAvailableError

__all__ = ["ExchangePlan", "ExchangePlanEntry", "plan_exchange"]

IdT = TypeVar("IdT", bound=Hashable)


@dataclass(frozen=True)
class ExchangePlanEntry(Generic[IdT]):
    """One shard for one rank. A rank that is its own sender reads its own copy."""

    sender: int
    receiver: int
    id_: IdT


@dataclass(frozen=True)
class ExchangePlan(Generic[IdT]):
    """Every shard that is wanted, once for each rank that wants it; the same on all ranks."""

    entries: tuple[ExchangePlanEntry[IdT], ...]

    @property
    def transfers(self) -> list[ExchangePlanEntry[IdT]]:
        """The entries that go from one rank to another."""
        return [entry for entry in self.entries if entry.sender != entry.receiver]

    def sends(self, rank: int) -> list[ExchangePlanEntry[IdT]]:
        """What ``rank`` sends to others."""
        return [entry for entry in self.transfers if entry.sender == rank]

    def receives(self, rank: int) -> list[ExchangePlanEntry[IdT]]:
        """What ``rank`` gets from others."""
        return [entry for entry in self.transfers if entry.receiver == rank]

    def required_ids(self, rank: int) -> list[IdT]:
        """What ``rank`` must be able to read, for itself or for others."""
        return list(dict.fromkeys(entry.id_ for entry in self.entries if entry.sender == rank))


def plan_exchange(
    available: Mapping[int, Collection[IdT]], wanted: Mapping[int, Sequence[IdT]]
) -> ExchangePlan[IdT]:
    """Decide from whom each rank gets the shards it wants.

    A rank's own copy comes first; else the holder that sends least so far, the lowest rank of
    equals.

    Args:
        available: The shards that each rank holds.
        wanted: The shards that each rank wants.

    Raises:
        NoReplicasAvailableError: Shards are wanted that no rank holds. It lists all of them.
    """
    holders: dict[IdT, list[int]] = {}
    for rank in sorted(available):
        for id_ in available[rank]:
            holders.setdefault(id_, []).append(rank)
    sends = dict.fromkeys(available, 0)
    entries: list[ExchangePlanEntry[IdT]] = []
    missing: dict[IdT, list[int]] = {}
    for receiver in sorted(wanted):
        for id_ in dict.fromkeys(wanted[receiver]):
            held_by = holders.get(id_)
            if not held_by:
                missing.setdefault(id_, []).append(receiver)
                continue
            sender = receiver
            if receiver not in held_by:
                sender = min(held_by, key=lambda rank: (sends[rank], rank))
                sends[sender] += 1
            entries.append(ExchangePlanEntry(sender, receiver, id_))
    if missing:
        raise NoReplicasAvailableError(_describe_missing(missing, len(available)))
    return ExchangePlan(tuple(entries))


def _describe_missing(missing: Mapping[IdT, Sequence[int]], ranks: int) -> str:
    lost = "; ".join(
        f"{id_!r} (wanted by rank {', '.join(map(str, receivers))})"
        for id_, receivers in missing.items()
    )
    return (
        f"none of the {ranks} ranks that were asked holds {len(missing)} of the shards that are "
        f"wanted: {lost}. What the ranks do hold is untouched. Bring back a node that holds them, "
        f"or load an older checkpoint."
    )
