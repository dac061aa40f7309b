"""Base of the replication strategies, and the exchange of shards that ranks lack.

How copies are made is up to the strategies. All work is done on images; state dicts are turned
into images and back at the edge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch.distributed as dist

from localckpt.availability.inventory import Inventory
from localckpt.ids import Checkpoint, CkptID, Generation, Group, ShardIdentity
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.exchange import ExchangePlan, plan_exchange
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.redundancy import Lacking
from localckpt.replication.retrieval import carry_out
from localckpt.state_dict.basic import TensorAwareStateDict
from localckpt.state_dict.image import pack, unpack
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.storage.store import Slot, Store
from localckpt.threads import Latch

__all__ = ["STEPS", "Accept", "CopyTicket", "ReplicationStrategy"]

STEPS = 7
"""Announcing, making room (after an older save), connecting (twice), sending (twice, where pieces
are computed), telling the outcome: how often a replication may need the deadline."""

# Two steps of a replication that each wait until their deadline end before the manager's.
_STEPS_IN_TIME = 3
_TIMEOUT_S = 300.0

IdT = TypeVar("IdT", bound=Hashable)
Accept = Callable[[CkptID, int], memoryview]


class CopyTicket:
    """Place of one replication among all of a strategy, whichever threads make them."""

    def __init__(self, before: Latch | None) -> None:
        self._before = before
        self.is_taken_up = False
        """True if somebody makes this replication, who then ends the ticket."""
        self.over = Latch()

    def wait(self, timeout_s: float) -> bool:
        """Wait for all replications before this one; return whether they are over."""
        return self._before is None or self._before.wait(timeout_s)

    def end(self) -> None:
        """Let the next replication begin."""
        self._before = None
        self.over.set()


class ReplicationStrategy(ABC):
    """Protection of the shards that a job saves; also brings shards to ranks that lack them.

    Args:
        timeout_s: Deadline of each step that ranks take together, in seconds, if it is to be
            shorter than that of the manager that uses the strategy. With ``None`` it is the
            manager's, in a save a third of that, so that a save whose peer is lost is over within
            the manager's.
        process_group: The ranks of the job, whose numbers stand in plans; ``None`` for all.
        target_device: Where the tensors of state dicts that others sent are put.
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
        """Number of bytes a second that a rank may send behind training; ``None`` for any."""
        self.sent_nbytes: int | None = None
        """Bytes that this rank sent for the copies of the last save; ``None`` if nobody counts."""
        self._process_group = process_group
        self._everyone: Ranks | None = None
        self._last_ticket: CopyTicket | None = None

    @abstractmethod
    def place(self, domains: Sequence[str], timeout_s: float | None = None) -> None:
        """Place the ranks in groups, before anything is protected; all ranks call it together.

        Args:
            domains: For each rank of the job, the token of its store: what is lost together.
            timeout_s: Deadline of each step, in seconds.
        """

    @property
    def protection(self) -> Mapping[int, Group]:
        """For each rank the group that protects its shard.

        Known once the ranks are placed; the same on all ranks. Without an entry a shard is only on
        its own node.
        """
        return {}

    def lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        """Find what a loaded checkpoint lacks of its protection: a pure function."""
        return Lacking({})

    def take_ticket(self) -> CopyTicket:
        """Announce a call of :meth:`protect`; all ranks do so in the same order.

        Managers may share a strategy, and each makes its copies in a thread of its own.
        """
        self._last_ticket = CopyTicket(
            None if self._last_ticket is None else self._last_ticket.over
        )
        return self._last_ticket

    def step_s(self, timeout_s: float | None, *, of_save: bool = False) -> float:
        """Return the deadline of each step that ranks take together, in seconds.

        Args:
            timeout_s: The caller's; ``None`` for a caller that has none.
            of_save: Whether two steps are to end before the caller's deadline.
        """
        if timeout_s is None:
            return self.timeout_s or _TIMEOUT_S
        share_s = timeout_s / _STEPS_IN_TIME if of_save else timeout_s
        return min(self.timeout_s or share_s, timeout_s)

    @abstractmethod
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

        All ranks call it together.

        Args:
            own: This rank's shard; ``None`` if there is an error.
            timeout_s: The caller's deadline, in seconds: of waiting for a slot of the store, and of
                two steps that ranks take together.
            on_gpu: Whether the state is in GPU memory, and may be sent from there.
            error: Why this rank has no shard, if so; the ranks of its group then raise it, too.

        Returns:
            Slots of what came here, filled, for the caller to commit. When it raises, it has
            released them.

        Raises:
            CheckpointingException: Something went wrong on a rank; the same on all of its group.
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

    def require_states(self, manager: str) -> None:  # noqa: B027 - most deal in states, too
        """Check that a manager that keeps states, and no images, can use the strategy.

        Args:
            manager: Its name.

        Raises:
            MismatchError: The strategy deals in images only.
        """

    @property
    def sends_from_devices(self) -> bool:
        """True if images of states on GPUs are sent from GPU to GPU, not through the host."""
        return False

    def waits_for(self) -> str:
        """Describe, in any thread, whom a replication waits for; empty if for no other rank."""
        return ""

    @abstractmethod
    def give_up(self) -> None:
        """End all waits of other threads, with an error there, until the next ticket is taken."""

    def _end_idle_ticket(self) -> None:
        """Let others go on after a ticket that an interrupt kept from being taken up."""
        if self._last_ticket is not None and not self._last_ticket.is_taken_up:
            self._last_ticket.end()

    def close(self) -> None:
        """Close connections, and groups that the strategy made itself."""
        if self._everyone is not None:
            self._everyone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def retrieve_plan(
        self,
        globally_available_ids: Mapping[int, Sequence[IdT]],
        wanted: Mapping[int, Sequence[IdT]] | Sequence[IdT],
    ) -> ExchangePlan[IdT]:
        """Decide who sends which shard to whom.

        Args:
            globally_available_ids: For each rank the shards it holds; the same on all ranks.
            wanted: For each rank the shards it wants; or the shards that this rank wants, and then
                all ranks call this together.

        Raises:
            NoReplicasAvailableError: Shards are wanted that no rank holds. It lists all of them.
        """
        if isinstance(wanted, Mapping):
            return plan_exchange(globally_available_ids, wanted)
        ids = {id_ for held in globally_available_ids.values() for id_ in held}
        number_of = {id_: number for number, id_ in enumerate(sorted(ids, key=_plain_repr))}
        # Numbers, since any hashable may be an ID, and what JSON brings back is not what it was.
        mine = [number_of.get(id_, _plain_repr(id_)) for id_ in wanted]
        records = self._world().gather("say which shards are wanted", mine)
        named = {number: id_ for id_, number in number_of.items()}
        # A shard that nobody holds ends in an error that names it; it is never looked up.
        by_rank: dict[int, list[Any]] = {
            rank: [named[entry] if isinstance(entry, int) else _Unheld(entry) for entry in record]
            for rank, record in enumerate(records)
        }
        return plan_exchange(globally_available_ids, by_rank)

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
            plan: From :meth:`retrieve_plan`.
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


class _Unheld(str):
    """Placeholder of an ID that only the rank that wants it knows."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _into(images: dict[CkptID, memoryview]) -> Accept:
    def accept(id_: CkptID, nbytes: int) -> memoryview:
        images[id_] = memoryview(bytearray(nbytes))
        return images[id_]

    return accept


def _plain_repr(id_: Hashable) -> str:
    return repr(tuple(id_) if isinstance(id_, tuple) else id_)
