"""Gives shards that lost copies, or parity, new ones, behind training, once a restart has loaded.

Until the next save is complete the loaded checkpoint is all there is, and a node that came back
empty holds nothing of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from localckpt.errors import CheckpointingException, StorageError
from localckpt.ids import Checkpoint, CkptID, ParityGroup, ShardIdentity
from localckpt.managers.holdings import Holdings
from localckpt.managers.known import KnownCheckpoints
from localckpt.managers.parity_coverage import least_losses
from localckpt.managers.recovery import plan_shards
from localckpt.managers.saving import Saving
from localckpt.managers.stored import StoreShelf
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.exchange import ExchangePlan
from localckpt.replication.parity.encode_group import GroupEncoder, heads_nbytes, layout_of
from localckpt.replication.retrieval import carry_out, new_name, ranks_of
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.replication.transport import HostTransport
from localckpt.state_dict.parity_image import head_nbytes
from localckpt.state_dict.parity_of import ParityOf
from localckpt.state_dict.source import ShardSource
from localckpt.threads import Task

__all__ = ["Redundancy", "missing_copies", "shards_away"]

logger = logging.getLogger(__name__)

# Keeping what was computed, opening, making room, sending, telling the outcome; then telling sizes,
# parity, heads, telling the outcome: each has the deadline once, and connecting is over before.
_STEPS = 10


def missing_copies(
    checkpoint: Checkpoint, holdings: Holdings, keepers: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Who is to get which shard, so that each is again on as many nodes as it is to be.

    Args:
        checkpoint: What was loaded.
        holdings: What each node holds.
        keepers: For each rank those that keep a copy of its shard.

    Returns:
        For each owner of a shard that has too few copies, the ranks that lack it.
    """
    held_on = holdings.holders(checkpoint)
    missing = {}
    for owner, others in keepers.items():
        have = held_on.get(owner, [])
        # The owner first: its own node is where the next restart looks first.
        wanting = [owner, *others]
        lacking = [rank for rank in wanting if holdings.node_of(rank) not in have]
        if wanted := lacking[: max(0, len(wanting) - len(have))]:
            missing[owner] = wanted
    return missing


def shards_away(checkpoint: Checkpoint, holdings: Holdings) -> dict[int, list[int]]:
    """Ranks whose own node lacks their shard, though another has it: each is to get its own."""
    return {
        owner: [owner]
        for owner, nodes in holdings.holders(checkpoint).items()
        if holdings.node_of(owner) not in nodes
    }


class Redundancy:
    """The copies of one manager's checkpoints.

    Args:
        shelf: This rank's shards.
        strategy: Says which ranks keep each other's shards.
        session_id: The training run.
        coordinator: The ranks of the job. Used by nobody else: it works behind other calls.
        saving: Keeps a shard that has arrived.
        known: Is told when a checkpoint has got copies.
    """

    def __init__(
        self,
        shelf: StoreShelf,
        strategy: ReplicationStrategy,
        session_id: str,
        coordinator: Ranks,
        saving: Saving,
        known: KnownCheckpoints,
    ) -> None:
        self._shelf = shelf
        self._strategy = strategy
        self._session_id = session_id
        self._coordinator = coordinator
        self._timeout_s = coordinator.timeout_s
        self._saving = saving
        self._known = known
        self._under_way: Task[None] | None = None
        self._transport: HostTransport | None = None
        self._ring: HostTransport | None = None

    def restore(
        self,
        checkpoint: Checkpoint,
        holdings: Holdings,
        rebuilt: Mapping[int, int],
        to_replace: Mapping[ShardIdentity, str],
    ) -> None:
        """Begin to make what a checkpoint lacks; all ranks call it.

        Args:
            checkpoint: What was loaded.
            holdings: What each node holds; copies that are made are added to it.
            rebuilt: The sizes of the shards that were computed, by rank; this rank's is on its
                shelf as if a peer had sent it.
            to_replace: What is damaged on this node and may be written anew, and why.

        Raises:
            PeerLostError: A rank did not answer in time.
        """
        for owner, nbytes in rebuilt.items():
            holdings.add(checkpoint, owner, holdings.node_of(owner), nbytes)
        parity = self._strategy.parity
        if parity:
            missing = shards_away(checkpoint, holdings)
            groups = [ParityGroup(tuple(ranks), parity) for ranks in self._strategy.cliques()]
            # Of other groups it does as well: to replace it would take it away until all is there.
            bears = least_losses(checkpoint, holdings)
            groups = [g for g in groups if any(bears[rank] <= parity for rank in g.ranks)]
        else:
            missing, groups = missing_copies(checkpoint, holdings, self._strategy.keepers), []
        if not (missing or groups or rebuilt):
            return
        logger.info(
            "iteration %d: %d shards have fewer copies than asked for, %d were computed, %d groups "
            "lack parity: making them again",
            *(checkpoint.iteration, len(missing), len(rebuilt), len(groups)),
        )
        wanted: dict[int, list[int]] = {}
        for owner, receivers in missing.items():
            for rank in receivers:
                wanted.setdefault(rank, []).append(owner)
        work = _Work(
            checkpoint,
            holdings,
            missing,
            plan_shards(checkpoint, self._session_id, holdings, wanted),
            dict(rebuilt),
            dict(to_replace),
            groups,
        )
        try:
            self._connect(work)
        except CheckpointingException as error:
            self._drop(work)
            for owner in rebuilt:
                holdings.remove(checkpoint, owner, holdings.node_of(owner))
            logger.warning("%d shards stay with fewer copies: %s", len(missing), error)
            return
        # No daemon: the interpreter must not end while it is inside of gloo.
        self._under_way = Task(lambda: self._make_all(work))
        self._under_way.start("localckpt-redundancy", daemon=False)

    def finish(self) -> None:
        """Return when nothing is under way any more.

        Raises:
            CheckpointingException: It does not come to an end.
        """
        if self._under_way is None:
            return
        deadline_s = _STEPS * self._timeout_s
        # An interrupt may have kept it from starting.
        if self._under_way.begins() and not self._under_way.wait(deadline_s):
            raise CheckpointingException(
                f"making copies of the loaded checkpoint has not ended after {deadline_s:g} s: is "
                f"the disk of this node stuck?"
            )
        self._under_way = None

    def cancel(self) -> None:
        """Give up what is under way; :meth:`finish` then does not wait for other ranks."""
        if self._under_way is not None and not self._under_way.done():
            self._coordinator.stop_waiting()
            for transport in (self._transport, self._ring):
                if transport is not None:
                    transport.abort()

    def _connect(self, work: _Work) -> None:
        """Connect the ranks that take part; beforehand, so that :meth:`cancel` can cut them off."""
        coordinator = self._coordinator
        name = coordinator.gather("name the connections for copies", new_name())[0]
        self._transport = self._ring = None

        def connect(name: str, ranks: Sequence[int]) -> HostTransport:
            return HostTransport.connect(
                *(name, ranks, coordinator.rank, coordinator.timeout_s),
                rate_limit=self._strategy.rate_limit,
            )

        with Attempt() as connecting:
            if coordinator.rank in (ranks := ranks_of(work.plan)):
                self._transport = connect(name, ranks)
            if (group := work.group_of(coordinator.rank)) is not None:
                self._ring = connect(f"{name}/{group.ranks[0]}", group.ranks)
        try:
            coordinator.settle("connect the ranks that make copies", connecting)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        for transport in (self._transport, self._ring):
            if transport is not None:
                transport.close()

    def _make_all(self, work: _Work) -> None:
        began = time.monotonic()
        iteration = work.checkpoint.iteration
        try:
            problems = self._keep_rebuilt(work) if work.rebuilt else []
            problems += self._make_copies(work) if work.missing else []
            problems += self._encode(work) if work.groups else []
        except CheckpointingException as error:
            logger.warning("shards of iteration %d stay with fewer copies: %s", iteration, error)
            return
        finally:
            self._disconnect()
            self._drop(work)
        self._known.take_stock(work.checkpoint, work.holdings)
        if problems:
            # Ranks that failed together say the same.
            why = "; ".join(dict.fromkeys(problems))
            logger.warning(
                "shards of iteration %d have fewer copies than asked for until the next save: %s",
                iteration,
                why,
            )
            return
        logger.info(
            "all shards of iteration %d have their copies again: %d bytes came here in %.3f s",
            *(iteration, work.nbytes, time.monotonic() - began),
        )

    def _keep_rebuilt(self, work: _Work) -> list[str]:
        """Write what was computed; what went wrong."""
        with Attempt() as keeping:
            if self._coordinator.rank in work.rebuilt:
                self._receive(work, work.identity(self._coordinator.rank, self._session_id))
        phase = f"keep what was computed of iteration {work.checkpoint.iteration}"
        told = self._coordinator.gather(phase, keeping.told)
        for owner in work.rebuilt:
            if told[owner]:
                node = work.holdings.node_of(owner)
                work.holdings.remove(work.checkpoint, owner, node)
        return [text for text in told if text]

    def _make_copies(self, work: _Work) -> list[str]:
        """Have shards sent to where they are missing; what went wrong."""

        def identity(id_: CkptID) -> ShardIdentity:
            return work.identity(id_.rank, self._session_id)

        with Attempt() as copying:
            received = carry_out(
                self._coordinator,
                work.plan,
                lambda id_: self._shelf.open(identity(id_)),
                lambda id_, nbytes: self._shelf.make_room(identity(id_), nbytes),
                self._coordinator.timeout_s,
                self._transport,
            )
            for id_ in received:
                self._receive(work, identity(id_))
        phase = f"restore the copies of iteration {work.checkpoint.iteration}"
        told = self._coordinator.gather(phase, copying.told)
        _add_copies(work.checkpoint, work.missing, told, work.holdings)
        return [text for text in told if text]

    def _encode(self, work: _Work) -> list[str]:
        """Compute the parity of groups that lack some; what went wrong."""
        coordinator, rank = self._coordinator, self._coordinator.rank
        group, iteration = work.group_of(rank), work.checkpoint.iteration
        with ExitStack() as opened:
            source: ShardSource | None = None
            sizes: list[int] = []
            with Attempt() as opening:
                if group is not None:
                    source = self._shelf.open(work.identity(rank, self._session_id))
                    opened.callback(source.close)
                    sizes = [source.nbytes, head_nbytes(source)]
            phase = f"see whether parity of iteration {iteration} can be made"
            told = coordinator.gather(phase, [opening.told, sizes])
            problems = [text for text, _ in told if text]
            # Members of a group to which one has nothing to add do not begin.
            able = [g for g in work.groups if not any(told[r][0] for r in g.ranks)]
            with Attempt() as encoding:
                if group in able and group is not None and source is not None:
                    of = ParityOf(group, tuple(told[r][1][0] for r in group.ranks))
                    self._encode_group(work, of, source, [told[r][1][1] for r in group.ranks])
        outcomes = coordinator.gather(f"make parity of iteration {iteration}", encoding.told)
        for done in able:
            for owner in done.ranks:
                if not outcomes[owner]:
                    node = work.holdings.node_of(owner)
                    work.holdings.add_parity(work.checkpoint, owner, node, done)
        return problems + [text for text in outcomes if text]

    def _encode_group(
        self, work: _Work, of: ParityOf, source: ShardSource, heads: Sequence[int]
    ) -> None:
        assert self._ring is not None, "the members are connected before this begins"
        rank = self._coordinator.rank
        identity = work.identity(rank, self._session_id).parity
        encoder = GroupEncoder(self._ring)
        try:
            room = self._shelf.make_parity_room(
                identity, of, heads_nbytes(of.group, rank, heads), layout_of(of).parity_nbytes
            )
            work.begun.append(identity)
            encoder.run(of, source, room, heads, self._coordinator.timeout_s)
        except BaseException:
            # The other members are not to wait for this one until their deadline.
            self._ring.abort()
            raise
        finally:
            encoder.close()
        self._receive(work, identity)

    def _receive(self, work: _Work, identity: ShardIdentity) -> None:
        """Write what has come to the room made for it."""
        shard = self._shelf.received(identity)
        with self._shelf.replacing(identity, work.to_replace.get(identity)):
            self._saving.keep_all([shard])
        if not self._shelf.holds(identity):
            raise StorageError(f"{identity} was written, and is not there")
        work.nbytes += shard.nbytes

    def _drop(self, work: _Work) -> None:
        """Give back all room that was made, whatever became of it."""
        coming = work.plan.receives(self._coordinator.rank)
        identities = [work.identity(entry.id_.rank, self._session_id) for entry in coming]
        if self._coordinator.rank in work.rebuilt:
            identities.append(work.identity(self._coordinator.rank, self._session_id))
        try:
            self._shelf.drop_unfinished([*identities, *work.begun])
        except StorageError as error:
            logger.warning("what is unfinished could not be removed: %s", error)


@dataclass
class _Work:
    """What is to be made for one checkpoint; but for the last two the same on all ranks."""

    checkpoint: Checkpoint
    holdings: Holdings
    missing: Mapping[int, list[int]]
    plan: ExchangePlan[CkptID]
    rebuilt: Mapping[int, int]
    to_replace: Mapping[ShardIdentity, str]
    groups: Sequence[ParityGroup]
    begun: list[ShardIdentity] = field(default_factory=list)
    nbytes: int = 0

    def identity(self, rank: int, session_id: str) -> ShardIdentity:
        # Parity that is made anew says of which lineage it is, as what was there before did.
        lineage = self.holdings.lineages.get(self.checkpoint.generation.epoch_id)
        return replace(self.checkpoint.shard(rank, session_id), lineage=lineage)

    def group_of(self, rank: int) -> ParityGroup | None:
        """The group that this rank is to encode with."""
        return next((group for group in self.groups if rank in group.ranks), None)


def _add_copies(
    checkpoint: Checkpoint,
    missing: Mapping[int, list[int]],
    told: Sequence[str | None],
    holdings: Holdings,
) -> None:
    """Add to the holdings what has come to the ranks that tell of no error."""
    nbytes = holdings.shards(checkpoint)
    for owner, receivers in missing.items():
        for receiver in (rank for rank in receivers if not told[rank]):
            holdings.add(checkpoint, owner, holdings.node_of(receiver), nbytes[owner])
