"""Rendezvous of a job's ranks, which begin an epoch that no node has seen."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from localckpt.availability.coverage import JoinRecord, judge_join
from localckpt.availability.inventory import ranks_by_node
from localckpt.failure_texts import ranges
from localckpt.ids import SAVES_AN_ATTEMPT, Generation
from localckpt.ranks.deadline import answered
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.header import DIVIDED_VERSION
from localckpt.storage.store import Store

__all__ = ["RENDEZVOUS", "join"]

RENDEZVOUS = "join the job"
"""The phase of :func:`join`, in error messages."""

# Sequence numbers stay below 2**60, so that they fit wherever integers go.
_DRAWS = 2**32


def join(
    ranks: Ranks,
    store: Store,
    strategy: ReplicationStrategy,
    session_id: str,
    *,
    is_elastic: bool = False,
) -> tuple[list[str], Generation]:
    """Check that all ranks belong together, and begin a new attempt; all ranks call it.

    Args:
        ranks: The ranks of the job.
        store: Notes the epoch on this node.
        strategy: Learns the nodes of the ranks.
        session_id: The training run.
        is_elastic: Whether this rank loads what another number of ranks saved.

    Returns:
        For each rank the name of its node, and the generation from which this attempt counts its
        saves.

    Raises:
        MismatchError: The ranks do not belong together.
        SameMachineReplicationException: Replicas would be lost together with their originals.
        CheckpointingException: Some node cannot be read, or cannot note the epoch; on all ranks.
        PeerLostError: A rank did not answer in time.
    """
    mine = None
    with Attempt() as looking:
        epochs = [s.record.identity.generation.epoch for s in store.list_stored() if s.record]
        mine = JoinRecord(
            session_id,
            ranks.world_size,
            DIVIDED_VERSION,
            store.domain,
            max([store.claim.newest_epoch(), *epochs]),
            store.claim.owner,
            secrets.randbelow(_DRAWS),
            is_elastic,
        ).to_json()
    (epoch, draw, runs), owners = ranks.agree(
        *(RENDEZVOUS, looking, mine, _judge_join), read=shaped(((int, int, [(int, int)]), list))
    )
    nodes = _node_names([number for number, count in runs for _ in range(count)])
    strategy.place(nodes, ranks.timeout_s)
    # Every node notes the epoch before anything is saved in it. Else an attempt of which only some
    # nodes keep a shard could share its number with the next, which does not see those nodes; and
    # shards of both would pass for one checkpoint later.
    with Attempt() as noting:
        begin = partial(store.claim.begin_epoch, epoch, owners, ranks.timeout_s)
        answered("begin an attempt in", "this node's store", ranks.timeout_s, begin)
    ranks.agree("begin a new attempt", noting)
    # Attempts on nodes that have none in common know nothing of each other and come to the same
    # epoch; the numbers of their saves must differ, or their shards could pass for one checkpoint.
    return nodes, Generation(epoch, draw * SAVES_AN_ATTEMPT)


def _judge_join(reports: Sequence[Any]) -> PerRank:
    """Judge the epoch, its draw and the nodes of all ranks; and for each rank the owners there."""
    records = [JoinRecord(*fields) for fields in reports]
    judge_join(records)
    ranks_on = ranks_by_node([record.failure_domain for record in records])
    owners = {
        rank: [records[other].owner for other in together]
        for together in ranks_on.values()
        for rank in together
    }
    numbers = {domain: number for number, domain in enumerate(ranks_on)}
    in_order = (numbers[record.failure_domain] for record in records)
    # Ranks of a node mostly have numbers in a row, so this is short.
    runs = [[number, len(list(run))] for number, run in groupby(in_order)]
    epoch = 1 + max(record.newest_epoch for record in records)
    return PerRank([epoch, records[0].draw, runs], owners)


def _node_names(numbers: Sequence[int]) -> list[str]:
    """Name the node of each rank by the ranks there."""
    names = {
        number: f"the node of rank{'s'[: len(ranks) > 1]} {ranges(ranks)}"
        for number, ranks in ranks_by_node(numbers).items()
    }
    return [names[number] for number in numbers]
