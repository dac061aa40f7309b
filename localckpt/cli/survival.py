"""Cost of redundancy schemes, and the losses of nodes that they survive: pure functions.

Nothing here knows of ranks that run, or of torch: it answers before a job is started. The groups of
a scheme are disjoint, so chances are counted exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.replication.placement import require_integer

__all__ = ["Cost", "Scheme", "Survival", "survivability", "usual_schemes"]

_KINDS = ("none", "replicas", "parity")
_USUAL = ("none", "replicas:2", "replicas:3", "parity:1/4", "parity:1/8", "parity:2/8")
_LOST_AT_MOST = 4
_TEXT = re.compile(r"none|replicas:([0-9]{1,9})|parity:([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Scheme:
    """Way in which shards are kept on more than one node. ``str()`` is what :meth:`parse` takes.

    Nodes stand in disjoint groups, as many as there can be of ``group_size``; where the nodes do
    not divide, sizes differ by one at most. A rank's group has one rank on each of these nodes.

    Attributes:
        kind: ``replicas``: each member of a group has the shards of all; it is lost with its last
            node. ``parity``: each member has its own shard and a part of the group's parity; a
            group is lost with one node more than it has parities. ``none``: shards are kept once.
        group_size: Nodes in the smallest group there may be: K of ``replicas:K``, G of
            ``parity:M/G``, 1 of ``none``.
        parity: Parities of a group: M of ``parity:M/G``.

    Raises:
        CheckpointingException: There is no such scheme.
    """

    kind: Literal["none", "replicas", "parity"]
    group_size: int = 1
    parity: int = 0

    def __post_init__(self) -> None:
        require_integer("group_size", self.group_size, 0)
        require_integer("parity", self.parity, 0)
        wrong = _what_is_wrong(self)
        if wrong:
            raise CheckpointingException(f"{self}: {wrong}")

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """The scheme of a text: ``none``, ``replicas:K`` or ``parity:M/G``."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise CheckpointingException(
                f"{text!r} is no redundancy scheme: give none, replicas:K (copies of each shard, "
                f"the owner's included) or parity:M/G (parities in groups of G nodes), such as "
                f"replicas:2 or parity:1/8"
            )
        copies, parity, group_size = found.groups()
        if copies is not None:
            return cls("replicas", int(copies))
        if parity is not None:
            return cls("parity", int(group_size), int(parity))
        return cls("none")

    def __str__(self) -> str:
        if self.kind == "replicas":
            return f"replicas:{self.group_size}"
        if self.kind == "parity":
            return f"parity:{self.parity}/{self.group_size}"
        return self.kind

    def groups(self, nodes: int) -> tuple[tuple[int, int], ...]:
        """The groups of a job: (nodes in a group, how many such groups), the smaller first.

        Raises:
            MismatchError: The job has too few nodes for one group.
        """
        require_integer("nodes", nodes, 1)
        if nodes < self.group_size:
            raise MismatchError(
                f"{self} needs at least {self.group_size} nodes, and the job has {nodes}; "
                f"{_what_fits(nodes)}"
            )
        count = nodes // self.group_size
        smaller, larger_ones = divmod(nodes, count)
        sizes = ((smaller, count - larger_ones), (smaller + 1, larger_ones))
        return tuple((size, number) for size, number in sizes if number)

    def tolerated(self, size: int) -> int:
        """Number of nodes of a group of ``size`` nodes that may be lost, whichever they are."""
        return size - 1 if self.kind == "replicas" else self.parity

    def extra_memory(self, size: int) -> Fraction:
        """Memory that a rank in a group of ``size`` nodes needs beside its own shard, in shards."""
        if self.kind == "replicas":
            return Fraction(size - 1)
        return Fraction(self.parity, size - self.parity)

    def bytes_sent(self, size: int) -> int:
        """Bytes that a rank in a group of ``size`` nodes sends in one save, in shards."""
        # A parity of g members has C = shard / (g - M) bytes a stripe; a member passes on M
        # accumulators of C for each of the g - M stripes to which it contributes.
        return size - 1 if self.kind == "replicas" else self.parity


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one rank, in shards; groups of different sizes cost differently."""

    mean: float
    largest: float

    def in_bytes(self, shard_nbytes: int) -> tuple[int, int]:
        """Mean and largest, in bytes."""
        return round(self.mean * shard_nbytes), round(self.largest * shard_nbytes)


@dataclass(frozen=True, slots=True)
class Survival:
    """Cost of a scheme for a job, and what it survives.

    Attributes:
        scheme: The scheme.
        nodes: Nodes in the job.
        ranks_per_node: Ranks on each.
        shard_nbytes: Size of what a rank saves, if it was told.
        groups: (nodes in a group, how many such groups), the smaller first.
        extra_memory: What a rank keeps beside its own shard, in memory or on disk, for each
            checkpoint that is kept.
        bytes_sent: What a rank sends to others in one save.
        loss: Probability that 1, 2, ... lost nodes lose data, every set of so many being as likely.
    """

    scheme: Scheme
    nodes: int
    ranks_per_node: int
    shard_nbytes: int | None
    groups: tuple[tuple[int, int], ...]
    extra_memory: Cost
    bytes_sent: Cost
    loss: tuple[float, ...]

    @property
    def survives_any(self) -> int:
        """Number of nodes that may be lost, whichever they are, without losing data."""
        return min(self.scheme.tolerated(size) for size, _ in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        return {
            "scheme": str(self.scheme),
            "groups": [{"nodes": size, "count": count} for size, count in self.groups],
            "extra_memory": _to_json(self.extra_memory, self.shard_nbytes),
            "bytes_sent": _to_json(self.bytes_sent, self.shard_nbytes),
            "survives_any": self.survives_any,
            "loss": [
                {"lost": lost, "probability": probability}
                for lost, probability in enumerate(self.loss, 1)
            ],
        }


def survivability(
    nodes: int,
    ranks_per_node: int,
    scheme: Scheme | str,
    shard_nbytes: int | None = None,
    *,
    most_lost: int | None = None,
) -> Survival:
    """Compute what a scheme costs, and how likely it loses data with some number of nodes.

    Chances are exact: sets of lost nodes of which no group loses too many are counted by a product
    of polynomials, one for each group, whose coefficient of x^k is the number of ways to lose k of
    its nodes and no data. All ranks of a node have partners on the same other nodes, so how many
    ranks there are makes no difference to them.

    Args:
        nodes: Nodes in the job: what is lost as a whole. They may be racks.
        ranks_per_node: Ranks on each.
        scheme: The scheme, or its text.
        shard_nbytes: Size of what a rank saves, to be told costs in bytes.
        most_lost: Up to how many lost nodes; by default 4, or all nodes of a smaller job.

    Raises:
        CheckpointingException: A number is out of range, or the text is no scheme.
        MismatchError: The job has too few nodes for the scheme, or for so many to be lost.
    """
    if isinstance(scheme, str):
        scheme = Scheme.parse(scheme)
    groups = scheme.groups(nodes)
    require_integer("ranks_per_node", ranks_per_node, 1)
    if shard_nbytes is not None:
        require_integer("shard_nbytes", shard_nbytes, 1)
    if most_lost is None:
        most_lost = min(_LOST_AT_MOST, nodes)
    require_integer("most_lost", most_lost, 1)
    if most_lost > nodes:
        raise MismatchError(f"{most_lost} nodes cannot be lost of a job that has {nodes}")
    return Survival(
        scheme,
        nodes,
        ranks_per_node,
        shard_nbytes,
        groups,
        _cost(groups, [scheme.extra_memory(size) for size, _ in groups]),
        _cost(groups, [scheme.bytes_sent(size) for size, _ in groups]),
        _chances(nodes, [(size, scheme.tolerated(size), n) for size, n in groups], most_lost),
    )


def usual_schemes(nodes: int) -> list[Scheme]:
    """Schemes to compare, of those for which the job has enough nodes."""
    schemes = map(Scheme.parse, _USUAL)
    return [scheme for scheme in schemes if scheme.group_size <= nodes]


def _chances(
    nodes: int, groups: Sequence[tuple[int, int, int]], most_lost: int
) -> tuple[float, ...]:
    """Exactly, for disjoint groups: of each kind its size, what it tolerates, and their number."""
    ways = [1]
    for size, tolerated, count in groups:
        of_one = [math.comb(size, lost) for lost in range(min(tolerated, most_lost) + 1)]
        ways = _product(ways, _power(of_one, count, most_lost), most_lost)
    ways += [0] * (most_lost + 1 - len(ways))
    sets = [math.comb(nodes, lost) for lost in range(most_lost + 1)]
    return tuple(
        float(Fraction(sets[lost] - ways[lost], sets[lost])) for lost in range(1, most_lost + 1)
    )


def _product(a: Sequence[int], b: Sequence[int], degree: int) -> list[int]:
    product = [0] * min(len(a) + len(b) - 1, degree + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: len(product) - i]):
            product[i + j] += x * y
    return product


def _power(base: Sequence[int], exponent: int, degree: int) -> Sequence[int]:
    """By squaring, so that the number of nodes hardly matters."""
    power: Sequence[int] = [1]
    while exponent:
        if exponent % 2:
            power = _product(power, base, degree)
        base = _product(base, base, degree)
        exponent //= 2
    return power


def _cost(groups: Sequence[tuple[int, int]], costs: Sequence[Fraction | int]) -> Cost:
    """Over all ranks, from what one in each kind of group pays."""
    nodes = sum(size * count for size, count in groups)
    total = sum(size * n * cost for (size, n), cost in zip(groups, costs, strict=True))
    return Cost(float(Fraction(total) / nodes), float(max(costs)))


def _to_json(cost: Cost, shard_nbytes: int | None) -> dict[str, Any]:
    mean, largest = (None, None) if shard_nbytes is None else cost.in_bytes(shard_nbytes)
    return {
        "mean": cost.mean,
        "largest": cost.largest,
        "mean_nbytes": mean,
        "largest_nbytes": largest,
    }


def _what_is_wrong(scheme: Scheme) -> str | None:
    size, parity = scheme.group_size, scheme.parity
    if scheme.kind not in _KINDS:
        return f"kind must be one of {', '.join(_KINDS)}"
    if scheme.kind == "none":
        return None if (size, parity) == (1, 0) else "shards that are kept once are in no groups"
    if scheme.kind == "replicas":
        if parity:
            return "replicas have no parity"
        if size < 2:
            return "K counts the owner's shard too, so it must be 2 or more; or use none"
        return None
    if parity not in (1, 2):
        return "a group has 1 or 2 parities"
    if size < parity + 2:
        return (
            f"with {parity} of them, a group has at least {parity + 2} nodes; in a smaller one, "
            f"parities need as much memory as copies: use replicas:{parity + 1}"
        )
    return None


def _what_fits(nodes: int) -> str:
    if nodes == 1:
        return "a single node has no other one to keep copies: use none, or more nodes"
    parities = f", G up to {nodes} in parity:M/G" if nodes > 2 else ""
    return f"what fits: K up to {nodes} in replicas:K{parities}"
