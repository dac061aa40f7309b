"""Decisions of hundreds of simulated ranks over one store: time, and operations of the store.

Each simulated rank is a thread with a connection of its own to one real TCPStore, which the parent
serves, and runs the code that a rank of a job runs. Beside it, what it costs when each rank reads
what every other rank says.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from benchmarks.report import Report
from benchmarks.setup import Options
from localckpt.ranks.job_store import Group
from localckpt.ranks.ranks import Ranks

__all__ = ["measure"]

_WORLDS = (64, 256)
_TIMEOUT_S = 600.0
_RANKS_A_PROCESS = 256
_STACK_NBYTES = 256 << 10
_GOAL_OPERATIONS = 12.0
# As long as what a rank says of a save.
_RECORD = {"iteration": 10**6, "generation": [12, 2**60, 2**31], "missing": [], "kept": [17]}
_DECIDE, _GATHER, _READ = "decide", "gather", "read all"


@dataclass(slots=True)
class _Store:
    """A store that counts what it is asked; a get asks twice, since it first waits for the key."""

    store: Any
    operations: int = 0
    asked: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            self.operations += 2 if name in ("get", "multi_get") else name != "has_extended_api"
            return method(*args)

        return counted


def measure(options: Options) -> Report:
    """Medians over the rounds, for each world."""
    report = Report("control")
    for world in _WORLDS:
        samples = _simulate(world, options.rounds)
        for what, taken in samples.items():
            seconds = median(s for s, _ in taken)
            operations = median(o for _, o in taken)
            goal = _GOAL_OPERATIONS if what == _DECIDE else None
            report.fact(f"{world} ranks: {what}", seconds * 1e3, "ms")
            report.fact(
                f"{world} ranks: {what}", operations, "store operations a rank", target=goal
            )
    return report


def _simulate(world: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    workers = max(1, world // _RANKS_A_PROCESS)
    pipes, processes = [], []
    for number in range(workers):
        ours, theirs = context.Pipe()
        ranks = range(number, world, workers)
        process = context.Process(
            target=_run_ranks, args=(theirs, store.port, ranks, world, rounds), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    told: list[dict[str, list[list[tuple[float, float, int]]]]] = []
    for pipe in pipes:
        if not pipe.poll(_TIMEOUT_S):
            raise TimeoutError(f"{world} simulated ranks have not ended after {_TIMEOUT_S:g} s")
        told.append(pipe.recv())
    for process in processes:
        process.join(_TIMEOUT_S)
    samples: dict[str, list[tuple[float, float]]] = {}
    for what in told[0]:
        for number in range(rounds):
            parts = [part for worker in told for part in worker[what][number]]
            took_s = max(end for _, end, _ in parts) - max(begin for begin, _, _ in parts)
            samples.setdefault(what, []).append((took_s, sum(o for *_, o in parts) / world))
    return samples


def _run_ranks(pipe: Connection, port: int, ranks: range, world: int, rounds: int) -> None:
    threading.stack_size(_STACK_NBYTES)
    results: dict[str, list[list[tuple[float, float, int]]]] = {}
    lock = threading.Lock()

    def note(what: str, number: int, sample: tuple[float, float, int]) -> None:
        with lock:
            taken = results.setdefault(what, [[] for _ in range(rounds)])
            taken[number].append(sample)

    # To copy a client takes far less time than to make one.
    client: Any = TCPStore(
        *("127.0.0.1", port, None, False), timedelta(seconds=_TIMEOUT_S), wait_for_workers=False
    )
    threads = [
        threading.Thread(target=_run_rank, args=(rank, client.clone(), world, rounds, note))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    pipe.send(results)


def _run_rank(
    rank: int,
    store: Store,
    world: int,
    rounds: int,
    note: Callable[[str, int, tuple[float, float, int]], None],
) -> None:
    ranks = Ranks("control", timeout_s=_TIMEOUT_S, group=Group(rank, tuple(range(world)), store))
    ranks.barrier("begin")
    part = ranks._part
    counts = [_Store(part._store), _Store(part._waiter)]
    part._store = counts[0]  # type: ignore[assignment]
    part._waiter = counts[1] if part._waiter is not None else None  # type: ignore[assignment]
    calls: dict[str, Callable[[int], object]] = {
        _DECIDE: lambda _: ranks.decide("finalize", lambda: _RECORD, _agree),
        _GATHER: lambda _: ranks.gather("find", _RECORD),
        _READ: lambda number: _read_all(counts[0], rank, world, number),
    }
    for number in range(rounds):
        for what, call in calls.items():
            ranks.barrier("all begin together")
            before, began = sum(c.operations for c in counts), time.monotonic()
            call(number)
            ended = time.monotonic()
            note(what, number, (began, ended, sum(c.operations for c in counts) - before))
    ranks.barrier("end")


def _agree(records: list[Any]) -> list[Any]:
    return [len(records), all(record == _RECORD for record in records)]


def _read_all(store: Any, rank: int, world: int, number: int) -> list[Any]:
    """All ranks read what each says, as it was done before."""
    store.set(f"all/{number}/{rank}", json.dumps(_RECORD))
    store.add(f"all/{number}", 1)
    nap_s = 0.0002
    while store.add(f"all/{number}", 0) < world:
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, 0.02)
    values = store.multi_get([f"all/{number}/{other}" for other in range(world)])
    # A message with so many keys is as many operations.
    store.operations += world - 2
    return [json.loads(value) for value in values]
