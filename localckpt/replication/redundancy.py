"""Interface of redundancy: how shards survive the loss of the nodes that they were saved on.

Two things work together. A :class:`ReplicationStrategy` protects what a job saves, and is chosen by
the user (``repl_strategy=``). A :class:`RecoveryScheme` turns pieces that are no copies of shards
into shards again, and is found by the kind of the pieces that the nodes hold, whichever strategy
the job has that loads them. Copies need no scheme.

To add a redundancy with pieces of its own: a package with a strategy that derives from
:class:`MemberStrategy`, which users pass as they do ours, and a scheme, which the package names in
an entry point; see ``schemes.py``. A piece is an image as any other: its identity has a kind, its
header says under ``<kind>_of`` which group it protects, and stores, inventories, coverage and
commands treat all kinds alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from localckpt.availability.inventory import Code, Inventory
from localckpt.errors import StorageError
from localckpt.ids import Checkpoint, Group, Piece, ShardIdentity
from localckpt.ranks.ranks import Ranks
from localckpt.state_dict.source import ShardSource
from localckpt.storage.store import Slot, Store


class Lacking(NamedTuple):
    copies: dict[int, list[int]]
    """For each owner of a shard with too few copies, the ranks that are to get one."""
    renewal: Renewal | None = None
    """Makes the pieces of other kinds that lack; ``None`` if none does."""


class Renewal(Protocol):
    """Pieces of a loaded checkpoint that are made again, behind training."""

    def __str__(self) -> str: ...

    def connect(self, name: str, ranks: Ranks, rate_limit: float | None) -> None:
        """Connect this rank to those that it makes pieces with, under a name that is new.

        Once ``ranks`` are aborted it ends soon, with an error.
        """

    def make(self, keeper: Keeper) -> list[str]:
        """Make the pieces, of all ranks together; return what went wrong, on any rank."""

    def abort(self) -> None:
        """End :meth:`make` in another thread, with an error there."""

    def close(self) -> None: ...


@dataclass(eq=False)
class Keeper:
    """A rank's place in the making of pieces: where it reads shards, and keeps what comes."""

    ranks: Ranks
    checkpoint: Checkpoint
    inventory: Inventory
    _store: Store
    _session_id: str
    slots: list[Slot] = field(default_factory=list, init=False)
    nbytes: int = field(default=0, init=False)

    def identity(self, rank: int) -> ShardIdentity:
        # A new piece names its lineage, as the lost one did.
        lineage = self.inventory.lineages.get(self.checkpoint.generation.epoch_id)
        return replace(self.checkpoint.shard(rank, self._session_id), lineage=lineage)

    def open(self, identity: ShardIdentity) -> ShardSource:
        return self._store.open(identity)

    def reserve(self, identity: ShardIdentity, nbytes: int, *, may_stage: bool = False) -> Slot:
        timeout_s = self.ranks.timeout_s
        slot = self._store.reserve(identity, nbytes, timeout_s, may_stage=may_stage)
        self.slots.append(slot)
        return slot

    def commit(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.arrived()
            self._store.commit([slot])
            if not self._store.holds(slot.identity):
                raise StorageError(f"{slot.identity} was written, and is not there")
            self.nbytes += slot.nbytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Shards of a checkpoint that no node holds, and what they may be computed from.

    Shards and members of groups are numbered by the ranks that saved the checkpoint; ``inventory``
    and ``computed_by`` have ranks of the job that reads it.
    """

    checkpoint: Checkpoint
    session_id: str
    inventory: Inventory
    wanted: Mapping[int, Group]
    computed_by: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class PieceProblem:
    """Piece of a node that is of no use: who read it, and what is wrong."""

    piece: Piece
    reader: int
    why: str


@dataclass(slots=True)
class Recovered:
    """Outcome of an attempt to compute shards; the same on all ranks but for the slots.

    If not all were computed, the ``problems`` of pieces tell why, and the ranks may plan again.
    """

    is_done: bool = False
    problems: list[PieceProblem] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)


class RecoveryScheme(Code, Protocol):
    """Scheme of the pieces of one kind: the shards that they make up for, and how."""

    def recover(self, lost: Lost, store: Store, ranks: Ranks, timeout_s: float) -> Recovered:
        """Compute shards, all of groups of this kind; all ranks of the job call it together.

        A shard is computed on the rank that :attr:`Lost.computed_by` names, into a slot of its
        store; the caller verifies it when it restores the state, and releases the slots. There are
        none after an error, the same on all ranks, or if not all shards were computed.
        """
