"""Transfer of shards, by a plan, from the ranks that hold them to those that lack them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from localckpt.errors import CheckpointingException, CorruptShardError, StorageError
from localckpt.ids import CkptID
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.replication.exchange import ExchangePlan
from localckpt.replication.transport import Transport, connect
from localckpt.state_dict.source import ShardSource, views_last
from localckpt.storage.write import Place, StagedImage

# What a rank does from its connecting to the end of its exchange has two.
_DEADLINES = 2


def carry_out(
    everyone: Ranks,
    plan: ExchangePlan[CkptID],
    open_source: Callable[[CkptID], ShardSource],
    accept: Callable[[CkptID, int], Place],
    timeout_s: float,
    transport: Transport | None = None,
    limited_s: float = 0.0,
) -> list[CkptID]:
    """Transfer the shards of a plan; see :meth:`ReplicationStrategy.retrieve_image`.

    ``limited_s`` is the longest that a rate limit of the transports makes any rank take.
    """
    if not plan.transfers:
        return []
    rank = everyone.rank
    with ExitStack() as opened:
        sources: dict[CkptID, ShardSource] = {}
        with Attempt() as opening:
            for id_ in dict.fromkeys(entry.id_ for entry in plan.sends(rank)):
                sources[id_] = open_source(id_)
                opened.callback(sources[id_].close)
        sizes = [sources[e.id_].nbytes for e in plan.sends(rank)] if opening.succeeded else []
        name, coming = everyone.decide(
            "open shards for other ranks",
            opening.of(sizes),
            partial(_judge_offers, plan),
            deadline=Deadline.after(timeout_s),
            read=shaped((str, list | None)),
        )
        views: list[tuple[int, Place]] = []
        with Attempt() as accepting:
            for entry, nbytes in zip(plan.receives(rank), coming or (), strict=True):
                view = as_asked(accept(entry.id_, nbytes), nbytes, entry.id_)
                views.append((entry.sender, view))
        deadline = Deadline.after(timeout_s)
        everyone.decide("make room for shards of other ranks", accepting, deadline=deadline)
        with Attempt() as exchanging:
            if transport is None:
                transport = connect(name, plan.peers(rank), rank, timeout_s, in_pairs=True)
                opened.callback(transport.close)
            # Senders of many start with different receivers.
            world = everyone.world_size
            sends = sorted(plan.sends(rank), key=lambda e: (e.receiver - rank) % world)
            outgoing = [(entry.receiver, sources[entry.id_]) for entry in sends]
            transport.exchange(outgoing, views, timeout_s)
        # Others may be in the middle of theirs, and go on together with this rank.
        everyone.decide(
            "bring shards to the ranks that lack them",
            exchanging,
            grace_s=timeout_s,
            deadline=Deadline.after((1 + _DEADLINES) * timeout_s + limited_s),
        )
    return [entry.id_ for entry in plan.receives(rank)]


def _judge_offers(plan: ExchangePlan[Any], sizes: Sequence[Sequence[int]]) -> PerRank:
    """Judge a name for connections, and for each rank the sizes that it receives, in order."""
    offered = {
        (entry.receiver, entry.id_): nbytes
        for sender, of_sender in enumerate(sizes)
        for entry, nbytes in zip(plan.sends(sender), of_sender, strict=True)
    }
    receivers = dict.fromkeys(entry.receiver for entry in plan.transfers)
    coming = {
        rank: [offered[rank, entry.id_] for entry in plan.receives(rank)] for rank in receivers
    }
    return PerRank(new_name(), coming)


def as_asked(view: Place, nbytes: int, id_: object) -> Place:
    """Return the memory that ``accept`` gave, as bytes; refuse memory that does not fit."""
    if isinstance(view, StagedImage):
        return view
    if view.nbytes != nbytes or view.readonly:
        raise CheckpointingException(
            f"the memory for shard {id_} must be writable and have {nbytes} bytes, "
            f"not {view.nbytes}"
        )
    return view.cast("B")


def new_name() -> str:
    return uuid.uuid4().hex


class WatchedSource:
    """Source of another source's bytes for peers, which closes it; ``refused`` its last error."""

    threads = 1

    def __init__(
        self, source: ShardSource, on_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self._source, self._on_read = source, on_read
        self.nbytes, self.views_last = source.nbytes, views_last(source)
        self.read_into, self.close = source.read_into, source.close
        self.refused: StorageError | CorruptShardError | None = None

    def read(self, start: int, stop: int) -> memoryview:
        self._on_read(stop - start)
        try:
            return self._source.read(start, stop)
        except (StorageError, CorruptShardError) as error:
            self.refused = error
            raise
