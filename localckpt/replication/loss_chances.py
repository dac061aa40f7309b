"""Chances that lost nodes lose data, for groups of nodes that may overlap: pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.ids import Group

_LOST_AT_MOST = 4


@dataclass(frozen=True, slots=True)
class LossChance:
    """Chance that data is lost with a number of nodes, every set of so many being as likely.

    Attributes:
        lost: Number of nodes that are lost at once.
        probability: Probability that data is lost with these nodes, 0 to 1.
        samples: Number of sets of nodes that were drawn; ``None`` if the probability is exact.
        standard_error: Standard error of the probability; 0 if it is exact. It is not 0 for samples
            that are all the same: (losses + 1) / (samples + 2) stands in it for the probability.
    """

    lost: int
    probability: float
    samples: int | None = None
    standard_error: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.samples is None


def chances_of_loss(nodes: Sequence[str], protection: Mapping[int, Group]) -> list[LossChance]:
    """Chances that data is lost with 1, 2, ... nodes, by the groups that protect the shards."""
    groups = {protection.get(rank, Group((rank,), 0)): None for rank in range(len(nodes))}
    on_nodes = [frozenset(nodes[rank] for rank in group.ranks) for group in groups]
    tolerated = [group.tolerated for group in groups]
    most = min(_LOST_AT_MOST, len(set(nodes)))
    return [loss_of_groups(on_nodes, tolerated, lost) for lost in range(1, most + 1)]


def loss_of_groups(
    groups_of_nodes: Sequence[Iterable[Hashable]],
    tolerated: int | Sequence[int],
    lost: int,
    *,
    enumerate_at_most: int = 200_000,
    samples: int = 100_000,
    seed: int = 0,
) -> LossChance:
    """Chance that data is lost where groups may overlap, as in rings.

    All sets of lost nodes are tried if they are few enough; else some are drawn at random, the same
    ones at every call with the same seed.

    Args:
        groups_of_nodes: For each group, the nodes of its members; a node counts as often as it is
            named. The nodes of the job are those named in any group.
        tolerated: How many members a group may lose without losing data: one number for all
            groups, or one for each.
        lost: How many nodes are lost at once.
        enumerate_at_most: More sets than that are sampled.
        samples: How many sets are drawn.
        seed: Seed of the draw.

    Raises:
        CheckpointingException: A number is out of range, or a group has no member.
        MismatchError: There are fewer nodes, or not as many numbers as groups.
    """
    groups = [tuple(group) for group in groups_of_nodes]
    limits = list(tolerated) if isinstance(tolerated, Sequence) else [tolerated] * len(groups)
    _require_groups(groups, limits)
    require_integer("enumerate_at_most", enumerate_at_most, 0)
    require_integer("samples", samples, 1)
    numbers = {node: i for i, node in enumerate(dict.fromkeys(n for g in groups for n in g))}
    require_lost(lost, len(numbers))

    # Ranks of one node often stand in groups of the same nodes, of which one tells all.
    distinct = dict.fromkeys(
        (tuple(sorted(numbers[node] for node in group)), most)
        for group, most in zip(groups, limits, strict=True)
    )
    limits = [most for _, most in distinct]
    groups_of: list[list[int]] = [[] for _ in numbers]
    for number, (members, _) in enumerate(distinct):
        for node in members:
            groups_of[node].append(number)

    sets = math.comb(len(numbers), lost)
    if sets <= enumerate_at_most:
        losing = sum(
            _loses_data(chosen, groups_of, limits)
            for chosen in combinations(range(len(numbers)), lost)
        )
        return LossChance(lost, losing / sets)
    draw = random.Random(seed)
    losing = sum(
        _loses_data(draw.sample(range(len(numbers)), lost), groups_of, limits)
        for _ in range(samples)
    )
    likely = (losing + 1) / (samples + 2)
    error = math.sqrt(likely * (1 - likely) / samples)
    return LossChance(lost, losing / samples, samples, error)


def _loses_data(
    lost: Iterable[int], groups_of: Sequence[Sequence[int]], limits: Sequence[int]
) -> bool:
    hits: dict[int, int] = {}
    for node in lost:
        for group in groups_of[node]:
            hits[group] = hits.get(group, 0) + 1
            if hits[group] > limits[group]:
                return True
    return False


def _require_groups(groups: Sequence[Sequence[Hashable]], limits: Sequence[int]) -> None:
    if len(limits) != len(groups):
        raise MismatchError(
            f"tolerated has {len(limits)} numbers for {len(groups)} groups: give one for each "
            f"group, or one for all"
        )
    for most in limits:
        require_integer("tolerated", most, 0)
    if not groups or not all(groups):
        raise CheckpointingException("there is no group of nodes, or one that has no member")


def require_lost(lost: int, nodes: int) -> None:
    require_integer("the number of lost nodes", lost, 1)
    if lost > nodes:
        raise MismatchError(f"{lost} nodes cannot be lost of a job that has {nodes}")


def require_integer(name: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least some size; raises CheckpointingException."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointingException(
            f"{name} must be an integer of at least {least}, not {value!r}"
        )
