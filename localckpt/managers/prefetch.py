"""Prefetches on the side of the job: complete checkpoints sent to spares, behind training.

All ranks begin them as a save ends, by its verdict. No save waits for a spare, nor fails by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from itertools import chain
from math import inf

from localckpt.availability.inventory import ranks_by_node
from localckpt.availability.prefetch import Prefetch, SpareRecord
from localckpt.errors import CheckpointingException
from localckpt.events.event import Outcome
from localckpt.failure_texts import described, ranks_named, short
from localckpt.ids import Checkpoint
from localckpt.managers.context import Context
from localckpt.ranks.failure import forget_frames
from localckpt.ranks.job_store import common_store
from localckpt.replication.spares import Order, Push, SpareRegistry
from localckpt.state_dict.source import ShardSource
from localckpt.threads import Task

logger = logging.getLogger(__name__)


class Prefetches:
    """Shards that one manager sends to spares; at most one checkpoint to each at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._registry: SpareRegistry | None = None
        if context.images is not None and (store := common_store()) is not None:
            self._registry = SpareRegistry(store, context.session_id)
        self._under_way: list[tuple[Push, Task[None]]] = []
        self._warned: set[str] = set()

    def look(self) -> tuple[SpareRecord, ...]:
        """Return the spares that wait for shards, on the first rank, with the job's rate limit."""
        if self._registry is None or not self._context.ranks.is_root:
            return ()
        limit = self._context.strategy.rate_limit or inf
        try:
            return tuple(
                spare._replace(rate_limit=min(limit, spare.rate_limit))
                for spare in self._registry.waiting()
            )
        except CheckpointingException as error:
            self._warn("store", f"spares are not looked for: {described(error)}")
            return ()

    def places(self) -> tuple[int, ...]:
        """Return for each rank the number of its node, in the order of the nodes' first ranks."""
        nodes = self._context.nodes
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        return tuple(numbers[node] for node in nodes)

    def begin(self, checkpoint: Checkpoint, planned: Sequence[Prefetch]) -> None:
        """Begin to send a complete checkpoint; all ranks call it, and it waits for nothing.

        What is under way to the same spares, or of a checkpoint that is kept no more, is ended.
        """
        kept, spares = self._context.checkpoints.complete, {plan.spare for plan in planned}
        for push, _ in (under_way := self._under_way):
            if push.spare in spares or push.order.checkpoint not in kept:
                push.abort()
        self._under_way = [(push, task) for push, task in under_way if not task.done()]
        ranks_on = [*ranks_by_node(self._context.nodes).values()]
        for plan in planned:
            runs = (ranks_on[first : last + 1] for first, last in plan.nodes)
            nodes = tuple(map(tuple, chain.from_iterable(runs)))
            mine = next((node for node in nodes if node[0] == self._context.ranks.rank), ())
            if self._registry is None or not (mine or self._context.ranks.is_root):
                continue
            # The same on all ranks, and of this save alone.
            name = sha256(f"{plan.spare}/{checkpoint.generation!r}".encode()).hexdigest()[:16]
            order = Order(name, checkpoint, plan.rate_limit, nodes)
            push = Push(self._registry, order, plan.spare, self._context.ranks.timeout_s)
            task = Task(partial(self._send, push, plan.host, mine))
            try:
                task.start("localckpt-prefetch", daemon=False)
            except RuntimeError as error:
                self._warn(plan.spare, f"a spare gets nothing now: {error}")
            else:
                self._under_way.append((push, task))

    def abort(self) -> None:
        """End what is under way, from any thread."""
        for push, _ in tuple(self._under_way):
            push.abort()

    def close(self) -> None:
        """Abort what is under way, and wait until nothing of it runs here."""
        self.abort()
        for _, task in self._under_way:
            if not task.wait(self._context.ranks.timeout_s):
                raise CheckpointingException(
                    "sending shards to a spare has not ended: is the disk of this node stuck?"
                )
        self._under_way = []

    def _send(self, push: Push, host: str, ranks: Sequence[int]) -> None:
        checkpoint, began = push.order.checkpoint, time.monotonic()
        emit = partial(self._context.events.emit, "prefetched", step=checkpoint.iteration)

        def open_source(rank: int) -> ShardSource:
            return self._context.store.open(checkpoint.shard(rank, self._context.session_id))

        try:
            if self._context.ranks.is_root:
                push.give()
            if not (ranks and (nbytes := push.send(ranks, open_source))):
                return
            emit(began=began, nbytes=nbytes, details={"spare": host})
            logger.info(
                "iteration %d: sent the shards of %s to the spare on %s, %d bytes in %.3f s",
                *(checkpoint.iteration, ranks_named(ranks), host, nbytes),
                time.monotonic() - began,
            )
        except Exception as error:  # noqa: BLE001 - the next save tries again
            forget_frames(error)
            why = described(error)
            outcome: Outcome = "stopped" if push.is_aborted else "failed"
            emit(began=began, outcome=outcome, details={"spare": host, "error": short(why)})
            self._warn(
                "" if push.is_aborted else push.spare,
                f"iteration {checkpoint.iteration} is not on the spare on {host}: {why}",
            )

    def _warn(self, spare: str, text: str) -> None:
        """Log a failure, the first one with a spare as a warning; nothing else depends on it."""
        is_first = bool(spare) and spare not in self._warned
        self._warned.add(spare)
        logger.log(logging.WARNING if is_first else logging.INFO, "%s", text)
