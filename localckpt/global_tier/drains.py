"""Queue of the drains of one manager, which follow each other behind training."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from localckpt.errors import CheckpointingException
from localckpt.events.stream import EventStream
from localckpt.global_tier.drain import Drain
from localckpt.global_tier.root import CheckpointRoot
from localckpt.ids import ShardIdentity
from localckpt.ranks.ranks import Ranks
from localckpt.storage.kept_shard import KeptShard
from localckpt.threads import SerialThread

__all__ = ["Drains"]

logger = logging.getLogger(__name__)


class Drains:
    """Drains of one manager, carried out one after another; all ranks begin the same ones.

    Args:
        ranks: The ranks of the job; used by nobody else.
        root: The checkpoints.
        safe_globals: As for :class:`Drain`.
        events: Is told of each drain.
    """

    def __init__(
        self,
        ranks: Ranks,
        root: CheckpointRoot,
        safe_globals: Iterable[Any],
        events: EventStream,
    ) -> None:
        self._ranks = ranks
        self._root = root
        self._safe_globals = tuple(safe_globals)
        self._events = events
        self._thread = SerialThread("localckpt-drain")
        self._process = os.getpid()
        self._begun = 0
        self._under_way: list[Drain] = []

    def begin(self, shard: KeptShard, rate_limit: float | None) -> Drain:
        """Begin a drain, or put it behind those that are not over.

        Raises:
            CheckpointingException: The shard is another rank's; or there is no such rate; or no
                thread can be had.
        """
        self._check(shard.identity, rate_limit)
        self._ranks.prepare()
        self._under_way = [drain for drain in self._under_way if not drain.task.done()]
        drain = Drain(
            *(shard, self._begun, rate_limit, self._ranks, self._root, self._safe_globals),
            events=self._events,
        )
        self._begun += 1
        self._under_way.append(drain)
        try:
            self._thread.submit(drain.task)
        except RuntimeError as error:
            drain.stop()
            raise CheckpointingException(
                f"this process cannot start a thread ({error}): nothing was drained"
            ) from error
        return drain

    def _check(self, identity: ShardIdentity, rate_limit: float | None) -> None:
        ranks = self._ranks
        if (identity.rank, identity.world_size) != (ranks.rank, ranks.world_size):
            raise CheckpointingException(
                f"the manager of the nodes is rank {identity.rank} of {identity.world_size}, and "
                f"the one of shared storage rank {ranks.rank} of {ranks.world_size}: make both "
                f"with the same process_group. Nothing was drained"
            )
        if rate_limit is not None and rate_limit <= 0:
            raise CheckpointingException(
                f"rate_limit is {rate_limit}; it must be above 0 bytes a second, or None"
            )

    def close(self, *, is_in_step: bool) -> None:
        """End what is under way, and free everything. May be called twice.

        Args:
            is_in_step: Whether the other ranks close theirs, too.
        """
        if os.getpid() != self._process:
            return
        for drain in self._under_way:
            if not drain.task.done():
                logger.error("the drain of iteration %d is ended by close()", drain.iteration)
                drain.stop()
        # Whatever ends a drain is looked at before each piece that it writes.
        until = time.monotonic() + self._ranks.timeout_s
        if all(drain.task.wait(until - time.monotonic()) for drain in self._under_way):
            self._thread.close()
        else:
            logger.error("a drain does not end: is %s stuck?", self._root.path)
        self._under_way = []
        if is_in_step:
            self._ranks.close()
        else:
            self._ranks.abandon()
