"""Plans of who sends which shard to whom when ranks lack shards that others hold.

Pure functions of plain data: every rank computes the same plan from the same records. Nothing is
moved here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from localckpt.errors import NoReplicasAvailableError

__all__ = ["ExchangePlan", "ExchangePlanEntry", "plan_among_nodes", "plan_exchange"]

IdT = TypeVar("IdT", bound=Hashable)
NodeT = TypeVar("NodeT", bound=Hashable)


@dataclass(frozen=True)
class ExchangePlanEntry(Generic[IdT]):
    """Shard for one rank. A rank that is its own sender reads its own copy."""

    sender: int
    receiver: int
    id_: IdT


@dataclass(frozen=True)
class ExchangePlan(Generic[IdT]):
    """Plan of all wanted shards, once for each rank that wants one; the same on all ranks."""

    entries: tuple[ExchangePlanEntry[IdT], ...]

    @property
    def transfers(self) -> list[ExchangePlanEntry[IdT]]:
        """Entries whose shard goes from one rank to another."""
        return list(self._transfers)

    def sends(self, rank: int) -> list[ExchangePlanEntry[IdT]]:
        """Return the entries that ``rank`` sends to others."""
        return list(self._by_sender.get(rank, ()))

    def receives(self, rank: int) -> list[ExchangePlanEntry[IdT]]:
        """Return the entries that ``rank`` receives from others."""
        return list(self._by_receiver.get(rank, ()))

    def peers(self, rank: int) -> set[int]:
        """Return the ranks that ``rank`` sends to or receives from."""
        senders = {entry.sender for entry in self.receives(rank)}
        return senders | {entry.receiver for entry in self.sends(rank)}

    def required_ids(self, rank: int) -> list[IdT]:
        """Return the shards that ``rank`` must be able to read, for itself or for others."""
        return list(dict.fromkeys(entry.id_ for entry in self.entries if entry.sender == rank))

    # Looked through once, not once for every question: there is an entry for each rank of the job.

    @cached_property
    def _transfers(self) -> list[ExchangePlanEntry[IdT]]:
        return [entry for entry in self.entries if entry.sender != entry.receiver]

    @cached_property
    def _by_sender(self) -> dict[int, list[ExchangePlanEntry[IdT]]]:
        return _by_rank((entry.sender, entry) for entry in self._transfers)

    @cached_property
    def _by_receiver(self) -> dict[int, list[ExchangePlanEntry[IdT]]]:
        return _by_rank((entry.receiver, entry) for entry in self._transfers)


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
    for rank, ids in available.items():
        for id_ in ids:
            holders.setdefault(id_, []).append(rank)
    return plan_among_nodes(holders, {rank: (rank,) for rank in available}, wanted)


def plan_among_nodes(
    held_on: Mapping[IdT, Collection[NodeT]],
    ranks_on: Mapping[NodeT, Sequence[int]],
    wanted: Mapping[int, Sequence[IdT]],
) -> ExchangePlan[IdT]:
    """Plan an exchange in which every rank of a node can read the node's shards.

    What a node sends is dealt to its ranks in turn. Of the nodes that hold a shard the one is taken
    whose next rank sends least so far; of equals the one that sends least as a whole, then that of
    the lowest rank. The work for a shard depends on how many nodes hold it, not on all there are.

    Args:
        held_on: For each shard the nodes that hold it.
        ranks_on: The ranks of each node that holds any; at least one.
        wanted: The shards that each rank wants.

    Raises:
        NoReplicasAvailableError: Shards are wanted that no node holds. It lists all of them.
    """
    node_of = {rank: node for node, ranks in ranks_on.items() for rank in ranks}
    sent = dict.fromkeys(ranks_on, 0)

    def load(node: NodeT) -> tuple[int, int, int]:
        ranks = ranks_on[node]
        return sent[node] // len(ranks), sent[node], ranks[0]

    entries: list[ExchangePlanEntry[IdT]] = []
    missing: dict[IdT, list[int]] = {}
    for receiver in sorted(wanted):
        for id_ in dict.fromkeys(wanted[receiver]):
            holders = held_on.get(id_)
            if not holders:
                missing.setdefault(id_, []).append(receiver)
                continue
            sender = receiver
            if node_of.get(receiver) not in holders:
                node = min(holders, key=load)
                sender = ranks_on[node][sent[node] % len(ranks_on[node])]
                sent[node] += 1
            entries.append(ExchangePlanEntry(sender, receiver, id_))
    if missing:
        raise NoReplicasAvailableError(_describe_missing(missing, len(node_of)))
    return ExchangePlan(tuple(entries))


def _by_rank(
    entries: Iterable[tuple[int, ExchangePlanEntry[IdT]]],
) -> dict[int, list[ExchangePlanEntry[IdT]]]:
    by_rank: dict[int, list[ExchangePlanEntry[IdT]]] = {}
    for rank, entry in entries:
        by_rank.setdefault(rank, []).append(entry)
    return by_rank


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
