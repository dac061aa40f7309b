"""Prefetches: which nodes' shards of a complete save go to which spare, decided by pure functions.

The first rank reports the spares that it sees in the job's store with its outcome of the save, and
each rank the size of its shard; the plan goes to all ranks with the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from localckpt.availability.inventory import ranks_by_node
from localckpt.failure_texts import runs_of


class SpareRecord(NamedTuple):
    """A spare that waits for shards, as it registers itself in the job's store."""

    name: str
    """Random, of one process."""
    host: str
    beat: int
    """Changes as long as the process lives."""
    nbytes: int
    """Room for the shards of one checkpoint."""
    rate_limit: float
    """Bytes a second that it receives at most."""
    ranks: tuple[int, ...]
    """Ranks whose nodes it may replace; empty for all."""


class Prefetch(NamedTuple):
    """Shards of a checkpoint that are sent to one spare, by nodes in the order of first ranks."""

    spare: str
    host: str
    rate_limit: float
    nodes: tuple[tuple[int, int], ...]
    """Numbers of nodes, as the first and the last of each run."""


def plan_prefetches(
    spares: Sequence[SpareRecord], places: Sequence[int], nbytes: Sequence[int]
) -> tuple[Prefetch, ...]:
    """Deal whole nodes to the spares that have room for their shards.

    A spare takes the nodes that fewer of the spares before it have, in their order, as many as fit.
    They share the rate at which a node sends. ``places`` has for each rank the number of its node,
    counted from 0 in the order of first ranks; ``nbytes`` the size of its shard.
    """
    ranks_on = [*ranks_by_node(places).values()]
    sizes = [sum(nbytes[rank] for rank in ranks) for ranks in ranks_on]
    had = [0] * len(ranks_on)
    planned = []
    for spare in spares:
        room, taken, wanted = spare.nbytes, list[int](), set(spare.ranks)
        for number in sorted(range(len(ranks_on)), key=lambda number: (had[number], number)):
            is_wanted = not wanted or not wanted.isdisjoint(ranks_on[number])
            if is_wanted and sizes[number] <= room:
                room -= sizes[number]
                taken.append(number)
        for number in taken:
            had[number] += 1
        if taken:
            rate = spare.rate_limit / len(spares)
            planned.append(Prefetch(spare.name, spare.host, rate, tuple(runs_of(taken))))
    return tuple(planned)
