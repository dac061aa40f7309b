"""The strategy that keeps parity: what is lost is computed from what several nodes keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import least_losses
from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    SameMachineReplicationException,
)
from localckpt.ids import Checkpoint, Group, ShardIdentity
from localckpt.parity.encode import encode
from localckpt.parity.image import ParityFrame, ParityOf
from localckpt.parity.pipeline import Pipeline
from localckpt.parity.renewal import ParityRenewal
from localckpt.parity.stripes import MOST_MEMBERS, MOST_PARITIES, PARITY_KIND
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import MANAGER, refused_together
from localckpt.replication.member_strategy import (
    Announcement,
    MemberStrategy,
    deadline_with_others,
)
from localckpt.replication.placement import place_cliques
from localckpt.replication.redundancy import Lacking
from localckpt.storage.store import Slot, Store

logger = logging.getLogger(__name__)


class ParityReplicationStrategy(MemberStrategy):
    """Groups of ranks on different nodes, of which any one or two may be lost.

    In a group of g ranks with m parities each keeps, beside its own shard, parity of m/(g - m) of a
    shard, computed while shards travel around the group, behind training. A restart computes the
    shards of up to m lost nodes of each group from what the others keep. Shards are in host memory
    when they are sent, and stay where they are.

    Ranks meet when their managers do, so it can be made before torch.distributed is initialised. It
    is for managers that keep images: :class:`LocalCheckpointManager` and
    :class:`InMemoryCheckpointManager`.

    Args:
        parity: How many nodes of a group may be lost: 1 or 2.
        group_size: How many ranks a group has at least, each on another node. Where nodes do not
            divide, some groups are larger.
        timeout_s: Deadline of each step that ranks take together, in seconds, if it is to be
            shorter than that of the manager that uses the strategy; see
            :class:`ReplicationStrategy`.
        failure_domain: What this rank's node is lost with, such as its rack or switch; no two
            members of a group share it. All ranks give one, or none does. By default what the
            variable ``LOCALCKPT_FAILURE_DOMAIN`` says.
        process_group: The ranks of the job; ``None`` for all.
        rate_limit: How many bytes a second this rank sends at most, to leave the network to the
            training; ``None`` for no limit.

    Raises:
        CheckpointingException: An argument is out of range.
    """

    def __init__(
        self,
        parity: int = 1,
        group_size: int = 8,
        *,
        timeout_s: float | None = None,
        failure_domain: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        rate_limit: float | None = None,
    ) -> None:
        with refused_together(MANAGER, process_group, timeout_s):
            # Python's True is an int.
            if type(parity) is not int or not 1 <= parity <= MOST_PARITIES:
                raise CheckpointingException(
                    f"parity is {parity!r}; it can be 1 to {MOST_PARITIES}: so many nodes of a "
                    f"group may be lost"
                )
            if type(group_size) is not int or group_size < parity + 2:
                raise CheckpointingException(
                    f"group_size is {group_size!r}; with parity={parity} it must be at least "
                    f"{parity + 2}: in a smaller group parity takes as much as copies do, so use "
                    f"CliqueReplicationStrategy"
                )
            if group_size > MOST_MEMBERS:
                raise CheckpointingException(
                    f"group_size is {group_size}; it can be {MOST_MEMBERS} at most"
                )
            self._parity, self._factor = parity, group_size
            self._pipeline: Pipeline | None = None
            self._protection: dict[int, Group] = {}
            super().__init__(timeout_s, process_group, failure_domain, rate_limit)

    def require_states(self, manager: str) -> None:
        raise MismatchError(
            f"parity is of images, and {manager} keeps states: use CliqueReplicationStrategy, or "
            f"LocalCheckpointManager or InMemoryCheckpointManager"
        )

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
        step_s = self.step_s(timeout_s, of_save=True)
        source = own.source if own is not None else None
        ckpt_id = identity.ckpt_id
        announced = self._announce(source, ckpt_id, error, step_s)
        what, clique = f"iteration {ckpt_id.iteration}", self._clique_ranks

        slots: list[Slot] = []
        parity: memoryview | None = None
        try:
            with Attempt() as accepting:
                ranks = tuple(peer.id_.rank for peer in announced)
                of = ParityOf(self._group_of(ranks), tuple(peer.nbytes for peer in announced))
                frame = ParityFrame.of(identity, of)
                piece = identity.of_kind(PARITY_KIND)
                slots.append(store.reserve(piece, frame.nbytes, timeout_s))
                parity = frame.put(slots[0].image)
            deadline = Deadline.after(step_s)
            clique.decide(f"make room for the parity of {what}", accepting, deadline=deadline)

            started = time.monotonic()
            with Attempt() as encoding:
                assert source is not None
                assert parity is not None
                encode(of.layout, self._connected(announced, step_s), source, parity, step_s)
            deadline = deadline_with_others(step_s)
            clique.decide(f"encode the parity of {what}", encoding, deadline=deadline)
            slots[0].arrived()
        except Exception:
            store.release(slots)
            raise
        logger.debug(
            "%d bytes of parity of %s from %d ranks in %.3f s",
            of.layout.parity_nbytes, what, len(announced), time.monotonic() - started,
        )  # fmt: skip
        return slots

    def place(self, domains: Sequence[str], timeout_s: float | None = None) -> None:
        super().place(domains, timeout_s)
        groups = [self._group_of(tuple(ranks)) for ranks in self._all_cliques()]
        self._protection = {rank: group for group in groups for rank in group.ranks}

    @property
    def protection(self) -> Mapping[int, Group]:
        return self._protection

    def lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        # Parity of other groups does as well: replacing it would take it away until all is there.
        bears = least_losses(checkpoint, inventory)
        groups = [
            group
            for group in dict.fromkeys(self._protection.values())
            if any(bears[rank] <= self._parity for rank in group.ranks)
        ]
        copies = {
            owner: [owner]
            for owner, nodes in inventory.holders(checkpoint).items()
            if inventory.node_of(owner) not in nodes
        }
        return Lacking(copies, ParityRenewal(groups) if groups else None)

    def _group_of(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks, self._parity, PARITY_KIND)

    @property
    def _parameters(self) -> str:
        return f"parity={self._parity}, group_size={self._factor}"

    def _place_cliques(self, nodes: Sequence[str], outer: Sequence[str] | None) -> list[list[int]]:
        return place_parity_groups(nodes, self._parity, self._factor, outer)

    def _connected(self, announced: Sequence[Announcement], timeout_s: float) -> Pipeline:
        transport = self._host_transport(announced, timeout_s)
        if self._pipeline is None or self._pipeline.transport is not transport:
            self._pipeline = Pipeline(transport)
        return self._pipeline

    def _close_connections(self) -> None:
        super()._close_connections()
        self._pipeline = None


def place_parity_groups(
    nodes: Sequence[str], parity: int, group_size: int, outer: Sequence[str] | None = None
) -> list[list[int]]:
    """Groups of ranks in different failure domains; see :func:`place_cliques`."""
    domains = nodes if outer is None else outer
    count = len(set(domains))
    kind = "nodes" if outer is None else "failure domains"
    if count < group_size:
        fits = f"group_size={count} at most" if count >= parity + 2 else ""
        if not fits and count >= MOST_PARITIES + 1:
            fits = f"parity=1, group_size={count}"
        if not fits:
            fits = "CliqueReplicationStrategy" if count > 1 else "repl_strategy=None"
        raise SameMachineReplicationException(
            f"the ranks are on {count} {kind}, too few for groups of {group_size}: use {fits}, or "
            f"run on more {kind}"
        )
    groups = place_cliques(nodes, group_size, outer)
    for group in groups:
        if len({domains[rank] for rank in group}) < len(group):
            raise SameMachineReplicationException(
                f"ranks {group} would be a parity group, and some of them are on one of the "
                f"{kind}, with which more than one is lost: run the same number of ranks on each "
                f"of at least {group_size} {kind}"
            )
    return groups
