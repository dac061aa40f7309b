"""Base of the replication strategies, and the exchange of shards that ranks lack.

How copies are made is up to the strategies. All work is done on images; state dicts are turned
into images and back at the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch.distributed as dist

from localckpt.availability.inventory import Inventory
from localckpt.ids import Checkpoint, CkptID, Generation, Group, ShardIdentity
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.replication.exchange import ExchangePlan, plan_exchange
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.redundancy import Lacking
from localckpt.replication.retrieval import carry_out
from localckpt.state_dict.basic import TensorAwareStateDict
from localckpt.state_dict.image import pack, unpack
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.storage.store import Slot, Store
from localckpt.threads import SerialThread

STEPS = 7
"""Announcing, making room (after an older save), connecting (twice), sending (twice, where pieces
are computed), telling the outcome: how often a replication may need the deadline."""

# Two steps of a replication that each wait until their deadline end before the manager's.
_STEPS_IN_TIME = 3
_TIMEOUT_S = 300.0

IdT = TypeVar("IdT", bound=Hashable)
Accept = Callable[[CkptID, int], memoryview]


class ReplicationStrategy:
    """Protection of the shards that a job saves; also brings shards to ranks that lack them.

    Args:
        timeout_s: Deadline of each step that ranks take together, in seconds, if it is to be
            shorter than that of the manager that uses the strategy. With ``None`` it is the
            manager's, in a save a third of that, so that a save whose peer is lost is over within
            the manager's.
        process_group: The ranks of the job, whose numbers stand in plans; ``None`` for all.
        target_device: Where the tensors of state dicts that others sent are put.

    Attributes:
        rate_limit: Bytes a second that a rank may send behind training; ``None`` for any.
        sent_nbytes: Bytes that this rank sent for the copies of the last save; ``None`` if nobody
            counts.
        thread: Makes the copies of all managers that share the strategy. All ranks submit their
            calls of :meth:`protect` in the same order, each after :meth:`begin_copies`.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        target_device: str = "cpu",
    ) -> None:
        self.timeout_s = timeout_s
        self.target_device = target_device
        self.rate_limit: float | None = None
        self.sent_nbytes: int | None = None
        self.thread = SerialThread("localckpt-replicate")
        self._process_group = process_group
        self._everyone: Ranks | None = None

    def place(self, domains: Sequence[str], timeout_s: float | None = None) -> None:
        """Place the ranks in groups, before anything is protected; all ranks call it together.

        ``domains`` has for each rank of the job the token of its store: what is lost together.
        """

    @property
    def protection(self) -> Mapping[int, Group]:
        """For each rank the group that protects its shard, on all ranks, once they are placed.

        Without an entry a shard is only on its own node.
        """
        return {}

    def lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        """Find what a loaded checkpoint lacks of its protection: a pure function."""
        return Lacking({})

    def begin_copies(self) -> None:
        """Take back :meth:`give_up`, which was about the copies before these."""

    def step_s(self, timeout_s: float | None, *, of_save: bool = False) -> float:
        """Return the deadline in seconds of each step that ranks take together, for a caller's.

        Two steps ``of_save`` are to end before the caller's deadline.
        """
        if timeout_s is None:
            return self.timeout_s or _TIMEOUT_S
        share_s = timeout_s / _STEPS_IN_TIME if of_save else timeout_s
        return min(self.timeout_s or share_s, timeout_s)

    def replicate_image(
        self,
        source: ShardSource | None,
        ckpt_id: CkptID,
        accept: Accept,
        *,
        timeout_s: float | None = None,
        tensors_on_gpu: bool = False,
        error: str | None = None,
    ) -> list[CkptID]:
        """Give this rank's image to its peers, and take theirs; all ranks call it together.

        Args:
            source: The image, read front to back; ``None`` is fine when there is an error.
            ckpt_id: ID of the image's shard.
            accept: Returns writable memory of a size for a peer's shard. This memory is the
                caller's to throw away when this raises.
            timeout_s: Deadline of each step, in seconds; ``None`` for the strategy's.
            tensors_on_gpu: Whether the state is in GPU memory.
            error: Why this rank has no image to give, if so; its peers then raise it, too.

        Returns:
            The shards that were received.

        Raises:
            MismatchError: Peers are at different iterations or sessions.
            PeerLostError: A peer did not come, or broke off.
            CheckpointingException: What went wrong on a peer, the same on all of them.
        """
        return []

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

        All ranks call it together. Without ``own`` there is an ``error``, which the ranks of the
        group raise, too. ``timeout_s`` is the caller's deadline: of waiting for a slot of the
        store, and of two steps that ranks take together. A state ``on_gpu`` may be sent from there.

        Returns slots of what came here, filled, for the caller to commit. When it raises, it has
        released them.
        """
        slots: list[Slot] = []

        def accept(peer: CkptID, nbytes: int) -> memoryview:
            of_peer = replace(identity, rank=peer.rank)
            slots.append(store.reserve(of_peer, nbytes, timeout_s))
            return slots[-1].image

        source = own.source if own is not None else None
        try:
            self.replicate_image(
                source,
                identity.ckpt_id,
                accept,
                timeout_s=self.step_s(timeout_s, of_save=True),
                tensors_on_gpu=on_gpu,
                error=error,
            )
            for slot in slots:
                slot.arrived()
        except Exception:
            store.release(slots)
            raise
        return slots

    def require_states(self, manager: str) -> None:
        """Raise MismatchError if the strategy deals in images only, for a manager of states."""

    @property
    def sends_from_devices(self) -> bool:
        """True if images of states on GPUs are sent from GPU to GPU, not through the host."""
        return False

    def waits_for(self) -> str:
        """Describe, in any thread, whom a replication waits for; empty if for no other rank."""
        return ""

    def give_up(self) -> None:
        """End all waits of other threads, with an error there, until :meth:`begin_copies`."""

    def close(self) -> None:
        """Close connections, and groups that the strategy made itself."""
        if self._everyone is not None:
            self._everyone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def retrieve_image(
        self,
        plan: ExchangePlan[IdT],
        open_source: Callable[[IdT], ShardSource],
        accept: Callable[[IdT, int], memoryview],
        timeout_s: float | None = None,
    ) -> list[IdT]:
        """Carry out what a plan moves between ranks; all ranks call it together, same plan.

        A rank's own copies are not touched. Without anything to move it returns at once.

        Args:
            plan: The plan.
            open_source: Opens an image that the plan lets this rank send; closed here.
            accept: Returns writable memory of a size for an image that comes.
            timeout_s: Deadline of each step, in seconds; ``None`` for the strategy's.

        Returns:
            The shards that this rank received.

        Raises:
            PeerLostError: A rank did not come, or broke off.
            CheckpointingException: What went wrong on some rank, the same on all of them.
        """
        return carry_out(self._world(), plan, open_source, accept, self.step_s(timeout_s))

    # On states, as upstream's strategies; the managers deal in images.

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: tuple[int, int, str]
    ) -> tuple[list[TensorAwareStateDict], list[CkptID]]:
        """Exchange state dicts as :meth:`replicate_image` does images.

        Returns:
            This rank's own, unchanged, and those of its peers; with their IDs.
        """
        mine = CkptID(*id_)
        images: dict[CkptID, memoryview] = {}
        source = None
        with Attempt() as packing:
            source = pack(local_ckpt, self._identity(mine))
        received = self.replicate_image(source, mine, _into(images), error=packing.error_text)
        return [local_ckpt, *(self._unpack(images, id_) for id_ in received)], [mine, *received]

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[IdT]], wanted: Sequence[IdT]
    ) -> ExchangePlan[IdT]:
        """Decide who sends which shard to whom; all ranks call it together.

        Args:
            globally_available_ids: For each rank the shards it holds; the same on all ranks.
            wanted: The shards that this rank wants.

        Raises:
            NoReplicasAvailableError: Shards are wanted that no rank holds. It lists all of them.
        """
        # By their texts: any hashable may be an ID, and what JSON brings back is not what it was.
        mine = [_plain_repr(id_) for id_ in wanted]
        what = "say which shards are wanted"
        records = self._world().decide(what, lambda: mine, list, read=shaped(list))
        named = {_plain_repr(id_): id_ for held in globally_available_ids.values() for id_ in held}
        # A shard that nobody holds is only looked for.
        by_rank: dict[int, list[Any]] = {
            rank: [named.get(text, text) for text in r] for rank, r in enumerate(records)
        }
        return plan_exchange(globally_available_ids, by_rank)

    def retrieve_execute(
        self,
        plan: ExchangePlan[CkptID],
        state_dicts: Mapping[CkptID, TensorAwareStateDict],
    ) -> dict[CkptID, TensorAwareStateDict]:
        """Carry out a plan on state dicts: those that this rank holds, by ID.

        Returns:
            The state dicts that this rank wants, its own copies unchanged.
        """
        images: dict[CkptID, memoryview] = {}
        received = self.retrieve_image(
            plan, lambda id_: pack(state_dicts[id_], self._identity(id_)), _into(images)
        )
        rank = GroupWrapper.wrap(self._process_group).my_group_rank
        own = [e.id_ for e in plan.entries if e.sender == e.receiver == rank]
        return {
            **{id_: state_dicts[id_] for id_ in own},
            **{id_: self._unpack(images, id_) for id_ in received},
        }

    def _world(self) -> Ranks:
        if self._everyone is None:
            self._everyone = Ranks("retrieval", self._process_group, self.step_s(None))
        return self._everyone

    def _identity(self, id_: tuple[int, int, str]) -> ShardIdentity:
        iteration, rank, session = id_
        ranks = GroupWrapper.wrap(self._process_group).world_size
        return ShardIdentity(session, Generation(0, 0), iteration, rank, ranks)

    def _unpack(self, images: Mapping[CkptID, memoryview], id_: CkptID) -> TensorAwareStateDict:
        image = MemorySource(images[id_])
        state: TensorAwareStateDict = unpack(
            image, expect=self._identity(id_), map_location=self.target_device
        )
        return state


class NoReplication(ReplicationStrategy):
    """Keeps no replicas. Shards are still brought to ranks that restart on other nodes."""


def _into(images: dict[CkptID, memoryview]) -> Accept:
    def accept(id_: CkptID, nbytes: int) -> memoryview:
        images[id_] = memoryview(bytearray(nbytes))
        return images[id_]

    return accept


def _plain_repr(id_: Hashable) -> str:
    return repr(tuple(id_) if isinstance(id_, tuple) else id_)
