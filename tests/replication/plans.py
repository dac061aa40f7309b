"""Plans among ranks that share no node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from localckpt.replication.exchange import ExchangePlan, plan_among_nodes

__all__ = ["plan_exchange"]


def plan_exchange(
    available: Mapping[int, Collection[Any]], wanted: Mapping[int, Sequence[Any]]
) -> ExchangePlan[Any]:
    holders: dict[Any, list[int]] = {}
    for rank, ids in available.items():
        for id_ in ids:
            holders.setdefault(id_, []).append(rank)
    return plan_among_nodes(holders, {rank: (rank,) for rank in available}, wanted)
