"""Inventory of a job: the pieces on each node, and the ranks that can read them.

The inventory is kept by node, not by rank: the ranks of one node share a store, and one of them,
the node leader, reports the store's pieces. Plain data of one session.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from localckpt.errors import MismatchError
from localckpt.ids import MOST_DIGITS, MOST_RANKS, Checkpoint, Generation, Group, Piece, ShardRecord
from localckpt.lineage import EpochId, Lineage, are_whole
from localckpt.trust import Trusts

NodeT = TypeVar("NodeT", str, int)

_SHOWN = 80
# Of the reports of all nodes, as JSON.
_MOST_NBYTES = 64 << 20


Nodes: TypeAlias = frozenset[str]


class Code(Protocol):
    """Redundancy of a kind of piece in a group, one for each member: pure functions."""

    def __hash__(self) -> int:
        """Hash an instance, which is a key in caches."""
        ...

    def fits(self, group: Group) -> bool:
        """Return whether a group is possible; inventories leave out pieces of impossible ones."""
        ...

    def rebuilds(
        self, group: Group, rank: int, images: Collection[int], pieces: Collection[int]
    ) -> bool:
        """Return whether a member's shard can be computed from shards and pieces of some ranks."""
        ...

    def losses(
        self,
        group: Group,
        rank: int,
        holders: Mapping[int, Collection[str]],
        pieces: Mapping[int, Collection[str]],
    ) -> Iterable[Nodes]:
        """Return sets of nodes whose loss loses a member's shard, including all its copies.

        Every set of nodes whose loss loses the shard contains one of them. ``holders`` and
        ``pieces`` have for each rank the nodes that hold its shard, and its piece.
        """
        ...


Codes: TypeAlias = Mapping[str, Code]
"""The code of each kind of piece."""


@dataclass(frozen=True, slots=True)
class NodeShards:
    """Pieces of one checkpoint on one node, as the node leader reports them.

    In JSON ``[epoch, sequence, iteration, world size, [rank, ...], [bytes, ...]]``: at most 100
    bytes, and 30 more for each shard. If there are pieces of other kinds, an object follows, with a
    list of ``[rank, tolerated, [rank of the group, ...]]`` for each kind. The session is left out,
    since all ranks of a job share it. Impossible numbers raise MismatchError.
    """

    checkpoint: Checkpoint
    nbytes: dict[int, int]
    groups: dict[Piece, Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c = self.checkpoint
        own = (*c.generation, c.iteration, c.world_size)
        numbers = (*own, *self.nbytes, *self.nbytes.values(), *(p.rank for p in self.groups))
        if not are_whole(numbers):
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
        for (owner, kind), group in self.groups.items():
            if owner not in group.ranks or max(group.ranks) >= c.world_size:
                raise MismatchError(
                    f"rank {owner} of {c.world_size} keeps no {kind} of {_shown(group.ranks)}"
                )

    def to_json(self) -> list[Any]:
        c = self.checkpoint
        shards = [list(self.nbytes), list(self.nbytes.values())]
        others: dict[str, list[list[Any]]] = {}
        for (owner, kind), group in self.groups.items():
            others.setdefault(kind, []).append([owner, group.tolerated, list(group.ranks)])
        return [
            *c.generation,
            c.iteration,
            c.world_size,
            *shards,
            *([others] if others else ()),
        ]

    @classmethod
    def from_json(cls, fields: Any) -> NodeShards:
        try:
            epoch, sequence, iteration, world_size, ranks, sizes, *more = fields
            nbytes = dict(zip(ranks, sizes, strict=True))
            (others,) = more or [{}]
            if more and not (isinstance(others, dict) and others):
                raise ValueError("what stands for pieces of other kinds is no object with any")
            if not all(others.values()):
                raise ValueError("no piece is told of a kind")
            groups = {
                Piece(owner, kind): Group(tuple(group), tolerated, kind)
                for kind, fields in others.items()
                for owner, tolerated, group in fields
            }
        except (TypeError, ValueError) as error:
            raise MismatchError(f"what is told is not a checkpoint's shards: {error}") from error
        if len(nbytes) != len(ranks) or len(groups) != sum(map(len, others.values())):
            raise MismatchError(f"a rank's shard of iteration {_shown([iteration])} is told twice")
        if not nbytes and not groups:
            raise MismatchError(f"iteration {_shown([iteration])} is told of without any shard")
        checkpoint = Checkpoint(Generation(epoch, sequence), iteration, world_size)
        return cls(checkpoint, nbytes, groups)


def node_report(
    records: Collection[ShardRecord], noted: Iterable[Lineage] = (), trusts: Trusts | None = None
) -> list[list[Any]]:
    """Make the report of one node, and of epochs that began there; raises MismatchError."""
    lineages = _lineages_in(records, noted).values()
    return [
        [held.to_json() for held in _grouped(records)],
        [lineage.to_json() for lineage in lineages],
        *([trusts.to_json()] if trusts else ()),
    ]


def packed(reports: Sequence[Any]) -> str:
    """Compress the similar reports of all nodes into one text for all ranks."""
    return base64.b85encode(zlib.compress(json.dumps(reports).encode())).decode()


def unpacked(text: str) -> Any:
    """Undo :func:`packed`; raises MismatchError for other texts, and for what is too large."""
    inflater = zlib.decompressobj()
    try:
        reports = inflater.decompress(base64.b85decode(text), _MOST_NBYTES)
        if inflater.unconsumed_tail:
            raise ValueError(f"they take more than {_MOST_NBYTES} bytes")
        return json.loads(reports)
    except (ValueError, RecursionError, zlib.error) as error:
        raise MismatchError(
            f"what the nodes hold cannot be read from the job's store: {error}. Does another "
            f"program write to that store?"
        ) from error


def ranks_by_node(nodes: Sequence[NodeT]) -> dict[NodeT, list[int]]:
    """Group ranks by node, in the order of the nodes' first ranks."""
    ranks_on: dict[NodeT, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_on.setdefault(node, []).append(rank)
    return ranks_on


class Inventory:
    """Pieces on all nodes of a job, without those of kinds or groups that no code fits."""

    def __init__(self, ranks_on: Mapping[str, Sequence[int]], codes: Codes | None = None) -> None:
        self.codes = {} if codes is None else codes
        self.ranks_on = ranks_on
        """The nodes, each with its ranks, all of which can read the node's pieces."""
        self._node_of = {rank: node for node, ranks in ranks_on.items() for rank in ranks}
        # By checkpoint and node.
        self._held: dict[Checkpoint, dict[str, NodeShards]] = {}
        self.lineages: dict[EpochId, Lineage] = {}
        """Lineages of the epochs, as far as any shard or note tells them."""
        self.trusts = Trusts()
        """Notes of all nodes on trust in checkpoints."""

    @classmethod
    def found(
        cls,
        records: Mapping[str, Collection[ShardRecord]],
        noted: Iterable[Lineage] = (),
        codes: Codes | None = None,
        trusts: Trusts | None = None,
    ) -> Inventory:
        """Make the inventory of stores that are read from outside of a job."""
        inventory = cls(dict.fromkeys(records, ()), codes)
        inventory.trusts = trusts or inventory.trusts
        for node, there in records.items():
            inventory._put(node, _grouped(there), _lineages_in(there, noted).values())
        return inventory

    def merge(self, node: str, report: Any) -> None:
        """Add a node's report, after JSON; of another form it is a MismatchError."""
        try:
            if not (isinstance(report, list) and len(report) in (2, 3)):
                raise MismatchError(f"{type(report).__name__} is told")
            if not all(isinstance(part, list) for part in report):
                raise MismatchError("no lists are told")
            trusts = [Trusts.from_json(fields) for fields in report[2:]]
            shards = [NodeShards.from_json(fields) for fields in report[0]]
            lineages = [Lineage.from_json(fields) for fields in report[1]]
            if len({held.checkpoint for held in shards}) != len(shards):
                raise MismatchError("a checkpoint is told of twice")
        except MismatchError as error:
            raise MismatchError(
                f"what rank {self.leader(node)} tells of its node's shards cannot be understood: "
                f"{error}. Start all ranks with the same version of localckpt; nothing was changed"
            ) from error
        self._put(node, shards, lineages)
        self.trusts = Trusts.of([self.trusts, *trusts])

    def merge_all(self, reports: Sequence[Any]) -> None:
        """Add the reports of all nodes, each at the index of the node leader's rank."""
        for node in self.ranks_on:
            self.merge(node, reports[self.leader(node)])

    def reports(self) -> list[Any]:
        messages: list[Any] = [None] * len(self._node_of)
        lineages = [lineage.to_json() for lineage in self.lineages.values()]
        for node in self.ranks_on:
            there = [on[node].to_json() for on in self._held.values() if node in on]
            messages[self.leader(node)] = [there, lineages]
            # The first report has all lineages.
            lineages = []
        return messages

    def node_of(self, rank: int) -> str:
        return self._node_of[rank]

    def leader(self, node: str) -> int:
        return self.ranks_on[node][0]

    def is_leader(self, rank: int) -> bool:
        return self.leader(self._node_of[rank]) == rank

    @property
    def checkpoints(self) -> Collection[Checkpoint]:
        return self._held.keys()

    def shards(self, checkpoint: Checkpoint) -> dict[int, int]:
        held: dict[int, int] = {}
        for on_node in self._held.get(checkpoint, {}).values():
            held.update(on_node.nbytes)
        return held

    def shards_on(self, checkpoint: Checkpoint, node: str) -> Mapping[int, int]:
        on_node = self._held.get(checkpoint, {}).get(node)
        return {} if on_node is None else on_node.nbytes

    def holders(self, checkpoint: Checkpoint) -> dict[int, list[str]]:
        nodes: dict[int, list[str]] = {}
        for node, on_node in self._held.get(checkpoint, {}).items():
            for owner in on_node.nbytes:
                nodes.setdefault(owner, []).append(node)
        return nodes

    def groups(self, checkpoint: Checkpoint) -> dict[Group, dict[int, list[str]]]:
        """Return, for each group with pieces of a checkpoint, the holders of each rank's piece."""
        groups: dict[Group, dict[int, list[str]]] = {}
        for node, on_node in self._held.get(checkpoint, {}).items():
            for piece, group in on_node.groups.items():
                groups.setdefault(group, {}).setdefault(piece.rank, []).append(node)
        return groups

    def groups_of(self, checkpoint: Checkpoint) -> dict[int, dict[Group, dict[int, list[str]]]]:
        """Return, for each rank, the groups of :meth:`groups` that contain the rank."""
        of_rank: dict[int, dict[Group, dict[int, list[str]]]] = {}
        for group, pieces in self.groups(checkpoint).items():
            for rank in group.ranks:
                of_rank.setdefault(rank, {})[group] = pieces
        return of_rank

    def reader(self, nodes: Sequence[str], owner: int) -> int:
        """Return the rank that reads a piece on ``nodes``: its owner, if it is on one of them."""
        if self._node_of.get(owner) in nodes:
            return owner
        ranks = self.ranks_on[nodes[0]]
        return ranks[owner % len(ranks)]

    def add_piece(self, checkpoint: Checkpoint, owner: int, node: str, group: Group) -> None:
        self._on(checkpoint, node).groups[Piece(owner, group.kind)] = group

    def add(self, checkpoint: Checkpoint, owner: int, node: str, nbytes: int) -> None:
        self._on(checkpoint, node).nbytes[owner] = nbytes

    def remove(self, checkpoint: Checkpoint, piece: Piece, node: str) -> None:
        """Remove a piece from a node, if it is there."""
        on_node = self._on(checkpoint, node)
        if piece.is_shard:
            on_node.nbytes.pop(piece.rank, None)
        else:
            on_node.groups.pop(piece, None)
        if not on_node.nbytes and not on_node.groups:
            del self._held[checkpoint][node]
        if not self._held[checkpoint]:
            del self._held[checkpoint]

    def _on(self, checkpoint: Checkpoint, node: str) -> NodeShards:
        of_checkpoint = self._held.setdefault(checkpoint, {})
        return of_checkpoint.setdefault(node, NodeShards(checkpoint, {}))

    def _put(self, node: str, there: Iterable[NodeShards], lineages: Iterable[Lineage]) -> None:
        for lineage in lineages:
            self.lineages.setdefault(lineage.epoch, lineage)
        for told in there:
            for piece, group in list(told.groups.items()):
                if piece.kind not in self.codes or not self.codes[piece.kind].fits(group):
                    del told.groups[piece]
            if told.nbytes or told.groups:
                self._held.setdefault(told.checkpoint, {})[node] = told


def _grouped(records: Iterable[ShardRecord]) -> list[NodeShards]:
    shards: dict[Checkpoint, dict[int, int]] = {}
    groups: dict[Checkpoint, dict[Piece, Group]] = {}
    for record in records:
        checkpoint, piece = record.identity.checkpoint, record.identity.piece
        # A node may have several copies of a piece; one of them is enough.
        of_checkpoint = shards.setdefault(checkpoint, {})
        if record.group is None:
            of_checkpoint.setdefault(piece.rank, record.nbytes)
        else:
            groups.setdefault(checkpoint, {}).setdefault(piece, record.group)
    return [NodeShards(c, nbytes, groups.get(c, {})) for c, nbytes in shards.items()]


def _lineages_in(
    records: Iterable[ShardRecord], noted: Iterable[Lineage]
) -> dict[EpochId, Lineage]:
    found = (record.identity.lineage for record in records)
    return {lineage.epoch: lineage for lineage in (*noted, *found) if lineage is not None}


def _shown(values: Iterable[Any]) -> str:
    text = ", ".join(map(repr, values))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
