"""Ranks of one job in one process: each is a thread with connections of its own to a real store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks.stores import CountingStore, serve_store
from localckpt.errors import CheckpointingException
from localckpt.ranks.job_store import Members
from localckpt.ranks.ranks import Ranks
from localckpt.threads import Task

PATIENCE_S = 120.0


@contextmanager
def many(world_size: int, timeout_s: float, *, waits_on_clients: bool = False) -> Iterator[World]:
    """A world of many threads, whose stacks are small."""
    before = threading.stack_size(512 << 10)
    try:
        world = World(world_size, timeout_s)
        if waits_on_clients:
            world.wait_on_clients()
        yield world
    finally:
        threading.stack_size(before)


class World:
    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._server = serve_store()
        # To copy a client takes less time than to make one.
        self._client = TCPStore(
            *("127.0.0.1", self._server.port, None, False),
            timedelta(seconds=PATIENCE_S),
            wait_for_workers=False,
        )
        members = tuple(range(world_size))

        def join(rank: int) -> Ranks:
            group = Members(rank, members, self._client.clone())
            ranks = Ranks("many", timeout_s=PATIENCE_S, group=group)
            gather(ranks, "begin", None)
            ranks.timeout_s = timeout_s
            return ranks

        self.ranks = together([lambda rank=rank: join(rank) for rank in members])
        self.counts = [CountingStore.count(ranks) for ranks in self.ranks]

    def set_timeout(self, timeout_s: float) -> None:
        for ranks in self.ranks:
            ranks.timeout_s = timeout_s

    def all_do(self, act: Callable[[Ranks], Any], without: tuple[int, ...] = ()) -> dict[int, Any]:
        """What each rank returns or raises, by rank."""
        acting = [ranks for ranks in self.ranks if ranks.rank not in without]
        outcomes = together([lambda ranks=ranks: outcome_of(ranks, act) for ranks in acting])
        return {ranks.rank: out for ranks, out in zip(acting, outcomes, strict=True)}

    def wait_on_clients(self) -> None:
        """Have the ranks wait on connections kept for that, as in large worlds."""

        def connect(ranks: Ranks) -> None:
            part: Any = ranks._part
            part.is_large, part._clients = True, [CountingStore(part._own_client())]

        self.all_do(connect)
        for ranks, counts in zip(self.ranks, self.counts, strict=True):
            part: Any = ranks._part
            counts += part._clients

    def operations(self) -> list[int]:
        """How often each rank has asked the store."""
        return [sum(store.operations for store in counts) for counts in self.counts]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    tasks = [Task(call) for call in calls]
    for task in tasks:
        task.start("simulated rank", daemon=True)
    return [task.result(PATIENCE_S) for task in tasks]


def outcome_of(ranks: Ranks, act: Callable[[Ranks], Any]) -> Any:
    try:
        return act(ranks)
    except CheckpointingException as error:
        return error


def gather(ranks: Ranks, what: str, record: Any, **options: Any) -> list[Any]:
    return ranks.decide(what, lambda: record, list, **options)
