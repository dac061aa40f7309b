"""How the ranks of a job meet, and tell each other what their nodes hold."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from localckpt.ids import SAVES_AN_ATTEMPT, Generation
from localckpt.managers.coverage import JoinRecord, judge_join
from localckpt.managers.explanation import Explanation, explain, ranges
from localckpt.managers.holdings import Holdings, ranks_by_node, tell
from localckpt.managers.shelf import Shelf
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.header import FORMAT_VERSION

__all__ = ["JOINING", "gather_explanation", "gather_holdings", "join", "node_labels"]

JOINING = "join the job"
"""The phase in which the ranks meet; see :func:`join`."""

# Sequence numbers stay below 2**60, so that they fit wherever integers go.
_DRAWS = 2**32


def join(
    coordinator: Ranks, shelf: Shelf, strategy: ReplicationStrategy, session_id: str
) -> tuple[list[str], Generation]:
    """Check that all ranks belong together, and begin a new attempt; all ranks call it.

    Returns:
        Each rank's failure domain, and the generation from which this attempt counts its saves.

    Raises:
        MismatchError: The ranks do not belong together.
        SameMachineReplicationException: Replicas would be lost together with their originals.
        CheckpointingException: Some node cannot be read, or cannot note the epoch; on all ranks.
        PeerLostError: A rank did not answer in time.
    """
    mine = None
    with Attempt() as looking:
        mine = JoinRecord(
            session_id,
            coordinator.world_size,
            FORMAT_VERSION,
            shelf.failure_domain,
            shelf.newest_epoch(),
            shelf.owner,
            secrets.randbelow(_DRAWS),
        ).to_json()
    gathered = coordinator.share(JOINING, looking, mine)
    records = [JoinRecord(*fields) for fields in gathered]
    judge_join(records)
    domains = [record.failure_domain for record in records]
    strategy.take_domains(domains)
    epoch = 1 + max(record.newest_epoch for record in records)
    # Every node notes the epoch before anything is saved in it. Else an attempt of which only some
    # nodes keep a shard could share its number with the next, which does not see those nodes; and
    # shards of both would pass for one checkpoint later.
    with Attempt() as noting:
        shelf.begin_epoch(epoch, [record.owner for record in records])
    coordinator.settle("begin a new attempt", noting)
    # Attempts on nodes that have none in common know nothing of each other and come to the same
    # epoch; the numbers of their saves must differ, or their shards could pass for one checkpoint.
    return domains, Generation(epoch, records[0].draw * SAVES_AN_ATTEMPT)


def gather_explanation(coordinator: Ranks, shelf: Shelf, domains: Sequence[str]) -> Explanation:
    """What all nodes have, and what a restart makes of it; all ranks call it, and get the same.

    Raises:
        MismatchError: What some rank tells cannot be understood; on all ranks.
        CheckpointingException: Some node cannot be read; on all ranks.
        PeerLostError: A rank did not answer in time.
    """
    holdings = gather_holdings(coordinator, shelf, node_labels(domains))
    bad: list[str] = []
    with Attempt() as looking:
        if _speaks(coordinator, holdings):
            bad = shelf.bad_copies()
    gathered = coordinator.share("tell what cannot be used", looking, bad)
    nodes = holdings.ranks_on
    return explain(
        holdings, coordinator.world_size, {node: gathered[holdings.speaker(node)] for node in nodes}
    )


def node_labels(domains: Sequence[str]) -> list[str]:
    """For each rank what its node is called, by the ranks there."""
    labels = {
        domain: f"the node of rank{'s'[: len(ranks) > 1]} {ranges(ranks)}"
        for domain, ranks in ranks_by_node(domains).items()
    }
    return [labels[domain] for domain in domains]


def gather_holdings(coordinator: Ranks, shelf: Shelf, nodes: Sequence[str]) -> Holdings:
    """What each node holds, the same on all ranks; all ranks call it.

    One rank of each node tells the others.

    Args:
        nodes: For each rank the node that it is on, whose store it shares with others there.

    Raises:
        MismatchError: What some rank tells cannot be understood; on all ranks.
        CheckpointingException: Some node cannot be read; on all ranks.
        PeerLostError: A rank did not answer in time.
    """
    holdings = Holdings(ranks_by_node(nodes))
    mine = None
    with Attempt() as looking:
        # On every rank: each is to find the files that it may have to read.
        found = shelf.inventory()
        if _speaks(coordinator, holdings):
            mine = tell(found, shelf.noted_lineages())
    gathered = coordinator.share("find the latest checkpoint", looking, mine)
    for node in holdings.ranks_on:
        holdings.hear(node, gathered[holdings.speaker(node)])
    return holdings


def _speaks(coordinator: Ranks, holdings: Holdings) -> bool:
    return holdings.speaker(holdings.node_of(coordinator.rank)) == coordinator.rank
