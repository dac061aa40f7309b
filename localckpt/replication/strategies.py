"""Strategies that keep copies of shards, and the protocol by which copies are made.

A strategy agrees with its peers, asks for memory, and lets a transport move the bytes. Where images
lie, and what is in them, it does not know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self, TypedDict, Unpack

import torch
import torch.distributed as dist

from localckpt.availability.inventory import Inventory
from localckpt.errors import CheckpointingException
from localckpt.ids import Checkpoint, CkptID, Group, ShardIdentity
from localckpt.memory.digests import LEAST_COMPARED_NBYTES, HeldBlocks
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import GRACE_S, MANAGER, refused_together
from localckpt.replication.base import NoReplication as NoReplication
from localckpt.replication.base import ReplicationStrategy as ReplicationStrategy
from localckpt.replication.changed_blocks import exchange_changed
from localckpt.replication.device_transport import DeviceTransport
from localckpt.replication.exchange import missing_copies
from localckpt.replication.groups import GroupWrapper, check_replication_params
from localckpt.replication.member_strategy import Announcement, MemberStrategy, deadline_with_others
from localckpt.replication.placement import place_cliques
from localckpt.replication.progress import Receives, Sends
from localckpt.replication.redundancy import Lacking
from localckpt.replication.retrieval import as_asked
from localckpt.state_dict.source import ShardSource
from localckpt.storage.store import Slot, Store
from localckpt.storage.write import Place

logger = logging.getLogger(__name__)


class _Options(TypedDict, total=False):
    """Options of :class:`CliqueReplicationStrategy` that its other constructors have as well."""

    timeout_s: float | None
    failure_domain: str | None
    rate_limit: float | None


class CliqueReplicationStrategy(MemberStrategy):
    """Cliques of ranks in which each holds a replica of every other's shard.

    Shards are sent over connections of the strategy's own, so one that breaks leaves the training's
    groups alone, and is made anew at the next save.

    Args:
        local_group: This rank's clique, if the job forms its own. Its members must be on different
            nodes. With ``None`` all ranks form cliques together, of ranks in different failure
            domains, when their managers meet; see :func:`place_cliques`.
        target_device: Accepted without effect, as an argument of NVRx's.
        timeout_s: Deadline of each step that ranks take together, in seconds, if it is to be
            shorter than that of the manager; see :class:`ReplicationStrategy`.
        process_group: The ranks of the job; ``None`` for all. Only with a ``local_group``.
        replication_jump: Distance between members of a clique, instead of failure domains.
        replication_factor: Copies of each shard, the owner's included.
        failure_domain: What this rank's node is lost with, such as its rack or switch; no two
            members of a clique are to share it. All ranks give one, or none does. By default what
            the variable ``LOCALCKPT_FAILURE_DOMAIN`` says.
        rate_limit: How many bytes a second this rank sends at most from host memory, to leave the
            network to training; ``None`` for as many as it can.
    """

    _on_devices = True

    def __init__(
        self,
        local_group: GroupWrapper | dist.ProcessGroup | None = None,
        target_device: object = None,
        *,
        timeout_s: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        replication_jump: int | None = None,
        replication_factor: int = 2,
        failure_domain: str | None = None,
        rate_limit: float | None = None,
    ) -> None:
        with refused_together(MANAGER, process_group, timeout_s):
            clique = None if local_group is None else GroupWrapper.wrap(local_group)
            if clique is None:
                check_replication_params(
                    1 if replication_jump is None else replication_jump, replication_factor
                )
            self._jump, self._factor = replication_jump, replication_factor
            self._device: DeviceTransport | None = None
            super().__init__(timeout_s, process_group, failure_domain, rate_limit)
            self._meets_at_once = False
            if clique is not None:
                self._is_given_group = True
                self._use(clique, self.step_s(None))

    @classmethod
    def from_replication_params(
        cls,
        replication_jump: int | None = None,
        replication_factor: int = 2,
        **options: Unpack[_Options],
    ) -> Self:
        """Agree on how the job is cut into cliques; all ranks call it together.

        Args:
            replication_jump: Distance between members of a clique, for cliques by rank numbers.
                With ``None`` they are formed from failure domains when a manager is made.
            replication_factor, options: As for the class.

        Raises:
            MismatchError: The job has too few ranks, or ranks give different numbers.
            SameMachineReplicationException: Replicas would be lost with the original.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise CheckpointingException(
                "replication needs torch.distributed: call init_process_group() first, or use "
                "LazyCliqueReplicationStrategy, which is built at its first use"
            )
        # The others meet at once.
        with refused_together("retrieval", None, options.get("timeout_s")):
            strategy = cls(
                replication_jump=replication_jump,
                replication_factor=replication_factor,
                **options,
            )
        strategy._meets_at_once = True
        strategy._meet()
        return strategy

    def _meet(self) -> None:
        try:
            self._agree_on_parameters()
            if self._jump is not None:
                self._form_by_numbers(self._jump)
        except BaseException:
            self.close()
            raise

    def rejoin(self) -> None:
        super().rejoin()
        if self._meets_at_once:
            self._meet()

    @property
    def local_group(self) -> GroupWrapper:
        """This rank's clique; formed by the number of ranks on a node if no manager was made."""
        return self._clique

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
        slots: list[Slot] = []

        def accept(peer: CkptID, nbytes: int) -> Place:
            of_peer = replace(identity, rank=peer.rank)
            slots.append(store.reserve(of_peer, nbytes, timeout_s, may_stage=True))
            return slots[-1].place

        try:
            self.replicate_image(
                own.source if own is not None else None,
                identity.ckpt_id,
                accept,
                timeout_s=self.step_s(timeout_s, of_save=True),
                held=lambda: [slot.held for slot in slots],
                tensors_on_gpu=on_gpu,
                error=error,
            )
            for slot in slots:
                slot.arrived()
        except Exception:
            store.release(slots)
            raise
        return slots

    def replicate_image(
        self,
        source: ShardSource | None,
        ckpt_id: CkptID,
        accept: Callable[[CkptID, int], Place],
        *,
        timeout_s: float | None = None,
        held: Callable[[], Sequence[HeldBlocks]] | None = None,
        tensors_on_gpu: bool = False,
        error: str | None = None,
    ) -> list[CkptID]:
        """Give this rank's image, or the error that it has none, to its peers, and take theirs.

        ``accept`` returns writable memory for a peer's shard, which is the caller's to release when
        this raises; ``held`` describes the older images in what it returned, of which unchanged
        blocks are not sent again. Returns the shards that were received.
        """
        step_s = self.step_s(timeout_s)
        if self._device is not None and self._device.broken:
            tensors_on_gpu = False
        group, clique = self._clique, self._clique_ranks
        on_gpu = tensors_on_gpu and "cuda" in group.supported_devices
        announced = self._announce(source, ckpt_id, error, step_s, on_gpu)
        what = f"iteration {ckpt_id.iteration}"

        rounds = list(self._rounds(announced))
        senders = [sender for _, sender in rounds if sender is not None]
        with Attempt() as accepting:
            views = [
                as_asked(accept(peer.id_, peer.nbytes), peer.nbytes, peer.id_) for peer in senders
            ]
            blocks = held() if held is not None else [HeldBlocks()] * len(views)
        deadline = Deadline.after(step_s)
        clique.decide(f"make room for replicas of {what}", accepting, deadline=deadline)

        started = time.monotonic()
        over_device = bool(senders) and all(peer.more for peer in announced)
        with Attempt() as exchanging:
            assert source is not None
            images = iter(views)
            moves = [
                (
                    [] if receiver is None else [(receiver, source)],
                    [] if sender is None else [(sender.rank, next(images))],
                )
                for receiver, sender in rounds
            ]
            if over_device:
                self.sent_nbytes = self._exchange_on_device(moves, step_s)
            else:
                self.sent_nbytes = self._exchange(announced, moves, blocks, step_s)
        took_s = time.monotonic() - started
        # gloo's peers see at once that a connection is closed, NCCL's at their own deadline.
        grace_s = GRACE_S + (max(0.0, step_s - took_s) if over_device else 0.0)
        clique.decide(
            f"replicate {what}", exchanging, grace_s=grace_s, deadline=deadline_with_others(step_s)
        )
        logger.debug(
            "replicated %s: %d bytes to %d peers in %.3f s",
            what, self.sent_nbytes or 0, len(announced) - 1, took_s,
        )  # fmt: skip
        return [peer.id_ for peer in senders]

    @property
    def protection(self) -> Mapping[int, Group]:
        keepers = self._keepers
        return {rank: Group((rank, *kept), len(kept)) for rank, kept in keepers.items()}

    def lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        return Lacking(missing_copies(checkpoint, inventory, self._keepers))

    @property
    def sends_from_devices(self) -> bool:
        return "cuda" in (self._formed or GroupWrapper()).supported_devices

    @property
    def _parameters(self) -> str:
        return f"replication_jump={self._jump!r}, replication_factor={self._factor!r}"

    def _place_cliques(self, nodes: Sequence[str], outer: Sequence[str] | None) -> list[list[int]]:
        return place_cliques(nodes, self._factor, outer)

    def _close_connections(self) -> None:
        super()._close_connections()
        if self._device is not None:
            self._device.close()
        self._device = None

    def _rounds(
        self, announced: Sequence[Announcement]
    ) -> Iterator[tuple[int | None, Announcement | None]]:
        """Yield the receiver and the sender of each round, one of each at most."""
        keepers, mine = self._keepers_here, self._clique.my_global_rank
        place, count = self._clique.my_group_rank, len(announced)
        for distance in range(1, count):
            to, sender = announced[(place + distance) % count], announced[place - distance]
            yield (
                to.rank if to.rank in keepers[mine] else None,
                sender if mine in keepers[sender.rank] else None,
            )

    def _exchange(
        self,
        announced: Sequence[Announcement],
        moves: Sequence[tuple[Sends, Receives]],
        held: Sequence[HeldBlocks],
        timeout_s: float,
    ) -> int:
        """Exchange images in host memory; return how many bytes were sent."""
        sends = [send for sends, _ in moves for send in sends]
        receives = [receive for _, receives in moves for receive in receives]
        transport = self._host_transport(announced, timeout_s)
        if max(peer.nbytes for peer in announced) >= LEAST_COMPARED_NBYTES:
            deadline = Deadline.after(timeout_s)
            return exchange_changed(transport, sends, receives, held, deadline)
        transport.exchange(sends, receives, timeout_s)
        return sum(source.nbytes for _, source in sends)

    def _exchange_on_device(self, moves: Sequence[tuple[Sends, Receives]], timeout_s: float) -> int:
        """Exchange images from GPU to GPU; return how many bytes were sent."""
        if self._device is None:
            device = torch.device("cuda", torch.cuda.current_device())
            self._device = DeviceTransport(self._clique, device, owns_group=self._owns_group)
        try:
            # One round at a time, so that there are buckets for one peer only.
            for sends, receives in moves:
                limit_s = min(timeout_s, self._group_limit_s)
                self._device.exchange(sends, receives, limit_s)
        finally:
            if self._device.broken:
                logger.warning("device memory could not be sent; replicas now go through the host")
        return sum(source.nbytes for sends, _ in moves for _, source in sends)


class LazyCliqueReplicationStrategy(CliqueReplicationStrategy):
    """A :class:`CliqueReplicationStrategy` whose ranks meet at its first use.

    It can be made before torch.distributed is initialised. Arguments as for
    :meth:`CliqueReplicationStrategy.from_replication_params`.
    """

    def __init__(
        self,
        replication_jump: int | None = None,
        replication_factor: int = 2,
        **options: Unpack[_Options],
    ) -> None:
        super().__init__(
            replication_jump=replication_jump, replication_factor=replication_factor, **options
        )
