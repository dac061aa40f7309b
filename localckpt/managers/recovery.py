"""Reads one checkpoint on all ranks: own node first, else a peer, else computed from parity.

Works in rounds, until every shard is good. In each, all ranks make the same plan, move what has to
move, verify, and tell each other how it went; bad copies are left out of the next round's plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from localckpt import errors
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    PeerLostError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import described, with_class
from localckpt.ids import Checkpoint, CkptID, ShardIdentity
from localckpt.managers.coverage import describe_incomplete
from localckpt.managers.explanation import Explanation, ranges
from localckpt.managers.holdings import Holdings
from localckpt.managers.rebuilding import Rebuilding
from localckpt.managers.repairs import Repair, plan_repairs, reader_on
from localckpt.managers.shelf import LoadOptions, Shelf
from localckpt.managers.watched import WatchedSource
from localckpt.ranks.failure import forget_frames
from localckpt.ranks.ranks import Ranks
from localckpt.replication.exchange import ExchangePlan, plan_among_nodes
from localckpt.replication.parity.stripes import Kind
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.storage.names import shard_named

__all__ = ["Loaded", "Recovery", "plan_shards", "why_not_that", "why_nothing_loads"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A shard that was read and verified."""

    state: Any
    nbytes: int
    came_from: str


class _Bad(NamedTuple):
    """A bad copy; ranks of the job."""

    holder: int
    owner: int
    why: str
    is_damaged: bool
    """Whether some of its bytes may be good."""


class _Refusal(NamedTuple):
    """An error that no other copy would cure, as ranks tell it to each other."""

    kind: str
    """Name of the exception's type."""
    text: str
    class_name: str | None = None
    path: str | None = None

    @classmethod
    def of(cls, error: Exception) -> _Refusal:
        if isinstance(error, RestoreError):
            return cls(type(error).__name__, described(error), error.class_name, error.path)
        if isinstance(error, CheckpointingException):
            return cls(type(error).__name__, described(error))
        # Memory ran out, or the caller's own objects raised: the bytes were not at fault.
        text = f"the state cannot be rebuilt: {with_class(error)}"
        return cls(RestoreError.__name__, text)


@dataclass(frozen=True)
class _Outcome:
    """How a round went on one rank: which copies it found bad, or why it can load none at all."""

    bad: tuple[_Bad, ...] = ()
    refused: _Refusal | None = None
    unfit: str | None = None
    """Why its shard, which was computed from parity, is no good."""

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> _Outcome:
        bad, refused, unfit = fields
        copies = tuple(_Bad(*copy) for copy in bad)
        return cls(copies, _Refusal(*refused) if refused else None, unfit)

    def to_json(self) -> list[Any]:
        return [self.bad, self.refused, self.unfit]


class Recovery:
    """The loading of a job's shards.

    Args:
        coordinator: The ranks that load together.
        strategy: Moves images between ranks.
        shelf: This rank's shards.
        holdings: What each node holds. Copies that turn out bad are taken out of it.
    """

    def __init__(
        self,
        coordinator: Ranks,
        strategy: ReplicationStrategy,
        shelf: Shelf,
        holdings: Holdings,
    ) -> None:
        self._coordinator = coordinator
        self._strategy = strategy
        self._shelf = shelf
        self._holdings = holdings
        self._repairs: list[Repair] = []
        # Nodes with copies that are good in part, by rank, and what is wrong with them.
        self._damaged: dict[int, dict[str, str]] = {}
        # The same of parities, by rank and node; they are of use until all is loaded.
        self._damaged_parities: list[tuple[int, str]] = []
        self._hopeless: set[int] = set()
        self._room: memoryview | None = None
        # What kept this rank from loading, until the others have been told.
        self._failure: Exception | None = None
        self.bad: list[tuple[ShardIdentity, int, str]] = []
        """Copies that could not be read, on whose nodes, and why; the same on all ranks."""
        self.rebuilt: dict[int, int] = {}
        """The sizes of the shards that were computed from parity, by rank; the same on all ranks.

        This rank's is on its shelf as if a peer had sent it, for the caller to keep or to drop.
        """
        self.to_replace: dict[ShardIdentity, str] = {}
        """What is damaged on this node and is to be replaced by a good one, and why."""

    def load(self, checkpoint: Checkpoint, session_id: str, options: LoadOptions) -> Loaded | None:
        """Read this rank's shard; ``None`` on all ranks when some shard has no good copy left.

        Raises:
            CheckpointingException: A rank cannot load it for a reason that no other copy would
                cure, most often a RestoreError; raised on all ranks.
        """
        self._damaged, self._hopeless, self.rebuilt, self.to_replace = {}, set(), {}, {}
        self._damaged_parities = []
        mine = checkpoint.shard(self._coordinator.rank, session_id)
        try:
            while True:
                self._drop_room(mine)
                try:
                    plan = self._plan(checkpoint, session_id)
                except NoReplicasAvailableError:
                    self._set_damaged_aside(checkpoint, session_id)
                    return None
                if self._repairs and not self._rebuild(checkpoint, session_id):
                    continue
                arrived = self._fetch(plan, checkpoint, session_id) if plan.transfers else []
                if arrived is None:
                    continue
                if self._room is not None:
                    arrived = [self._room]
                loaded, outcome = self._restore(plan, checkpoint, session_id, arrived, options)
                phase = f"load iteration {checkpoint.iteration}"
                if self._all_well(phase, outcome, checkpoint, session_id):
                    self._set_damaged_aside(checkpoint, session_id)
                    for owner, node in self._damaged_parities:
                        # It is to be made anew.
                        self._holdings.remove_parity(checkpoint, owner, node)
                    return loaded
        except BaseException:
            self._drop_room(mine)
            raise

    def _plan(self, checkpoint: Checkpoint, session_id: str) -> ExchangePlan[CkptID]:
        self._repairs = plan_repairs(checkpoint, self._holdings, self._damaged, self._hopeless)
        computed = {rank for repair in self._repairs for rank in repair.wanted}
        ranks = range(self._coordinator.world_size)
        wanted = {rank: [rank] for rank in ranks if rank not in computed}
        return plan_shards(checkpoint, session_id, self._holdings, wanted)

    def _rebuild(self, checkpoint: Checkpoint, session_id: str) -> bool:
        """Compute what is on no node; whether that was done, on all ranks."""
        rebuilding = Rebuilding(
            self._coordinator,
            self._shelf,
            checkpoint,
            session_id,
            self._repairs,
            self._strategy.load_timeout_s,
        )
        try:
            done = rebuilding.run()
        finally:
            self._room = rebuilding.room
        self.rebuilt = rebuilding.nbytes
        for rank, why in rebuilding.hopeless.items():
            logger.error("%s cannot be computed: %s", checkpoint.shard(rank, session_id), why)
        self._hopeless |= rebuilding.hopeless.keys()
        # What was damaged may have failed altogether since.
        gone = {(kind, owner, reader) for kind, owner, reader, _ in rebuilding.gone}
        for kind, owner, reader, why in [*rebuilding.gone, *rebuilding.damaged]:
            node = self._holdings.node_of(reader)
            identity = checkpoint.shard(owner, session_id)
            if kind is Kind.IMAGE:
                self._take_out(checkpoint, identity, reader, why)
                if (kind, owner, reader) in gone:
                    self._damaged.get(owner, {}).pop(node, None)
                else:
                    self._damaged.setdefault(owner, {}).setdefault(node, why)
                continue
            if (kind, owner, reader) in gone:
                self._holdings.remove_parity(checkpoint, owner, node)
            else:
                self._damaged_parities.append((owner, node))
            if reader == self._coordinator.rank:
                self.to_replace[identity.parity] = why
        return done

    def _take_out(
        self, checkpoint: Checkpoint, identity: ShardIdentity, holder: int, why: str
    ) -> None:
        """A copy is not to be read again as if it were good."""
        node = self._holdings.node_of(holder)
        if identity.rank in self._holdings.shards_on(checkpoint, node):
            self.bad.append((identity, holder, why))
        self._holdings.remove(checkpoint, identity.rank, node)

    def _set_damaged_aside(self, checkpoint: Checkpoint, session_id: str) -> None:
        """Those that nobody needs any more; one that was mended stays until it is replaced.

        They are looked at once more: it may be the rank that they were sent to that is broken.
        """
        for owner, nodes in self._damaged.items():
            identity = checkpoint.shard(owner, session_id)
            for node, why in nodes.items():
                if reader_on([node], owner, self._holdings) != self._coordinator.rank:
                    continue
                if owner not in self.rebuilt:
                    self._shelf.doubt(identity, f"read: {why}")
                elif owner == self._coordinator.rank:
                    self.to_replace[identity] = why

    def _drop_room(self, mine: ShardIdentity) -> None:
        if self._room is not None:
            self._shelf.drop_unfinished([mine])
        self._room, self.rebuilt = None, {}

    def _fetch(
        self, plan: ExchangePlan[CkptID], checkpoint: Checkpoint, session_id: str
    ) -> list[memoryview] | None:
        """Move what the plan moves.

        Returns:
            The image of this rank's shard, if a peer sent it; ``None`` on all ranks when a copy
            could not be read, and is out of the next plan.
        """
        sources: dict[CkptID, WatchedSource] = {}
        refused: dict[CkptID, CheckpointingException] = {}
        failed: _Refusal | None = None
        for entry in plan.sends(self._coordinator.rank):
            identity = checkpoint.shard(entry.id_.rank, session_id)
            try:
                sources[entry.id_] = WatchedSource(self._shelf.open(identity))
            except (StorageError, CorruptShardError) as error:
                refused[entry.id_] = error
            except Exception as error:  # noqa: BLE001 - raised on every rank once all have been told
                failed, self._failure = _Refusal.of(error), error
        arrived: list[memoryview] = []

        def room(_: CkptID, nbytes: int) -> memoryview:
            mine = checkpoint.shard(self._coordinator.rank, session_id)
            arrived.append(self._shelf.room_to_load(mine, nbytes))
            return arrived[-1]

        def all_well(phase: str) -> bool:
            refused.update({id_: s.refused for id_, s in sources.items() if s.refused})
            outcome = replace(self._left_out(refused, checkpoint, session_id), refused=failed)
            return self._all_well(phase, outcome, checkpoint, session_id)

        with ExitStack() as opened:
            for source in sources.values():
                opened.callback(source.close)
            if not all_well("open what peers need"):
                return None
            try:
                self._strategy.retrieve_image(plan, sources.__getitem__, room)
            except PeerLostError:
                raise
            except CheckpointingException:
                # The same on all ranks. If a sender could not read its copy, another may do.
                if all_well("send what peers need"):
                    raise
                return None
        return arrived

    def _left_out(
        self,
        refused: Mapping[CkptID, CheckpointingException],
        checkpoint: Checkpoint,
        session_id: str,
    ) -> _Outcome:
        """Own copies that could not be read; only bad bytes are set aside."""
        bad = []
        for id_, error in refused.items():
            if isinstance(error, CorruptShardError):
                self._shelf.set_aside(checkpoint.shard(id_.rank, session_id), str(error))
            bad.append(_Bad(self._coordinator.rank, id_.rank, described(error), is_damaged=False))
        return _Outcome(tuple(bad))

    def _restore(
        self,
        plan: ExchangePlan[CkptID],
        checkpoint: Checkpoint,
        session_id: str,
        arrived: list[memoryview],
        options: LoadOptions,
    ) -> tuple[Loaded | None, _Outcome]:
        identity = checkpoint.shard(self._coordinator.rank, session_id)
        senders = [entry.sender for entry in plan.receives(self._coordinator.rank)]
        holder = self._coordinator.rank
        came_from = "own node"
        if senders:
            holder = senders[0]
            came_from = f"peer rank {holder}"
        if self._room is not None:
            came_from = "parity"
        try:
            state, nbytes = self._shelf.restore(identity, arrived[0] if arrived else None, options)
        except (StorageError, CorruptShardError) as error:
            # What is told of it is its text. It may refer to the state that was to be filled.
            forget_frames(error)
            if self._room is not None:
                return None, _Outcome(unfit=described(error))
            # What the node refused once it may give the next time: only bad bytes are set aside.
            is_bad = isinstance(error, CorruptShardError)
            if is_bad and not senders and not self._may_be_mended(checkpoint, identity.rank):
                self._shelf.set_aside(identity, str(error))
            return None, _Outcome((_Bad(holder, identity.rank, described(error), is_bad),))
        except Exception as error:  # noqa: BLE001 - raised on every rank once all have been told
            forget_frames(error)
            self._failure = error
            return None, _Outcome(refused=_Refusal.of(error))
        return Loaded(state, nbytes, came_from), _Outcome()

    def _all_well(
        self, phase: str, mine: _Outcome, checkpoint: Checkpoint, session_id: str
    ) -> bool:
        """Tell each other how it went, and leave out the copies that were bad."""
        gathered = self._coordinator.gather(phase, mine.to_json())
        outcomes = [_Outcome.from_json(fields) for fields in gathered]
        refusals = {rank: o.refused for rank, o in enumerate(outcomes) if o.refused}
        if refusals:
            failure, self._failure = self._failure, None
            forget_frames(failure)
            raise _joint_error(refusals, checkpoint) from failure
        unfit = {rank: o.unfit for rank, o in enumerate(outcomes) if o.unfit is not None}
        self._hopeless |= unfit.keys()
        for rank, unfit_why in unfit.items():
            logger.error("the shard of rank %d was computed in vain: %s", rank, unfit_why)
        bad = [(rank, copy) for rank, outcome in enumerate(outcomes) for copy in outcome.bad]
        for rank, (holder, owner, why, is_damaged) in bad:
            identity = checkpoint.shard(owner, session_id)
            node = self._holdings.node_of(holder)
            mendable = is_damaged and self._may_be_mended(checkpoint, owner)
            self._holdings.remove(checkpoint, owner, node)
            self.bad.append((identity, holder, why))
            if mendable:
                # What is good of it may be needed yet.
                self._damaged.setdefault(owner, {})[node] = why
            elif holder == self._coordinator.rank != rank:
                self._shelf.doubt(identity, f"sent to rank {rank}, where {why}")
        return not bad and not unfit

    def _may_be_mended(self, checkpoint: Checkpoint, rank: int) -> bool:
        """Whether there is parity of a rank's shard."""
        return any(rank in group.ranks for group in self._holdings.parities(checkpoint))


def _joint_error(
    refusals: Mapping[int, _Refusal], checkpoint: Checkpoint
) -> CheckpointingException:
    """One error for all ranks; ranks that say the same are told in one breath."""
    ranks_of: dict[str, list[int]] = {}
    for rank, refusal in refusals.items():
        ranks_of.setdefault(refusal.text, []).append(rank)
    told = "; ".join(
        f"rank{'s'[: len(ranks) > 1]} {ranges(ranks)}: {text}" for text, ranks in ranks_of.items()
    )
    kinds = {refusal.kind for refusal in refusals.values()}
    kind = kinds.pop() if len(kinds) == 1 else ""
    if kind == RestoreError.__name__:
        first = refusals[min(refusals)]
        return RestoreError(
            f"iteration {checkpoint.iteration} cannot be loaded: {told}. Its bytes are those that "
            f"were saved: nothing was renamed or removed, and no older checkpoint was taken in its "
            f"place. Load it with the classes, the libraries and the memory that it needs",
            first.class_name,
            first.path,
        )
    raised = getattr(errors, kind) if kind in errors.__all__ else CheckpointingException
    error: CheckpointingException = raised(told)
    return error


def plan_shards(
    checkpoint: Checkpoint,
    session_id: str,
    holdings: Holdings,
    wanted: Mapping[int, Iterable[int]],
) -> ExchangePlan[CkptID]:
    """Who sends which shard of a checkpoint to whom.

    Args:
        holdings: What each node holds.
        wanted: For each rank the ranks whose shards it wants.

    Raises:
        NoReplicasAvailableError: Some are wanted that no node holds.
    """

    def named(owner: int) -> CkptID:
        return CkptID(checkpoint.iteration, owner, session_id)

    return plan_among_nodes(
        {named(owner): nodes for owner, nodes in holdings.holders(checkpoint).items()},
        holdings.ranks_on,
        {rank: [named(owner) for owner in owners] for rank, owners in wanted.items()},
    )


def why_nothing_loads(
    holdings: Holdings,
    explanation: Explanation,
    unreadable: Sequence[tuple[ShardIdentity, int, str]],
    nodes: Sequence[str],
) -> str:
    """For each shard where it was looked for, and what was wrong.

    Args:
        holdings: What is left.
        explanation: Of all nodes, with what was set aside.
        unreadable: From :attr:`Recovery.bad`.
        nodes: For each rank what the explanation calls its node.
    """
    bad = [f"{node}: {text}" for node, texts in explanation.bad.items() for text in texts]
    set_aside = {(node, shard_named(text)) for node, t in explanation.bad.items() for text in t}
    bad += [
        f"{nodes[holder]}: {shard}: {why}"
        for shard, holder, why in unreadable
        if (nodes[holder], (shard.iteration, shard.rank, shard.generation)) not in set_aside
    ]
    return (
        f"there is no complete checkpoint to load: {describe_incomplete(holdings)}. Looked for on "
        f"{', '.join(explanation.nodes)}."
        + (f" Copies that are no good: {'; '.join(bad)}." if bad else "")
        + " Start from the beginning, or from a checkpoint on shared storage"
    )


def why_not_that(
    iteration: int,
    others: Sequence[int],
    unreadable: Sequence[tuple[ShardIdentity, int, str]],
) -> str:
    """Text of the error that the checkpoint that was asked for cannot be loaded.

    Args:
        iteration: Its iteration.
        others: Iterations that can be loaded.
        unreadable: From :attr:`Recovery.bad`.
    """
    bad = [f"{shard}, from the node of rank {holder}: {why}" for shard, holder, why in unreadable]
    return (
        f"iteration {iteration} is not complete on the nodes, and nothing else was loaded."
        + (f" Copies that are no good: {'; '.join(bad)}." if bad else "")
        + f" load(iteration=...) can give {', '.join(map(str, others)) or 'none'}; explain() says "
        f"what is missing"
    )
