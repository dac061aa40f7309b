"""Reads one checkpoint on all ranks: own node first, else a peer, until every shard is good.

Works in rounds. In each, all ranks make the same plan, move what has to move, verify, and tell each
other how it went; bad copies are left out of the next round's plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from localckpt import errors
from localckpt.coordination import Coordinator
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    PeerLostError,
    StorageError,
)
from localckpt.ids import Checkpoint, CkptID, ShardIdentity
from localckpt.managers.coverage import describe_incomplete
from localckpt.managers.explanation import Explanation
from localckpt.managers.holdings import Holdings
from localckpt.managers.shelf import LoadOptions, Shelf
from localckpt.replication.exchange import ExchangePlan, plan_among_nodes
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.source import Filled, MemorySource, Places, ShardSource
from localckpt.storage.names import shard_named

__all__ = ["Loaded", "Recovery", "plan_shards", "why_nothing_loads"]


@dataclass(frozen=True)
class Loaded:
    """A shard that was read and verified."""

    state: Any
    nbytes: int
    came_from: str


@dataclass(frozen=True)
class _Outcome:
    """How a round went on one rank: which copies it found bad, or why it can load none at all."""

    bad: tuple[tuple[int, int, str], ...] = ()
    """(holder, owner, what was wrong) of each bad copy; ranks of the job."""
    refused: tuple[str, str] | None = None
    """Name of the exception's type, and its text."""

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> _Outcome:
        bad, refused = fields
        return cls(tuple((h, o, w) for h, o, w in bad), tuple(refused) if refused else None)

    def to_json(self) -> list[Any]:
        return [self.bad, self.refused]


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
        coordinator: Coordinator,
        strategy: ReplicationStrategy,
        shelf: Shelf,
        holdings: Holdings,
    ) -> None:
        self._coordinator = coordinator
        self._strategy = strategy
        self._shelf = shelf
        self._holdings = holdings
        self.bad: list[tuple[ShardIdentity, int, str]] = []
        """Copies that could not be read, on whose nodes, and why; the same on all ranks."""

    def load(self, checkpoint: Checkpoint, session_id: str, options: LoadOptions) -> Loaded | None:
        """Read this rank's shard; ``None`` on all ranks when some shard has no good copy left.

        Raises:
            CheckpointingException: A rank cannot load it for a reason that no other copy would
                cure; raised on all ranks.
        """
        while True:
            try:
                plan = self._plan(checkpoint, session_id)
            except NoReplicasAvailableError:
                return None
            arrived = self._fetch(plan, checkpoint, session_id) if plan.transfers else []
            if arrived is None:
                continue
            loaded, outcome = self._restore(plan, checkpoint, session_id, arrived, options)
            phase = f"load iteration {checkpoint.iteration}"
            if self._all_well(phase, outcome, checkpoint, session_id):
                return loaded

    def _plan(self, checkpoint: Checkpoint, session_id: str) -> ExchangePlan[CkptID]:
        wanted = {rank: [rank] for rank in range(self._coordinator.world_size)}
        return plan_shards(checkpoint, session_id, self._holdings, wanted)

    def _fetch(
        self, plan: ExchangePlan[CkptID], checkpoint: Checkpoint, session_id: str
    ) -> list[memoryview] | None:
        """Move what the plan moves.

        Returns:
            The image of this rank's shard, if a peer sent it; ``None`` on all ranks when a copy
            could not be read, and is out of the next plan.
        """
        sources: dict[CkptID, _Watched] = {}
        refused: dict[CkptID, CheckpointingException] = {}
        for entry in plan.sends(self._coordinator.rank):
            identity = checkpoint.shard(entry.id_.rank, session_id)
            try:
                sources[entry.id_] = _Watched(self._shelf.open(identity))
            except (StorageError, CorruptShardError) as error:
                refused[entry.id_] = error
        arrived: list[memoryview] = []

        def room(_: CkptID, nbytes: int) -> memoryview:
            mine = checkpoint.shard(self._coordinator.rank, session_id)
            arrived.append(self._shelf.room_to_load(mine, nbytes))
            return arrived[-1]

        def all_well(phase: str) -> bool:
            refused.update({id_: s.refused for id_, s in sources.items() if s.refused})
            outcome = self._left_out(refused, checkpoint, session_id)
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
            bad.append((self._coordinator.rank, id_.rank, str(error)))
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
        try:
            state, nbytes = self._shelf.restore(identity, arrived[0] if arrived else None, options)
        except (StorageError, CorruptShardError) as error:
            # What the node refused once it may give the next time: only bad bytes are set aside.
            if not senders and isinstance(error, CorruptShardError):
                self._shelf.set_aside(identity, str(error))
            return None, _Outcome(((holder, identity.rank, str(error)),))
        except Exception as error:  # noqa: BLE001 - raised on every rank once all have been told
            return None, _Outcome(refused=(type(error).__name__, str(error)))
        return Loaded(state, nbytes, came_from), _Outcome()

    def _all_well(
        self, phase: str, mine: _Outcome, checkpoint: Checkpoint, session_id: str
    ) -> bool:
        """Tell each other how it went, and leave out the copies that were bad."""
        gathered = self._coordinator.all_gather(phase, mine.to_json())
        outcomes = [_Outcome.from_json(fields) for fields in gathered]
        refusals = [(rank, o.refused) for rank, o in enumerate(outcomes) if o.refused]
        if refusals:
            kinds = {kind for _, (kind, _) in refusals}
            kind = kinds.pop() if len(kinds) == 1 else ""
            raised = getattr(errors, kind) if kind in errors.__all__ else CheckpointingException
            raise raised("; ".join(f"rank {rank}: {text}" for rank, (_, text) in refusals))
        bad = [(rank, *copy) for rank, outcome in enumerate(outcomes) for copy in outcome.bad]
        for rank, holder, owner, why in bad:
            identity = checkpoint.shard(owner, session_id)
            self._holdings.remove(checkpoint, owner, self._holdings.node_of(holder))
            self.bad.append((identity, holder, why))
            if holder == self._coordinator.rank != rank:
                self._shelf.doubt(identity, f"sent to rank {rank}, where {why}")
        return not bad


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


class _Watched:
    """A shard's source that remembers whether it could be read."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self.views_last = isinstance(source, MemorySource)
        self.refused: StorageError | CorruptShardError | None = None

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        try:
            return self._source.read(start, stop)
        except (StorageError, CorruptShardError) as error:
            self.refused = error
            raise

    def stream(self, stop: int, places: Places, filled: Filled) -> None:
        self._source.stream(stop, places, filled)

    def close(self) -> None:
        self._source.close()
