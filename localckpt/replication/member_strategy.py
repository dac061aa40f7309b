"""Base of strategies whose ranks form groups: membership, announcements and connections.

Members announce what they have before anything is sent, and keep their connections from save to
save. What is sent is up to the strategies.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.ids import CkptID
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import GRACE_S, Ranks
from localckpt.replication.base import STEPS, ReplicationStrategy, Ticket
from localckpt.replication.groups import require_same
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.membership import Membership
from localckpt.replication.progress import CHUNK_NBYTES
from localckpt.replication.retrieval import new_name
from localckpt.state_dict.source import ShardSource

__all__ = ["Announcement", "MemberStrategy", "deadline_with_others"]


@dataclass(frozen=True, slots=True)
class Announcement:
    """Message of a member before anything is sent."""

    rank: int
    id_: CkptID
    nbytes: int
    error: str | None
    connection: str
    """Name of the connections it still has from the last save."""
    offer: str
    """A name for new ones; the first member's is taken."""
    more: Any
    """Fields of the strategy's own."""
    chunk_nbytes: int = CHUNK_NBYTES


class MemberStrategy(ReplicationStrategy):
    """A strategy in which each rank works together with some others, always the same.

    Args:
        timeout_s, process_group, target_device: As for :class:`ReplicationStrategy`.
        chunk_nbytes, rate_limit: As for :class:`HostTransport`.
    """

    def __init__(
        self,
        timeout_s: float | None,
        process_group: dist.ProcessGroup | None,
        target_device: str,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        rate_limit: float | None = None,
    ) -> None:
        if chunk_nbytes < 1 or (rate_limit is not None and rate_limit <= 0):
            raise CheckpointingException(
                f"chunk_nbytes is {chunk_nbytes} and rate_limit {rate_limit}: the one must be at "
                f"least 1 byte, the other above 0 bytes a second, or None"
            )
        super().__init__(timeout_s, process_group, target_device=target_device)
        self._chunk_nbytes = chunk_nbytes
        self.rate_limit = rate_limit
        self._members = self._make_membership()
        self._host: HostTransport | None = None
        self._host_name = ""
        self._is_connecting = False
        self._process = os.getpid()

    @abstractmethod
    def _make_membership(self) -> Membership:
        """Make this rank's membership; called once."""

    def take_ticket(self) -> Ticket:
        self._members.wait_again()
        return super().take_ticket()

    def place(self, domains: Sequence[str], timeout_s: float | None = None) -> None:
        step_s = self.step_s(timeout_s)
        if self._last_ticket is not None:
            # Other ranks, too, had theirs over or given up before they came here.
            self._last_ticket.over.wait(STEPS * step_s)
        # Both count messages, and a rank that was interrupted may have sent fewer than the others.
        if self._everyone is not None:
            self._everyone.close()
        self._everyone = Ranks("retrieval", self._process_group, step_s)
        self._members.begin_anew(step_s)
        self._members.place(domains)

    def waits_for(self) -> str:
        members = self._members.group
        others = [rank for rank in members.ranks if rank != members.my_global_rank]
        what = "connect" if self._is_connecting else self._members.coordinator.under_way
        if others and what is not None:
            return f"{ranks_named(others)} to {what}"
        progress = None if (host := self._host) is None else host.connections.progress
        return "" if progress is None else ", ".join(map(progress.of, progress.lacking()))

    def give_up(self) -> None:
        if os.getpid() != self._process:
            return
        self._end_idle_ticket()
        self._members.stop_waiting()
        # Looked at once: another thread may be about to connect anew.
        if (host := self._host) is not None:
            host.abort()

    def close(self) -> None:
        if os.getpid() != self._process:
            # The connections are those of the process that this one is a fork of.
            return
        self._close_connections()
        self._members.close()
        super().close()

    def _close_connections(self) -> None:
        if self._host is not None:
            self._host.close()
        self._host = None

    def _announce(
        self,
        source: ShardSource | None,
        ckpt_id: CkptID,
        error: str | None,
        timeout_s: float,
        more: Any = None,
    ) -> list[Announcement]:
        """Announce this member's shard to the other members.

        Args:
            source: The image of this rank's shard; ``None`` if there is an error.
            ckpt_id: Name of the shard.
            error: Why this rank has no shard, if so.
            timeout_s: Deadline, in seconds.
            more: Anything else for the other members, in JSON.

        Returns:
            Announcements of all members, in their order.

        Raises:
            CheckpointingException: Some member has no image, or they do not belong together; on all
                of them.
            PeerLostError: A member did not come.
        """
        if source is None and error is None:
            error = "it was given neither an image nor an error"
        mine = Announcement(
            rank=self._members.group.my_global_rank,
            id_=CkptID(*ckpt_id),
            nbytes=source.nbytes if source is not None and error is None else 0,
            error=error,
            connection=self._host_name if self._host and not self._host.broken else "",
            offer=new_name(),
            more=more,
            chunk_nbytes=self._chunk_nbytes,
        )
        records = self._members.coordinator.gather(
            f"announce iteration {ckpt_id.iteration} for replication",
            asdict(mine),
            deadline=Deadline.after(timeout_s),
            kind="announce for replication",
        )
        announced = [Announcement(**record | {"id_": CkptID(*record["id_"])}) for record in records]
        _require_agreement(announced)
        return announced

    def _host_transport(self, announced: Sequence[Announcement], timeout_s: float) -> HostTransport:
        """Return the connections of the last save if all members have them, else new ones."""
        if self._host is None or {peer.connection for peer in announced} != {self._host_name}:
            if self._host is not None:
                self._host.close()
            name, ranks = announced[0].offer, self._members.group.ranks
            self._host, self._is_connecting = None, True
            try:
                self._host = HostTransport.connect(
                    name,
                    ranks,
                    self._members.group.my_global_rank,
                    timeout_s,
                    chunk_nbytes=self._chunk_nbytes,
                    rate_limit=self.rate_limit,
                    is_given_up=lambda: self._members.in_a_hurry,
                )
            finally:
                self._is_connecting = False
            self._host_name = name
            if self._members.in_a_hurry:
                # There was nothing to abort yet.
                self._host.abort()
        return self._host


def deadline_with_others(timeout_s: float) -> Deadline:
    """Make the deadline of telling the outcome of a step, whose own may have passed elsewhere."""
    return Deadline.after(timeout_s + min(GRACE_S, timeout_s / 2))


def _require_agreement(announced: Sequence[Announcement]) -> None:
    failed = [f"rank {peer.rank}: {peer.error}" for peer in announced if peer.error is not None]
    if failed:
        raise CheckpointingException(
            f"iteration {announced[0].id_.iteration} was not replicated, since not every rank of "
            f"the clique has its shard: {'; '.join(failed)}. Older checkpoints stand."
        )
    for what, index in (("iteration", 0), ("session", 2)):
        require_same(what, {peer.rank: repr(peer.id_[index]) for peer in announced})
    require_same("chunk_nbytes", {peer.rank: repr(peer.chunk_nbytes) for peer in announced})
    owners = [peer.id_.rank for peer in announced]
    if len(set(owners)) < len(owners):
        said = ", ".join(f"rank {p.rank} the shard of rank {p.id_.rank}" for p in announced)
        raise MismatchError(f"members of a clique announce the same shard: {said}")
