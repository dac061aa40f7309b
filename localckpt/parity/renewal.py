"""Parity of a loaded checkpoint that groups lack, computed again behind training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from localckpt.ids import Group, ShardIdentity
from localckpt.parity.encode import encode
from localckpt.parity.image import ParityFrame, ParityOf
from localckpt.parity.pipeline import Pipeline
from localckpt.parity.stripes import PARITY_KIND
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import PerRank, Ranks, shaped, to_all
from localckpt.replication.redundancy import Keeper
from localckpt.replication.transport import Transport, connect
from localckpt.state_dict.source import ShardSource
from localckpt.storage.store import Slot


class ParityRenewal:
    """See :class:`localckpt.replication.redundancy.Renewal`."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._ring: Transport | None = None

    def __str__(self) -> str:
        return f"{len(self._groups)} groups lack parity"

    def connect(self, name: str, ranks: Ranks, rate_limit: float | None) -> None:
        if (group := self._group_of(ranks.rank)) is not None:
            self._ring = connect(
                *(f"{name}/{group.ranks[0]}", group.ranks, ranks.rank, ranks.timeout_s),
                rate_limit=rate_limit,
                is_given_up=lambda: ranks.is_aborted,
            )

    def make(self, keeper: Keeper) -> list[str]:
        ranks, rank = keeper.ranks, keeper.ranks.rank
        group, iteration = self._group_of(rank), keeper.checkpoint.iteration
        identity = keeper.identity(rank)
        with ExitStack() as opened:
            source: ShardSource | None = None
            nbytes = 0
            with Attempt() as opening:
                if group is not None:
                    source = keeper.open(identity)
                    opened.callback(source.close)
                    nbytes = source.nbytes
            phase = f"see whether parity of iteration {iteration} can be made"
            judge = partial(_judge_opened, self._groups)
            refusals, members = ranks.decide(
                phase, lambda: [opening.error_text, nbytes], judge, read=shaped((list, object))
            )
            unable = dict(refusals)
            # Members of a group to which one has nothing to add do not begin.
            able = [g for g in self._groups if unable.keys().isdisjoint(g.ranks)]
            with Attempt() as encoding:
                if group in able and group is not None and source is not None:
                    of = ParityOf(group, tuple(members))
                    keeper.commit([self._encode(keeper, identity, of, source)])
        phase = f"make parity of iteration {iteration}"
        failed = ranks.decide(phase, lambda: encoding.error_text, **to_all(str))
        for done in able:
            for owner in done.ranks:
                if owner not in failed:
                    node = keeper.inventory.node_of(owner)
                    keeper.inventory.add_piece(keeper.checkpoint, owner, node, done)
        return [*unable.values(), *failed.values()]

    def _encode(
        self, keeper: Keeper, identity: ShardIdentity, of: ParityOf, source: ShardSource
    ) -> Slot:
        assert self._ring is not None, "the members are connected before this begins"
        try:
            frame = ParityFrame.of(identity, of)
            slot = keeper.reserve(identity.of_kind(PARITY_KIND), frame.nbytes)
            parity = frame.put(slot.image)
            encode(of.layout, Pipeline(self._ring), source, parity, keeper.ranks.timeout_s)
        except BaseException:
            # The other members are not to wait for this one until their deadline.
            self._ring.abort()
            raise
        return slot

    def abort(self) -> None:
        if self._ring is not None:
            self._ring.abort()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()

    def _group_of(self, rank: int) -> Group | None:
        return next((group for group in self._groups if rank in group.ranks), None)


def _judge_opened(groups: Sequence[Group], reports: Sequence[Any]) -> PerRank:
    """Judge which ranks can encode: those that cannot, and for each member its group's sizes."""
    unable = [[rank, text] for rank, (text, _) in enumerate(reports) if text]
    sizes = {group: [reports[member][1] for member in group.ranks] for group in groups}
    return PerRank(unable, {rank: sizes[group] for group in groups for rank in group.ranks})
