"""Interface of redundancy: how shards survive the loss of the nodes that they were saved on.

Two things work together. A :class:`Redundancy` protects what a job saves, and is chosen by the user
(``repl_strategy=``): :class:`NoReplication`, :class:`CliqueReplicationStrategy` and
:class:`ParityReplicationStrategy` are the implementations, by way of :class:`ReplicationStrategy`.
A :class:`Scheme` turns pieces that are no copies of shards into shards again, and is found by the
kind of the pieces that the nodes hold, whichever redundancy the job has that loads them. Redundancy
by copies needs no scheme.

To add a redundancy with pieces of its own: a module beside ``parity/`` with a strategy that derives
from :class:`MemberStrategy` and a scheme; a line in ``schemes.py``; and the name of the strategy in
``localckpt/__init__.py``. A piece is an image as any other: its identity has a kind, its header
says under ``<kind>_of`` which group it protects, and stores, inventories, coverage and commands
treat all kinds alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import Code
from localckpt.ids import Checkpoint, Group, Piece, ShardIdentity

if TYPE_CHECKING:
    from localckpt.ranks.ranks import Ranks
    from localckpt.state_dict.source import ShardSource
    from localckpt.storage.slot import Slot
    from localckpt.storage.store import Store

__all__ = [
    "Keeper",
    "Lacking",
    "Lost",
    "PieceProblem",
    "Recovered",
    "Redundancy",
    "Renewal",
    "Scheme",
]


class Redundancy(Protocol):
    """Protection of the shards that a job saves. All ranks call its methods together."""

    @abstractmethod
    def place(self, domains: Sequence[str], timeout_s: float | None = None) -> None:
        """Place the ranks in groups, before anything is protected.

        Args:
            domains: For each rank of the job, the token of its store: what is lost together.
            timeout_s: Deadline of each step, in seconds.

        Raises:
            SameMachineReplicationException: A group would be lost together.
            MismatchError: The ranks do not fit together.
        """
        ...

    @property
    def protection(self) -> Mapping[int, Group]:
        """For each rank the group that protects its shard.

        Known once the ranks are placed; the same on all ranks. Without an entry a shard is only on
        its own node.
        """
        ...

    def protect(
        self,
        own: Slot | None,
        identity: ShardIdentity,
        store: Store,
        timeout_s: float,
        *,
        on_gpu: bool = False,
        error: str | None = None,
    ) -> list[Slot]:
        """Send what protects a shard to other nodes, and take what protects theirs.

        Args:
            own: This rank's shard; ``None`` if there is an error.
            identity: Identity of this rank's shard.
            store: Keeps what comes here.
            timeout_s: The caller's deadline, in seconds: of waiting for a slot of the store, and of
                two steps that ranks take together.
            on_gpu: Whether the state is in GPU memory, and may be sent from there.
            error: Why this rank has no shard, if so; the ranks of its group then raise it, too.

        Returns:
            Slots of what came here, filled, for the caller to commit. When it raises, it has
            released them.

        Raises:
            PeerLostError: A rank did not come, or broke off.
            CheckpointingException: Something went wrong on a rank; the same on all of its group.
        """
        ...

    def lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        """Find what a loaded checkpoint lacks of its protection: a pure function."""
        ...


class Lacking(NamedTuple):
    """Protection that a checkpoint lacks."""

    copies: dict[int, list[int]]
    """For each owner of a shard with too few copies, the ranks that are to get one."""
    renewal: Renewal | None = None
    """Makes the pieces of other kinds that lack; ``None`` if none does."""


class Renewal(Protocol):
    """Pieces of a loaded checkpoint that are made again, behind training."""

    def __str__(self) -> str:
        """Words for the log."""
        ...

    def connect(self, name: str, rank: int, timeout_s: float, rate_limit: float | None) -> None:
        """Connect this rank to those that it makes pieces with.

        Args:
            name: Name that was not used before in this job.
            rank: This rank.
            timeout_s: Deadline, in seconds.
            rate_limit: Number of bytes a second that this rank sends at most; ``None`` for any.
        """
        ...

    def make(self, keeper: Keeper) -> list[str]:
        """Make the pieces; all ranks of the job call it together.

        Returns:
            What went wrong, on any rank; the pieces that were made are in the keeper's inventory.
        """
        ...

    def abort(self) -> None:
        """End :meth:`make` in another thread, with an error there."""
        ...

    def close(self) -> None:
        """Give up connections."""
        ...


class Keeper(Protocol):
    """A rank's place in the making of pieces: where it reads shards, and keeps what comes."""

    ranks: Ranks
    checkpoint: Checkpoint
    inventory: Inventory

    def identity(self, rank: int) -> ShardIdentity:
        """Identity of a rank's shard."""
        ...

    def open(self, identity: ShardIdentity) -> ShardSource:
        """The image of a piece of this node; raises as :meth:`Store.open`."""
        ...

    def reserve(self, identity: ShardIdentity, nbytes: int) -> Slot:
        """A slot for a piece; raises as :meth:`Store.reserve`."""
        ...

    def commit(self, slots: Sequence[Slot]) -> None:
        """Write what has come to slots; raises StorageError."""
        ...


@dataclass(frozen=True, slots=True)
class Lost:
    """Shards of a checkpoint that no node holds, and what they may be computed from.

    Shards and members of groups are numbered by the ranks that saved the checkpoint. The job that
    reads it may have other ranks, fewer or more of them; each shard is computed on one of those.

    Attributes:
        checkpoint, session_id: The checkpoint.
        inventory: Pieces on the nodes of this job, each with the ranks of this job that read them.
            Nothing is taken out of it.
        wanted: The group that each shard is computed from.
        damaged: Nodes with a copy of a shard that is not good, but may be in part.
        computed_by: The rank of this job that computes each shard; a rank may compute several.
        is_kept: Whether the computed shards may be committed. If not, their slots serve one load.
    """

    checkpoint: Checkpoint
    session_id: str
    inventory: Inventory
    wanted: Mapping[int, Group]
    damaged: Mapping[int, Mapping[str, str]]
    computed_by: Mapping[int, int]
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class PieceProblem:
    """Damage to what a node holds of a piece.

    Attributes:
        piece: The piece.
        reader: The rank that read it.
        why: What is wrong.
        is_gone: Whether it is of no use at all. Else some of its bytes were used.
    """

    piece: Piece
    reader: int
    why: str
    is_gone: bool


@dataclass(slots=True)
class Recovered:
    """Outcome of an attempt to compute shards; the same on all ranks but for the slots.

    Attributes:
        is_done: Whether all were computed. If not, the problems and what is hopeless tell why, and
            the ranks may plan again.
        problems: What was wrong with pieces that were read.
        hopeless: Shards that could not be computed, and why.
        nbytes: Size of the image of each shard that was computed.
        slots: The slot of each shard that was computed on this rank.
    """

    is_done: bool = False
    problems: list[PieceProblem] = field(default_factory=list)
    hopeless: dict[int, str] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)


class Scheme(Code, Protocol):
    """Scheme of the pieces of one kind: the shards that they make up for, and how.

    The pure part, :class:`Code`, must not need torch: commands use it.
    """

    def recover(self, lost: Lost, store: Store, ranks: Ranks, timeout_s: float) -> Recovered:
        """Compute shards; all ranks of the job call it together, with the same that is lost.

        A shard is computed on the rank that :attr:`Lost.computed_by` names, into a slot of its
        store, and verified as far as that can be; the caller verifies it again when it restores the
        state. The caller releases the slots; there are
        none after an error, or if not all shards were computed.

        Args:
            lost: The shards, all of groups of this kind.
            store: This rank's pieces.
            ranks: The ranks of the job.
            timeout_s: Deadline of each step, in seconds.

        Raises:
            PeerLostError: A rank did not come, or broke off.
            CheckpointingException: Something went wrong on some rank; the same on all.
        """
        ...
