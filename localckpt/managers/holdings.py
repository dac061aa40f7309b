"""What the nodes of a job hold: which shards, and which ranks can read them.

Kept by node, not by rank: ranks of one node share a store, and one of them tells the others what is
in it. Plain data of one session, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localckpt.errors import MismatchError
from localckpt.ids import (
    MOST_DIGITS,
    MOST_MEMBERS,
    MOST_RANKS,
    Checkpoint,
    Generation,
    ParityGroup,
    ShardRecord,
)
from localckpt.lineage import EpochId, Lineage

__all__ = ["Holdings", "NodeShards", "ranks_by_node", "tell"]

# Numbers on the wire are below it.
_LIMIT = 10**MOST_DIGITS
_SHOWN = 80
# Shards of so many ranks, or twice that, tell the lineage of their epoch, however large the job is.
_TELLING_RANKS = 64
_NOTHING: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class NodeShards:
    """The shards of one checkpoint on one node, as that node tells the others.

    In JSON ``[epoch, sequence, iteration, world size, [rank, ...], [bytes, ...]]``: at most 100
    bytes, and 30 more for each shard. Where there is parity, a list of ``[rank, parities, first,
    step, count]`` follows, 40 bytes for each at most; where a group's ranks are not evenly spaced,
    a list of them stands in place of the last three. The session is left out: all ranks of a job
    share it.

    Attributes:
        checkpoint: What they are shards of.
        nbytes: The size of each one's image, by the rank that it belongs to.
        parities: The group of each parity, by the rank that it belongs to.

    Raises:
        MismatchError: There are no such shards.
    """

    checkpoint: Checkpoint
    nbytes: Mapping[int, int]
    parities: Mapping[int, ParityGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c = self.checkpoint
        own = (*c.generation, c.iteration, c.world_size)
        numbers = (*own, *self.nbytes, *self.nbytes.values(), *self.parities)
        # JSON's true is an int to Python.
        if set(map(type, numbers)) != {int} or not 0 <= min(numbers) <= max(numbers) < _LIMIT:
            raise MismatchError(
                f"shards of a checkpoint are told by whole numbers of at most {MOST_DIGITS} "
                f"digits, and these are not: {_shown(numbers)}"
            )
        if not 0 < c.world_size <= MOST_RANKS or max(self.nbytes, default=0) >= MOST_RANKS:
            raise MismatchError(
                f"no job has more than {MOST_RANKS} ranks, or none, and a checkpoint of "
                f"{c.world_size} is told of, with shards up to that of rank "
                f"{max(self.nbytes, default=0)}"
            )
        if not self.nbytes and not self.parities:
            raise MismatchError(f"iteration {c.iteration} is told of without any shard")
        for owner, group in self.parities.items():
            if owner not in group.ranks or max(group.ranks) >= c.world_size:
                raise MismatchError(
                    f"rank {owner} of {c.world_size} keeps no parity of {_shown(group.ranks)}"
                )

    def to_json(self) -> list[Any]:
        c = self.checkpoint
        shards = [list(self.nbytes), list(self.nbytes.values())]
        parities = [
            [owner, group.parity, *_packed(group.ranks)] for owner, group in self.parities.items()
        ]
        return [
            *c.generation,
            c.iteration,
            c.world_size,
            *shards,
            *([parities] if parities else ()),
        ]

    @classmethod
    def from_json(cls, fields: Any) -> NodeShards:
        try:
            epoch, sequence, iteration, world_size, ranks, sizes, *more = fields
            nbytes = dict(zip(ranks, sizes, strict=True))
            (told,) = more or [[]]
            if more and not (isinstance(told, list) and told):
                raise ValueError("what stands for parities is no list of any")
            parities = {
                owner: ParityGroup(_unpacked(packed), parity) for owner, parity, *packed in told
            }
        except (TypeError, ValueError) as error:
            raise MismatchError(f"what is told is not a checkpoint's shards: {error}") from error
        if len(nbytes) != len(ranks) or len(parities) != len(told):
            raise MismatchError(f"a rank's shard of iteration {_shown([iteration])} is told twice")
        checkpoint = Checkpoint(Generation(epoch, sequence), iteration, world_size)
        return cls(checkpoint, nbytes, parities)


def tell(records: Collection[ShardRecord], noted: Iterable[Lineage] = ()) -> list[list[Any]]:
    """What the rank that speaks for a node tells the others, for :meth:`Holdings.hear`.

    Args:
        records: The shards.
        noted: Lineages of epochs that began there, whether or not a shard of them is left.

    Returns:
        The shards of each checkpoint; and, once for each epoch, its lineage. In a large job not
        every node that has a shard tells that: it is the same on all.

    Raises:
        MismatchError: Some record's numbers are none that a shard can have.
    """
    lineages = _lineages_in(filter(_tells_lineage, records), _noted_alone(records, noted)).values()
    return [
        [held.to_json() for held in _grouped(records)],
        [lineage.to_json() for lineage in lineages],
    ]


def ranks_by_node(nodes: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of each node, in the order of their first ranks.

    Args:
        nodes: For each rank the node that it is on.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_on.setdefault(node, []).append(rank)
    return ranks_on


class Holdings:
    """The shards of all nodes.

    Args:
        ranks_on: The nodes, and which ranks of the job each has.
    """

    def __init__(self, ranks_on: Mapping[str, Sequence[int]]) -> None:
        self.ranks_on = ranks_on
        """The nodes, each with its ranks: all of them can read what the node holds."""
        self._node_of = {rank: node for node, ranks in ranks_on.items() for rank in ranks}
        self._shards: dict[Checkpoint, dict[str, dict[int, int]]] = {}
        self._parities: dict[Checkpoint, dict[str, dict[int, ParityGroup]]] = {}
        self.lineages: dict[EpochId, Lineage] = {}
        """Lineages of the epochs; those that earlier versions wrote have none."""

    @classmethod
    def found(
        cls, records: Mapping[str, Collection[ShardRecord]], noted: Iterable[Lineage] = ()
    ) -> Holdings:
        """Those of nodes that were looked at from outside of any job.

        Args:
            records: The shards of each node.
            noted: Lineages of epochs that began on them.
        """
        holdings = cls(dict.fromkeys(records, ()))
        for node, there in records.items():
            holdings._put(node, _grouped(there), _lineages_in(there, noted).values())
        return holdings

    def hear(self, node: str, told: Any) -> None:
        """Take in what the :meth:`speaker` of a node has told.

        Args:
            node: Of which nothing is known yet.
            told: What :func:`tell` gave, as JSON has brought it.

        Raises:
            MismatchError: It is not of that form; it names the rank. Nothing is taken in.
        """
        try:
            if not (isinstance(told, list) and len(told) == 2):
                raise MismatchError(f"{type(told).__name__} is told")
            if not all(isinstance(part, list) for part in told):
                raise MismatchError("no lists are told")
            heard = [NodeShards.from_json(fields) for fields in told[0]]
            lineages = [Lineage.from_json(fields) for fields in told[1]]
            if len({held.checkpoint for held in heard}) != len(heard):
                raise MismatchError("a checkpoint is told of twice")
        except MismatchError as error:
            raise MismatchError(
                f"what rank {self.speaker(node)} tells of its node's shards cannot be understood: "
                f"{error}. Start all ranks with the same version of localckpt; nothing was changed"
            ) from error
        self._put(node, heard, lineages)

    def node_of(self, rank: int) -> str:
        """The node that a rank of the job is on."""
        return self._node_of[rank]

    def speaker(self, node: str) -> int:
        """The rank that tells the others what a node holds."""
        return self.ranks_on[node][0]

    @property
    def checkpoints(self) -> Collection[Checkpoint]:
        """Those of which any node holds a shard."""
        return self._shards.keys()

    def shards(self, checkpoint: Checkpoint) -> dict[int, int]:
        """The shards of a checkpoint that any node holds: their sizes, by rank."""
        held: dict[int, int] = {}
        for on_node in self._shards.get(checkpoint, {}).values():
            held.update(on_node)
        return held

    def shards_on(self, checkpoint: Checkpoint, node: str) -> Mapping[int, int]:
        """The shards of a checkpoint that a node holds: their sizes, by rank."""
        return self._shards.get(checkpoint, {}).get(node, _NOTHING)

    def holders(self, checkpoint: Checkpoint) -> dict[int, list[str]]:
        """For each shard of a checkpoint the nodes that hold it."""
        nodes: dict[int, list[str]] = {}
        for node, on_node in self._shards.get(checkpoint, {}).items():
            for owner in on_node:
                nodes.setdefault(owner, []).append(node)
        return nodes

    def parities(self, checkpoint: Checkpoint) -> dict[ParityGroup, dict[int, list[str]]]:
        """For each group, whose parity of a checkpoint is held, and on which nodes."""
        groups: dict[ParityGroup, dict[int, list[str]]] = {}
        for node, on_node in self._parities.get(checkpoint, {}).items():
            for owner, group in on_node.items():
                groups.setdefault(group, {}).setdefault(owner, []).append(node)
        return groups

    def add_parity(self, checkpoint: Checkpoint, owner: int, node: str, group: ParityGroup) -> None:
        """A node has got the parity that a rank keeps."""
        self._parities.setdefault(checkpoint, {}).setdefault(node, {})[owner] = group

    def remove_parity(self, checkpoint: Checkpoint, owner: int, node: str) -> None:
        """The parity of a rank on a node is no good, or gone; it may be known already."""
        self._parities.get(checkpoint, {}).get(node, {}).pop(owner, None)

    def add(self, checkpoint: Checkpoint, owner: int, node: str, nbytes: int) -> None:
        """A node has got a copy of a shard."""
        self._shards.setdefault(checkpoint, {}).setdefault(node, {})[owner] = nbytes

    def remove(self, checkpoint: Checkpoint, owner: int, node: str) -> None:
        """A node's copy of a shard is no good, or gone; it may be known already."""
        held = self._shards.get(checkpoint, {})
        on_node = held.get(node, {})
        on_node.pop(owner, None)
        if not on_node:
            held.pop(node, None)
        if not held:
            self._shards.pop(checkpoint, None)

    def _put(self, node: str, there: Iterable[NodeShards], lineages: Iterable[Lineage]) -> None:
        for lineage in lineages:
            self.lineages.setdefault(lineage.epoch, lineage)
        for held in there:
            if held.nbytes:
                self._shards.setdefault(held.checkpoint, {})[node] = dict(held.nbytes)
            if held.parities:
                self._parities.setdefault(held.checkpoint, {})[node] = dict(held.parities)


def _grouped(records: Iterable[ShardRecord]) -> list[NodeShards]:
    shards: dict[Checkpoint, dict[int, int]] = {}
    parities: dict[Checkpoint, dict[int, ParityGroup]] = {}
    for record in records:
        checkpoint, rank = record.identity.checkpoint, record.identity.rank
        # A node may have several copies of a shard; each is as good as the first.
        of_checkpoint = shards.setdefault(checkpoint, {})
        if record.group is None:
            of_checkpoint.setdefault(rank, record.nbytes)
        else:
            parities.setdefault(checkpoint, {}).setdefault(rank, record.group)
    return [NodeShards(c, nbytes, parities.get(c, {})) for c, nbytes in shards.items()]


def _tells_lineage(record: ShardRecord) -> bool:
    identity = record.identity
    return identity.rank % max(1, identity.world_size // _TELLING_RANKS) == 0


def _noted_alone(records: Iterable[ShardRecord], noted: Iterable[Lineage]) -> list[Lineage]:
    """Lineages of epochs of which a node has no shard."""
    here = {record.identity.generation.epoch_id for record in records}
    return [lineage for lineage in noted if lineage.epoch not in here]


def _lineages_in(
    records: Iterable[ShardRecord], noted: Iterable[Lineage]
) -> dict[EpochId, Lineage]:
    found = (record.identity.lineage for record in records)
    return {lineage.epoch: lineage for lineage in (*noted, *found) if lineage is not None}


def _packed(ranks: Sequence[int]) -> list[Any]:
    """Ranks as ``first, step, count`` if they are evenly spaced."""
    step = ranks[1] - ranks[0]
    if list(ranks) == [ranks[0] + step * place for place in range(len(ranks))]:
        return [ranks[0], step, len(ranks)]
    return [list(ranks)]


def _unpacked(packed: Sequence[Any]) -> tuple[int, ...]:
    """The inverse of :func:`_packed`.

    Raises:
        TypeError, ValueError: That is none.
    """
    if len(packed) == 1 and isinstance(packed[0], list):
        return tuple(packed[0])
    first, step, count = packed
    # Counted up to what is claimed, if that can be.
    if {type(first), type(step), type(count)} != {int} or not 2 < count <= MOST_MEMBERS:
        raise ValueError("a parity group is told in another way")
    return tuple(first + step * place for place in range(count))


def _shown(values: Iterable[Any]) -> str:
    text = ", ".join(map(repr, values))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
