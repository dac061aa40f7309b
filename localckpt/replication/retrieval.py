"""Carries out a plan: shards go from the ranks that hold them to those that lack them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any, TypeVar

from localckpt.errors import CheckpointingException
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.exchange import ExchangePlan
from localckpt.replication.transport import HostTransport
from localckpt.state_dict.source import ShardSource

__all__ = ["as_asked", "carry_out", "new_name", "ranks_of"]

IdT = TypeVar("IdT", bound=Hashable)

# What a rank does from its connecting to the end of its exchange has two.
_DEADLINES = 2


def carry_out(
    everyone: Ranks,
    plan: ExchangePlan[IdT],
    open_source: Callable[[IdT], ShardSource],
    accept: Callable[[IdT, int], memoryview],
    timeout_s: float,
    transport: HostTransport | None = None,
) -> list[IdT]:
    """Move what a plan moves; see :meth:`ReplicationStrategy.retrieve_image`.

    Args:
        everyone: The ranks that call it together.
        timeout_s: Deadline of connecting, and of the exchange, in seconds.
        transport: Connections among the ranks that take part, which stay the caller's; ``None`` for
            new ones.
    """
    if not plan.transfers:
        return []
    rank = everyone.rank
    with ExitStack() as opened:
        sources: dict[IdT, ShardSource] = {}
        with Attempt() as opening:
            for id_ in dict.fromkeys(entry.id_ for entry in plan.sends(rank)):
                sources[id_] = open_source(id_)
                opened.callback(sources[id_].close)
        sizes = [sources[e.id_].nbytes for e in plan.sends(rank)] if opening.succeeded else []
        offers = everyone.share("open shards for other ranks", opening, [sizes, new_name()])
        views: list[tuple[int, memoryview]] = []
        with Attempt() as accepting:
            announced = {sender: iter(sizes) for sender, (sizes, _) in enumerate(offers)}
            for entry in plan.transfers:
                nbytes = next(announced[entry.sender])
                if entry.receiver == rank:
                    view = as_asked(accept(entry.id_, nbytes), nbytes, entry.id_)
                    views.append((entry.sender, view))
        everyone.settle("make room for shards of other ranks", accepting)
        with Attempt() as exchanging:
            ranks = ranks_of(plan)
            if rank in ranks:
                # Senders of many start with different receivers.
                sends = sorted(
                    plan.sends(rank), key=lambda entry: (entry.receiver - rank) % len(offers)
                )
                if transport is None:
                    transport = HostTransport.connect(offers[0][1], ranks, rank, timeout_s)
                    opened.callback(transport.close)
                transport.exchange([(e.receiver, sources[e.id_]) for e in sends], views)
        # Others may be in the middle of theirs, and go on together with this rank.
        everyone.settle(
            "bring shards to the ranks that lack them",
            exchanging,
            grace_s=timeout_s,
            others_s=_DEADLINES * timeout_s,
        )
    return [entry.id_ for entry in plan.receives(rank)]


def ranks_of(plan: ExchangePlan[Any]) -> list[int]:
    """The ranks that send or receive something."""
    return sorted({rank for entry in plan.transfers for rank in (entry.sender, entry.receiver)})


def as_asked(view: memoryview, nbytes: int, id_: object) -> memoryview:
    """What ``accept`` gave, as bytes; refused if it does not fit."""
    if view.nbytes != nbytes or view.readonly:
        raise CheckpointingException(
            f"the memory for shard {id_} must be writable and have {nbytes} bytes, "
            f"not {view.nbytes}"
        )
    return view.cast("B")


def new_name() -> str:
    """A name that no connections of this job have had."""
    return uuid.uuid4().hex
