"""Base of strategies whose ranks form cliques, announce what they have, and keep connections.

Cliques are given, counted from rank numbers, or formed from failure domains once these are known.
Members announce what they have before anything is sent, and keep their connections from save to
save. What is sent is up to the strategies.
"""

from __future__ import annotations

import logging
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch.distributed as dist

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.ids import CkptID
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import GRACE_S, Ranks, shaped
from localckpt.replication.base import STEPS, ReplicationStrategy
from localckpt.replication.groups import (
    GroupWrapper,
    check_failure_domains,
    default_replication_jump,
    parse_group_sequence,
    require_same,
)
from localckpt.replication.placement import keepers_in
from localckpt.replication.retrieval import new_name
from localckpt.replication.transport import Transport, connect
from localckpt.state_dict.source import ShardSource

logger = logging.getLogger(__name__)

FAILURE_DOMAIN_VARIABLE = "LOCALCKPT_FAILURE_DOMAIN"
"""Names what a node is lost with, where no ``failure_domain`` is given."""


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


class MemberStrategy(ReplicationStrategy):
    """A strategy in which each rank works together with the same others, its clique."""

    _jump: int | None = None
    """Distance between members; without it cliques are formed by failure domains."""
    _factor: int
    """Least number of members."""
    _on_devices = False
    """True if members may send to each other from GPU to GPU, in a process group."""

    def __init__(
        self,
        timeout_s: float | None,
        process_group: dist.ProcessGroup | None,
        failure_domain: str | None,
        rate_limit: float | None,
    ) -> None:
        if rate_limit is not None and rate_limit <= 0:
            raise CheckpointingException(
                f"rate_limit is {rate_limit}: it must be above 0 bytes a second, or None"
            )
        super().__init__(timeout_s, process_group)
        self.rate_limit = rate_limit
        self._failure_domain = failure_domain or os.environ.get(FAILURE_DOMAIN_VARIABLE) or None
        self._process = os.getpid()
        self._forget_ranks()

    def _forget_ranks(self) -> None:
        # Failure domains of all ranks, if they were given.
        self._outer: list[str] | None = None
        self._agreed = False
        self._formed: GroupWrapper | None = None
        self._formed_ranks: Ranks | None = None
        self._cliques: list[list[int]] | None = None
        self._placed_on: list[int] | None = None
        # Whether the clique's process group was made here, and how long its operations may take.
        self._owns_group, self._group_limit_s = False, math.inf
        # Ranks that keep a copy of each rank's shard, once the ranks are placed; and those of each
        # member of this rank's clique, as ranks of the default group.
        self._keepers: dict[int, list[int]] = {}
        self._keepers_here: dict[int, list[int]] = {}
        self._host: Transport | None = None
        self._host_name = ""
        self._is_connecting = False

    @property
    @abstractmethod
    def _parameters(self) -> str:
        """All that ranks must have been given alike, in words."""

    @abstractmethod
    def _place_cliques(self, nodes: Sequence[str], outer: Sequence[str] | None) -> list[list[int]]:
        """Form cliques by failure domains; ``outer`` are larger ones than the nodes."""

    @property
    def _clique(self) -> GroupWrapper:
        """The clique; formed by the number of ranks on a node if the ranks were not placed."""
        if self._formed is None:
            self._agree_on_parameters()
            self._form_by_numbers(default_replication_jump() if self._jump is None else self._jump)
            assert self._formed is not None
        return self._formed

    @property
    def _clique_ranks(self) -> Ranks:
        ranks = self._clique.ranks
        assert self._formed_ranks is not None, f"ranks {ranks} are a clique that agrees on nothing"
        return self._formed_ranks

    @property
    def _is_aborted(self) -> bool:
        return self._formed_ranks is not None and self._formed_ranks.is_aborted

    def begin_copies(self) -> None:
        if self._formed_ranks is not None:
            self._formed_ranks.wait_again()
            self._formed_ranks.prepare()

    def place(self, domains: Sequence[str], timeout_s: float | None = None) -> None:
        step_s = self.step_s(timeout_s)
        # Other ranks, too, had their copies over or given up before they came here.
        self.thread.close(STEPS * step_s)
        # Both count messages, and a rank that was interrupted may have sent fewer than the others.
        if self._everyone is not None:
            self._everyone.close()
        self._everyone = Ranks("retrieval", self._process_group, step_s)
        if self._formed is not None:
            self._close_clique_ranks()
            self._formed_ranks = Ranks("clique", None, step_s, ranks=self._formed.ranks)
        numbers: dict[str, int] = {}
        nodes = [numbers.setdefault(domain, len(numbers)) for domain in domains]
        if self._formed is None and self._jump is None:
            self._agree_on_parameters()
            self._form(self._place_cliques(domains, self._outer))
            self._placed_on = nodes
        cliques = self._all_cliques()
        if sorted(rank for clique in cliques for rank in clique) != list(range(len(domains))):
            raise MismatchError(
                f"the cliques {cliques} are not those of the {len(domains)} ranks of the manager: "
                f"give the strategy and the manager the same process_group"
            )
        # Managers may share a strategy, and the stores of one lie where the other's do not.
        if nodes != self._placed_on:
            check_failure_domains(cliques, domains)
        apart = self._outer or domains
        self._keepers = {
            owner: keepers
            for clique in cliques
            for owner, keepers in keepers_in(clique, apart).items()
        }
        members = self._world().global_ranks
        places = {members[place]: place for place in range(len(members))}
        self._keepers_here = {
            owner: [members[place] for place in self._keepers[places[owner]]]
            for owner in self._clique.ranks
        }

    def _all_cliques(self) -> list[list[int]]:
        """Return all cliques of the job, as places among its ranks; all ranks call it together."""
        if self._cliques is None:
            # Explicit groups are known to their members only; all ranks must come to one answer.
            everyone = self._world()
            self._cliques = everyone.decide(
                "compare cliques",
                lambda: self._clique.ranks,
                lambda cliques: _places(cliques, everyone.global_ranks),
                read=shaped([[int]]),
            )
        return self._cliques

    def waits_for(self) -> str:
        clique = self._clique
        others = [rank for rank in clique.ranks if rank != clique.my_global_rank]
        what = "connect" if self._is_connecting else self._clique_ranks.under_way
        if others and what is not None:
            return f"{ranks_named(others)} to {what}"
        progress = None if (host := self._host) is None else host.progress
        return "" if progress is None else ", ".join(map(progress.of, progress.lacking()))

    def abort(self, within_s: float = 2.0) -> None:
        if self._formed_ranks is not None:
            self._formed_ranks.cut_off()
        super().abort(within_s)

    def rejoin(self) -> None:
        super().rejoin()
        self._forget_ranks()

    def give_up(self) -> None:
        if os.getpid() != self._process:
            return
        if self._formed_ranks is not None:
            self._formed_ranks.abort()
        # Looked at once: another thread may be about to connect anew.
        if (host := self._host) is not None:
            host.abort()

    def close(self) -> None:
        if os.getpid() != self._process:
            # The connections are those of the process that this one is a fork of.
            return
        self._close_connections()
        self._close_clique_ranks()
        if self._owns_group and self._formed is not None and dist.is_initialized():
            self._owns_group = False
            # torch forgets all groups when the default group is destroyed before this.
            with suppress(ValueError):
                dist.destroy_process_group(self._formed.group)
            # Its threads end with the last reference.
            self._formed.group = None
        super().close()

    def _close_clique_ranks(self) -> None:
        if self._formed_ranks is not None:
            self._formed_ranks.close()

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
        """Announce this member's shard, and JSON as ``more``, and return what all members do."""
        if source is None and error is None:
            error = "it was given neither an image nor an error"
        mine = Announcement(
            rank=self._clique.my_global_rank,
            id_=CkptID(*ckpt_id),
            nbytes=source.nbytes if source is not None and error is None else 0,
            error=error,
            connection=self._host_name if self._host and not self._host.broken else "",
            offer=new_name(),
            more=more,
        )
        records = self._clique_ranks.decide(
            f"announce iteration {ckpt_id.iteration} for replication",
            lambda: asdict(mine),
            list,
            read=shaped(list),
            deadline=Deadline.after(timeout_s),
            kind="announce for replication",
        )
        announced = [Announcement(**record | {"id_": CkptID(*record["id_"])}) for record in records]
        _require_agreement(announced)
        return announced

    def _host_transport(self, announced: Sequence[Announcement], timeout_s: float) -> Transport:
        """Return the connections of the last save if all members have them, else new ones."""
        if self._host is None or {peer.connection for peer in announced} != {self._host_name}:
            if self._host is not None:
                self._host.close()
            name, clique = announced[0].offer, self._clique
            self._host, self._is_connecting = None, True
            try:
                self._host = connect(
                    *(name, clique.ranks, clique.my_global_rank, timeout_s),
                    rate_limit=self.rate_limit,
                    is_given_up=lambda: self._is_aborted,
                )
            finally:
                self._is_connecting = False
            self._host_name = name
            if self._is_aborted:
                # There was nothing to abort yet.
                self._host.abort()
        return self._host

    def _agree_on_parameters(self) -> None:
        """Compare what the ranks were given; once."""
        if self._agreed:
            return
        mine = [self._parameters, self._failure_domain]
        runs = self._world().decide(
            *("agree on cliques", lambda: mine, _judge_parameters), read=shaped([(object, int)])
        )
        self._outer = [domain for domain, count in runs for _ in range(count)] or None
        self._agreed = True

    def _form_by_numbers(self, jump: int) -> None:
        cliques = parse_group_sequence(jump, self._factor, self._world().world_size)
        if self._outer is not None:
            check_failure_domains(cliques, self._outer)
        self._form(cliques)

    def _form(self, cliques: list[list[int]]) -> None:
        self._cliques = cliques
        everyone, ranks = GroupWrapper(), self._world()
        (mine,) = (clique for clique in cliques if ranks.rank in clique)
        if not (self._on_devices and "cuda" in everyone.supported_devices):
            members = [ranks.global_ranks[place] for place in mine]
            self._use(GroupWrapper.of_ranks(members), ranks.timeout_s)
            return
        # torch ends the process when an NCCL operation outlasts its group: ours gives up before.
        backends = dict(entry.split(":", 1) for entry in everyone.backend.split(","))
        group = GroupWrapper.from_list_of_groups(
            cliques, timeout_s=2 * ranks.timeout_s + 60, backend=backends["cuda"]
        )
        self._owns_group = True
        self._group_limit_s = ranks.timeout_s
        self._use(group, ranks.timeout_s)

    def _use(self, group: GroupWrapper, timeout_s: float) -> None:
        if group.world_size == 1:
            logger.warning(
                "the clique of rank %d has no other member: its shard has no replica, and the "
                "nodes lose every checkpoint with the node of this rank",
                group.my_global_rank,
            )
        self._formed_ranks = Ranks("clique", None, timeout_s, ranks=group.ranks)
        self._keepers_here = {
            owner: [rank for rank in group.ranks if rank != owner] for owner in group.ranks
        }
        self._formed = group


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
    owners = [peer.id_.rank for peer in announced]
    if len(set(owners)) < len(owners):
        said = ", ".join(f"rank {p.rank} the shard of rank {p.id_.rank}" for p in announced)
        raise MismatchError(f"members of a clique announce the same shard: {said}")


def _judge_parameters(reports: Sequence[Sequence[str | None]]) -> list[tuple[str, int]]:
    """Check the parameters of the ranks; return their failure domains, if given, in runs."""
    require_same(
        "replication parameters", {r: str(params) for r, (params, _) in enumerate(reports)}
    )
    outer = [domain for _, domain in reports]
    without = [rank for rank, domain in enumerate(outer) if domain is None]
    if 0 < len(without) < len(outer):
        raise MismatchError(
            f"ranks {without} were given no failure_domain (nor {FAILURE_DOMAIN_VARIABLE}), and "
            f"the others were: give it to all ranks, or to none"
        )
    named = [domain for domain in outer if domain is not None]
    return [(domain, len(list(run))) for domain, run in groupby(named)]


def _places(cliques: Sequence[Sequence[int]], members: Sequence[int]) -> list[list[int]]:
    """Return each clique once, as places of its ranks in a group."""
    strangers = {rank for clique in cliques for rank in clique} - set(members)
    if strangers:
        raise MismatchError(
            f"ranks {sorted(strangers)} keep replicas, and are not among the ranks "
            f"{list(members)}: give the strategy the process_group that its cliques are of"
        )
    place_of = {rank: place for place, rank in enumerate(members)}
    return sorted({tuple(ranks): [place_of[rank] for rank in ranks] for ranks in cliques}.values())
