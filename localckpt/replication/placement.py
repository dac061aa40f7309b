"""Placement of ranks that keep each other's shards, by what is lost together: pure functions.

Whole nodes are put together before their ranks are: when two nodes are lost, data is lost only if
they are partners, and a node whose ranks all have their partners on the same few nodes has fewest
(of n nodes in pairs 1 / (n - 1) of all pairs, in a ring 2 / (n - 1)).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    SameMachineReplicationException,
)

T = TypeVar("T")


def place_cliques(
    nodes: Sequence[str], factor: int, outer: Sequence[str] | None = None
) -> list[list[int]]:
    """Cliques of ranks that keep each other's shards, in different failure domains.

    Ranks that are dealt to nodes in the same way form the same cliques, whatever the nodes' names.
    Returns every rank once, in sorted cliques of at least ``factor`` members, as even as can be, of
    at least ``factor`` domains. No two are in one domain, unless so many ranks are in it that the
    others cannot match them. ``outer`` are larger domains that nodes are lost with, such as racks.
    """
    domains = list(nodes if outer is None else outer)
    kind = "failure domain" if outer is None else "outer failure domain"
    if problem := domains_problem(domains, factor, kind):
        raise SameMachineReplicationException(problem)
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    for ranks in ranks_of.values():
        if len({domains[rank] for rank in ranks}) > 1:
            said = ", ".join(f"{domains[rank]!r} on rank {rank}" for rank in ranks)
            raise MismatchError(
                f"ranks {ranks} share a node, and say that it is in different failure domains: "
                f"{said}. Give all ranks of a node the same failure_domain"
            )

    def domain_of(node: str) -> str:
        return domains[ranks_of[node][0]]

    together: list[list[str]] = []
    odd: list[str] = []
    for count in sorted({len(ranks) for ranks in ranks_of.values()}, reverse=True):
        alike = [node for node, ranks in ranks_of.items() if len(ranks) == count]
        if _are_apart([domain_of(node) for node in alike], factor):
            together += _deal(alike, domain_of, factor)
        else:
            odd += alike

    def odd_ranks() -> list[int]:
        return sorted(rank for node in odd for rank in ranks_of[node])

    # Nodes that match no others share the ranks of some that do.
    while odd and together and not _are_apart([domains[r] for r in odd_ranks()], factor):
        odd += together.pop()
    cliques = [
        list(lane)
        for group in together
        for lane in zip(*(ranks_of[node] for node in group), strict=True)
    ]
    if odd:
        cliques += _deal(odd_ranks(), domains.__getitem__, factor)
    return sorted(map(sorted, cliques))


def keepers_in(clique: Sequence[int], domains: Sequence[str]) -> dict[int, list[int]]:
    """For each member of a clique those that keep its shard: one in each other domain, by turns."""
    members: dict[str, list[int]] = {}
    for rank in clique:
        members.setdefault(domains[rank], []).append(rank)
    return {
        owner: [
            others[members[domains[owner]].index(owner) % len(others)]
            for domain, others in members.items()
            if domain != domains[owner]
        ]
        for owner in clique
    }


def domains_problem(domains: Sequence[str], factor: int, what: str) -> str:
    """Say why ranks in these domains cannot keep so many copies; empty if they can."""
    count = len(set(domains))
    if count == 1:
        return (
            f"all {len(domains)} ranks are in one {what}, {domains[0]!r}, where replication "
            f"protects nothing: pass repl_strategy=None to save without it, or run on more nodes"
        )
    if count < factor:
        return (
            f"the ranks are in {count} {what}s, too few for {factor} copies of each shard: use "
            f"replication_factor={count} at most, or run on more nodes"
        )
    return ""


def _are_apart(domains: Iterable[str], factor: int) -> bool:
    """True if things in these domains can be dealt so that no group has two of one domain."""
    counts = Counter(domains)
    groups = counts.total() // factor
    return groups > 0 and max(counts.values()) <= groups


def _deal(things: Sequence[T], domain_of: Callable[[T], str], factor: int) -> list[list[T]]:
    """Groups of things of at least ``factor`` domains each, as many as can be."""
    alike: dict[str, list[T]] = {}
    for thing in things:
        alike.setdefault(domain_of(thing), []).append(thing)
    groups = next(
        number
        for number in range(len(things) // factor, 0, -1)
        if sum(min(len(there), number) for there in alike.values()) >= factor * number
    )
    # Neighbours in a domain go to different groups, as cards that are dealt go to different hands;
    # those of a domain that has more than there are groups then join some of their own.
    first = [thing for there in alike.values() for thing in there[:groups]]
    surplus = [thing for there in alike.values() for thing in there[groups:]]
    return [[*first[g::groups], *surplus[g::groups]] for g in range(groups)]


def require_integer(name: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least some size; raises CheckpointingException."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointingException(
            f"{name} must be an integer of at least {least}, not {value!r}"
        )
