"""Plans of who sends which shard to whom when ranks lack shards that others hold.

Pure functions of plain data: every rank computes the same plan from the same records. Nothing is
moved here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import least_losses
from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import Checkpoint, CkptID

IdT = TypeVar("IdT", bound=Hashable)


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

    @cached_property
    def transfers(self) -> list[ExchangePlanEntry[IdT]]:
        return [entry for entry in self.entries if entry.sender != entry.receiver]

    def sends(self, rank: int) -> list[ExchangePlanEntry[IdT]]:
        return self._of_ranks[0].get(rank, [])

    def receives(self, rank: int) -> list[ExchangePlanEntry[IdT]]:
        return self._of_ranks[1].get(rank, [])

    def peers(self, rank: int) -> set[int]:
        senders = {entry.sender for entry in self.receives(rank)}
        return senders | {entry.receiver for entry in self.sends(rank)}

    @cached_property
    def _of_ranks(self) -> tuple[dict[int, list[ExchangePlanEntry[IdT]]], ...]:
        # Looked through once, not for every question: each rank of the job may have an entry.
        sends: dict[int, list[ExchangePlanEntry[IdT]]] = {}
        receives: dict[int, list[ExchangePlanEntry[IdT]]] = {}
        for entry in self.transfers:
            sends.setdefault(entry.sender, []).append(entry)
            receives.setdefault(entry.receiver, []).append(entry)
        return sends, receives


def plan_among_nodes(
    held_on: Mapping[IdT, Collection[str]],
    ranks_on: Mapping[str, Sequence[int]],
    wanted: Mapping[int, Sequence[IdT]],
) -> ExchangePlan[IdT]:
    """Plan an exchange in which every rank of a node can read the node's shards.

    What a node sends is dealt to its ranks in turn; the node is taken whose next rank sends least
    so far, then the one that sends least as a whole. The work for a shard depends on how many nodes
    hold it, not on all there are.
    """
    node_of = {rank: node for node, ranks in ranks_on.items() for rank in ranks}
    sent = dict.fromkeys(ranks_on, 0)

    def load(node: str) -> tuple[int, int, int]:
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
        lost = "; ".join(
            f"{id_} (wanted by rank {', '.join(map(str, receivers))})"
            for id_, receivers in missing.items()
        )
        raise NoReplicasAvailableError(
            f"none of the {len(node_of)} ranks that were asked holds {len(missing)} of the shards "
            f"that are wanted: {lost}. What the ranks do hold is untouched. Bring back a node that "
            f"holds them, or load an older checkpoint."
        )
    return ExchangePlan(tuple(entries))


def plan_shards(
    checkpoint: Checkpoint,
    session_id: str,
    inventory: Inventory,
    wanted: Mapping[int, Iterable[int]],
) -> ExchangePlan[CkptID]:
    def named(owner: int) -> CkptID:
        return CkptID(checkpoint.iteration, owner, session_id)

    return plan_among_nodes(
        {named(owner): nodes for owner, nodes in inventory.holders(checkpoint).items()},
        inventory.ranks_on,
        {rank: [named(owner) for owner in owners] for rank, owners in wanted.items()},
    )


def missing_copies(
    checkpoint: Checkpoint, inventory: Inventory, keepers: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Decide which ranks are to get which shard, so that each has its copies again."""
    held_on = inventory.holders(checkpoint)
    missing = {}
    for owner, others in keepers.items():
        have = held_on.get(owner, [])
        # The owner first: its own node is where the next restart looks first.
        wanting = [owner, *others]
        lacking = [rank for rank in wanting if inventory.node_of(rank) not in have]
        if wanted := lacking[: max(0, len(wanting) - len(have))]:
            missing[owner] = wanted
    return missing


def missing_copies_of_others(
    checkpoint: Checkpoint, inventory: Inventory, copies: int
) -> dict[int, list[int]]:
    """Decide which ranks are to get which shard of a checkpoint of another number of ranks.

    Each gets it on a node of its own that has none; nodes and their ranks take turns. A shard is to
    outlive all but one of ``copies`` nodes.
    """
    held_on, bears = inventory.holders(checkpoint), least_losses(checkpoint, inventory)
    taken = dict.fromkeys(inventory.ranks_on, 0)
    missing = {}
    for owner, nodes in held_on.items():
        others = sorted(taken.keys() - set(nodes), key=lambda node: (taken[node], node))
        chosen = []
        for node in others[: max(0, copies - bears[owner])]:
            ranks = inventory.ranks_on[node]
            chosen.append(ranks[taken[node] % len(ranks)])
            taken[node] += 1
        if chosen:
            missing[owner] = chosen
    return missing
