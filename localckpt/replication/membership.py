"""Clique of this rank: given, counted from rank numbers, or formed from failure domains.

Cliques are given, counted from rank numbers, or formed from failure domains once these are known.
What the members then do together is not decided here.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby

import torch.distributed as dist

from localckpt.errors import MismatchError
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.replication.groups import (
    GroupWrapper,
    check_failure_domains,
    default_replication_jump,
    parse_group_sequence,
    require_same,
)
from localckpt.replication.placement import keepers_in, place_cliques

__all__ = ["FAILURE_DOMAIN_VARIABLE", "Membership"]

logger = logging.getLogger(__name__)

Place = Callable[[Sequence[str], Sequence[str] | None], list[list[int]]]

FAILURE_DOMAIN_VARIABLE = "LOCALCKPT_FAILURE_DOMAIN"
"""Names what a node is lost with, where no ``failure_domain`` is given."""


class Membership:
    """This rank's place in a clique.

    Args:
        everyone: Returns the ranks of the job, once torch.distributed is initialised.
        group: This rank's clique, if the job forms its own.
        jump: Distance between members, for cliques by rank numbers; ``None``: by failure domains.
        factor: How many members a clique has at least.
        failure_domain: What this rank's node is lost with, beyond itself.
        timeout_s: Deadline of opening the messages within ``group``, in seconds.
        place: Forms cliques from the tokens of the ranks' stores and, if they were given any, their
            failure domains; ``None`` for :func:`place_cliques`.
        parameters: All that ranks must have been given alike, in words; ``None`` for jump and
            factor.
        on_devices: Whether members may send to each other from GPU to GPU.
    """

    def __init__(
        self,
        everyone: Callable[[], Ranks],
        group: GroupWrapper | None,
        *,
        jump: int | None,
        factor: int,
        failure_domain: str | None,
        timeout_s: float,
        place: Place | None = None,
        parameters: str | None = None,
        on_devices: bool = True,
    ) -> None:
        self._everyone = everyone
        self._jump = jump
        self._factor = factor
        self._place = place or (lambda nodes, outer: place_cliques(nodes, factor, outer))
        self._parameters = parameters or (
            f"replication_jump={jump!r}, replication_factor={factor!r}"
        )
        self._on_devices = on_devices
        self._failure_domain = failure_domain or os.environ.get(FAILURE_DOMAIN_VARIABLE) or None
        self._outer: list[str] | None = None
        self._agreed = False
        self._group: GroupWrapper | None = None
        self._placed_on: list[int] | None = None
        self._coordinator: Ranks | None = None
        self._cliques: list[list[int]] | None = None
        self.owns_group = False
        """True if the clique's process group was made here."""
        self.group_limit_s = math.inf
        """Time that an operation on that group may take, in seconds."""
        self.keepers: dict[int, list[int]] = {}
        """Ranks that keep a copy of each rank's shard, once the ranks are placed."""
        self.keepers_here: dict[int, list[int]] = {}
        """Keepers of each member of this rank's clique, as ranks of the default group."""
        if group is not None:
            self._use(group, timeout_s)

    def agree(self) -> None:
        """Compare what the ranks were given, and form cliques by numbers; all ranks call it.

        Raises:
            MismatchError: They do not fit together.
            SameMachineReplicationException: Members of a clique would be in one failure domain.
        """
        self._agree_on_parameters()
        if self._jump is not None:
            self._form_by_numbers(self._jump)

    @property
    def group(self) -> GroupWrapper:
        """The clique; formed by the number of ranks on a node if the ranks were not placed."""
        if self._group is None:
            self._agree_on_parameters()
            self._form_by_numbers(default_replication_jump() if self._jump is None else self._jump)
            assert self._group is not None
        return self._group

    @property
    def coordinator(self) -> Ranks:
        """For messages within the clique."""
        ranks = self.group.ranks
        assert self._coordinator is not None, f"ranks {ranks} are a group without a coordinator"
        return self._coordinator

    @property
    def has_devices(self) -> bool:
        """True if members can send to each other from GPU to GPU."""
        return (self._group or GroupWrapper()).supports("cuda")

    def place(self, domains: Sequence[str]) -> None:
        """Form the cliques, or check them; see :meth:`ReplicationStrategy.place`."""
        numbers: dict[str, int] = {}
        nodes = [numbers.setdefault(domain, len(numbers)) for domain in domains]
        if self._group is None and self._jump is None:
            self._agree_on_parameters()
            self._form(self._place(domains, self._outer))
            self._placed_on = nodes
        cliques = self.cliques()
        if sorted(rank for clique in cliques for rank in clique) != list(range(len(domains))):
            raise MismatchError(
                f"the cliques {cliques} are not those of the {len(domains)} ranks of the manager: "
                f"give the strategy and the manager the same process_group"
            )
        # Managers may share a strategy, and the stores of one lie where the other's do not.
        if nodes != self._placed_on:
            check_failure_domains(cliques, domains)
        apart = self._outer or domains
        self.keepers = {
            owner: keepers
            for clique in cliques
            for owner, keepers in keepers_in(clique, apart).items()
        }
        members = self._everyone().global_ranks
        places = {members[place]: place for place in range(len(members))}
        self.keepers_here = {
            owner: [members[place] for place in self.keepers[places[owner]]]
            for owner in self.group.ranks
        }

    def cliques(self) -> list[list[int]]:
        """Return all cliques of the job, as places among its ranks; all ranks call it together."""
        if self._cliques is None:
            # Explicit groups are known to their members only; all ranks must come to one answer.
            everyone = self._everyone()
            self._cliques = everyone.decide(
                "compare cliques",
                lambda: self.group.ranks,
                lambda cliques: _places(cliques, everyone.global_ranks),
                read=shaped([[int]]),
            )
        return self._cliques

    def begin_anew(self, timeout_s: float) -> None:
        """Count what the members do from the beginning, with a new coordinator; all ranks call it.

        A member that was left with an error may be some replications behind the others.

        Args:
            timeout_s: Deadline of opening it, in seconds.
        """
        if self._group is not None:
            if self._coordinator is not None:
                self._coordinator.close()
            self._coordinator = Ranks("clique", None, timeout_s, ranks=self._group.ranks)

    def stop_waiting(self) -> None:
        """From now on no member waits for others, nor one that does so in another thread."""
        if self._coordinator is not None:
            self._coordinator.stop_waiting()

    def wait_again(self) -> None:
        """Undo :meth:`stop_waiting`, before the members are called from another thread."""
        if self._coordinator is not None:
            self._coordinator.wait_again()
            self._coordinator.prepare()

    @property
    def in_a_hurry(self) -> bool:
        """True if :meth:`stop_waiting` holds."""
        return self._coordinator is not None and self._coordinator.in_a_hurry

    def close(self) -> None:
        """Destroy the process group that was made here."""
        if self._coordinator is not None:
            self._coordinator.close()
        if not (self.owns_group and dist.is_initialized()):
            return
        self.owns_group = False
        # torch forgets all groups when the default group is destroyed before this.
        with suppress(ValueError):
            dist.destroy_process_group(self.group.group)
        # Its threads end with the last reference.
        self.group.group = None

    def _agree_on_parameters(self) -> None:
        """Compare what the ranks were given; once."""
        if self._agreed:
            return
        mine = [self._parameters, self._failure_domain]
        runs = self._everyone().decide(
            *("agree on cliques", lambda: mine, _judge_parameters), read=shaped([(object, int)])
        )
        self._outer = [domain for domain, count in runs for _ in range(count)] or None
        self._agreed = True

    def _form_by_numbers(self, jump: int) -> None:
        cliques = parse_group_sequence(jump, self._factor, self._everyone().world_size)
        if self._outer is not None:
            check_failure_domains(cliques, self._outer)
        self._form(cliques)

    def _form(self, cliques: list[list[int]]) -> None:
        self._cliques = cliques
        everyone, ranks = GroupWrapper(), self._everyone()
        (mine,) = (clique for clique in cliques if ranks.rank in clique)
        if not (self._on_devices and everyone.supports("cuda")):
            members = [ranks.global_ranks[place] for place in mine]
            self._use(GroupWrapper.of_ranks(members), ranks.timeout_s)
            return
        # torch ends the process when an NCCL operation outlasts its group: ours gives up before.
        group = GroupWrapper.from_list_of_groups(
            cliques,
            timeout_s=2 * ranks.timeout_s + 60,
            backend=_device_backend(everyone.backend),
        )
        self.owns_group = True
        self.group_limit_s = ranks.timeout_s
        self._use(group, ranks.timeout_s)

    def _use(self, group: GroupWrapper, timeout_s: float) -> None:
        if group.world_size == 1:
            logger.warning(
                "the clique of rank %d has no other member: its shard has no replica, and the "
                "nodes lose every checkpoint with the node of this rank",
                group.my_global_rank,
            )
        self._coordinator = Ranks("clique", None, timeout_s, ranks=group.ranks)
        self.keepers_here = {
            owner: [rank for rank in group.ranks if rank != owner] for owner in group.ranks
        }
        self._group = group


def _judge_parameters(reports: Sequence[Sequence[str | None]]) -> list[tuple[str, int]]:
    """Check the parameters of the ranks; return their failure domains, if given, in runs.

    Args:
        reports: For each rank its parameters, in words, and its failure domain.
    """
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


def _device_backend(config: str) -> str:
    """Return the backend that sends CUDA memory."""
    return dict(entry.split(":", 1) for entry in config.split(","))["cuda"]
