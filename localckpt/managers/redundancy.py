"""Gives shards that lost copies new ones, behind training, once a restart has loaded.

Until the next save is complete the loaded checkpoint is all there is, and a node that came back
empty holds nothing of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from localckpt.coordination import Coordinator
from localckpt.errors import CheckpointingException, StorageError
from localckpt.ids import Checkpoint, CkptID, ShardIdentity
from localckpt.managers.holdings import Holdings
from localckpt.managers.recovery import plan_shards
from localckpt.managers.shelf import StagedShard
from localckpt.managers.stored import StoreShelf
from localckpt.replication.agreement import Attempt, agree
from localckpt.replication.exchange import ExchangePlan
from localckpt.replication.retrieval import carry_out, new_name, ranks_of
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.replication.transport import HostTransport

__all__ = ["Redundancy", "missing_copies"]

logger = logging.getLogger(__name__)

# Opening, making room, connecting, sending, telling the outcome: each has the deadline once.
_STEPS = 6


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


class Redundancy:
    """The copies of one manager's checkpoints.

    Args:
        shelf: This rank's shards.
        strategy: Says which ranks keep each other's shards.
        session_id: The training run.
        coordinator: The ranks of the job. Used by nobody else: it works behind other calls.
        keep: Writes a shard that has arrived.
        tell: Is called when a checkpoint has got copies.
    """

    def __init__(
        self,
        shelf: StoreShelf,
        strategy: ReplicationStrategy,
        session_id: str,
        coordinator: Coordinator,
        keep: Callable[[StagedShard], None],
        tell: Callable[[Checkpoint, Holdings], None],
    ) -> None:
        self._shelf = shelf
        self._strategy = strategy
        self._session_id = session_id
        self._coordinator = coordinator
        self._timeout_s = coordinator.timeout_s
        self._keep = keep
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._transport: HostTransport | None = None

    def restore(self, checkpoint: Checkpoint, holdings: Holdings) -> None:
        """Begin to make the copies that a checkpoint lacks; all ranks call it.

        Args:
            checkpoint: What was loaded.
            holdings: What each node holds; copies that are made are added to it.

        Raises:
            PeerLostError: A rank did not answer in time.
        """
        missing = missing_copies(checkpoint, holdings, self._strategy.keepers)
        if not missing:
            return
        logger.info(
            "%d shards of iteration %d have fewer copies than asked for: making them again",
            len(missing),
            checkpoint.iteration,
        )
        wanted: dict[int, list[int]] = {}
        for owner, receivers in missing.items():
            for rank in receivers:
                wanted.setdefault(rank, []).append(owner)
        plan = plan_shards(checkpoint, self._session_id, holdings, wanted)
        try:
            self._transport = self._connect(plan)
        except CheckpointingException as error:
            logger.warning("%d shards stay with fewer copies: %s", len(missing), error)
            return
        # No daemon: the interpreter must not end while it is inside of gloo.
        self._thread = threading.Thread(
            target=self._make_copies,
            args=(checkpoint, missing, plan, holdings),
            name="localckpt-redundancy",
        )
        self._thread.start()

    def finish(self) -> None:
        """Return when nothing is under way any more.

        Raises:
            CheckpointingException: It does not come to an end.
        """
        if self._thread is None:
            return
        deadline_s = _STEPS * self._timeout_s
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise CheckpointingException(
                f"making copies of the loaded checkpoint has not ended after {deadline_s:g} s: is "
                f"the disk of this node stuck?"
            )
        self._thread = None

    def cancel(self) -> None:
        """Give up what is under way; :meth:`finish` then does not wait for other ranks."""
        if self._thread is not None and self._thread.is_alive():
            self._coordinator.stop_waiting()
            if self._transport is not None:
                self._transport.abort()

    def _connect(self, plan: ExchangePlan[CkptID]) -> HostTransport | None:
        """Connect the ranks that take part; beforehand, so that :meth:`cancel` can cut them off."""
        coordinator = self._coordinator
        transport = None
        name = coordinator.all_gather("name the connections for copies", new_name())[0]
        with Attempt() as connecting:
            if coordinator.rank in (ranks := ranks_of(plan)):
                transport = HostTransport.connect(
                    name, ranks, coordinator.rank, coordinator.timeout_s
                )
        try:
            agree(coordinator, "connect the ranks that make copies", connecting)
        except BaseException:
            if transport is not None:
                transport.close()
            raise
        return transport

    def _make_copies(
        self,
        checkpoint: Checkpoint,
        missing: Mapping[int, list[int]],
        plan: ExchangePlan[CkptID],
        holdings: Holdings,
    ) -> None:
        began = time.monotonic()
        nbytes = 0
        with Attempt() as copying:
            nbytes = self._copy(checkpoint, plan)
        with Attempt() as tidying:
            coming = plan.receives(self._coordinator.rank)
            self._shelf.drop_unfinished(
                [checkpoint.shard(entry.id_.rank, self._session_id) for entry in coming]
            )
        if self._transport is not None:
            self._transport.close()
        phase = f"restore the copies of iteration {checkpoint.iteration}"
        try:
            told = self._coordinator.all_gather(phase, copying.told or tidying.told)
        except CheckpointingException as error:
            logger.warning("%d shards stay with fewer copies: %s", len(missing), error)
            return
        _add_copies(checkpoint, missing, told, holdings)
        self._tell(checkpoint, holdings)
        if degraded := sum(any(told[rank] for rank in ranks) for ranks in missing.values()):
            # Ranks that failed together say the same.
            why = "; ".join(dict.fromkeys(text for text in told if text))
            logger.warning(
                "%d shards of iteration %d have fewer copies than asked for until the next save: "
                "%s",
                degraded,
                checkpoint.iteration,
                why,
            )
            return
        logger.info(
            "all shards of iteration %d have their copies again: %d bytes came here in %.3f s",
            checkpoint.iteration,
            nbytes,
            time.monotonic() - began,
        )

    def _copy(self, checkpoint: Checkpoint, plan: ExchangePlan[CkptID]) -> int:
        """Carry out the plan, and keep what comes; how many bytes did."""

        def identity(id_: CkptID) -> ShardIdentity:
            return checkpoint.shard(id_.rank, self._session_id)

        received = carry_out(
            self._coordinator,
            plan,
            lambda id_: self._shelf.open(identity(id_)),
            lambda id_, nbytes: self._shelf.make_room(identity(id_), nbytes),
            self._coordinator.timeout_s,
            self._transport,
        )
        nbytes = 0
        for id_ in received:
            shard = self._shelf.received(identity(id_))
            self._keep(shard)
            if not self._shelf.holds(shard.identity):
                raise StorageError(f"{shard.identity} was written, and is not there")
            nbytes += shard.nbytes
        return nbytes


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
