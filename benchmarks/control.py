"""Decisions of thousands of simulated ranks over one store: time, and operations of the store.

Each simulated rank is a thread with connections of its own to one real TCPStore, which the parent
serves, and runs the code that a rank of a job runs. Beside it, in small worlds, the time that it
takes when each rank reads the record of every other rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from statistics import median
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from benchmarks.large_worlds import World
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.stores import CountingStore, serve_store
from localckpt.async_save.callers import PendingCall
from localckpt.availability.durability import Found
from localckpt.availability.inventory import Inventory, node_report, ranks_by_node
from localckpt.ranks.job_store import Members
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.watch import Watch, Watched

__all__ = ["measure"]

_WORLDS = (64, 256, 1024, 4096)
# In larger worlds a verdict with the records of all ranks takes gigabytes of messages.
_LARGEST_WITH_ALL = 256
_TIMEOUT_S = 600.0
_RANKS_A_PROCESS = 256
_STACK_NBYTES = 256 << 10
# As long as the record of a save.
_RECORD = {"iteration": 10**6, "generation": [12, 2**60, 2**31], "missing": [], "kept": [17]}
_POLLS = 1000
_BEGIN = "begin"
_DECIDE, _FIND, _AGREE = "finalize", "find_latest", "agree that a call is over"
_POLL = "1,000 polls of one rank"
_GATHER, _READ = "gather", "read all"
_STEPS = (_DECIDE, _FIND, _POLL, _AGREE)
_STEPS_WITH_ALL = (_GATHER, _READ)
# Store operations of a rank.
_GOALS = {_DECIDE: 12.0, _AGREE: 12.0, _POLL: 0.0}
# Of a decision, on two cores that do nothing else.
_GOALS_MS = {(4096, _DECIDE): 1500.0}

_Sample = tuple[float, float, int]
"""The begin and the end of one rank's part, by the monotonic clock, and its store operations."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One step of all ranks.

    Attributes:
        took_s: From the first begin to the last end, in seconds.
        cpu_s: Processor time of all ranks and of the store, in seconds.
        served_s: That of the store, in seconds.
        operations: Of the store, by all ranks.
        most: The most operations of one rank.
        median: The operations of a rank in the middle.
    """

    took_s: float
    cpu_s: float
    served_s: float
    operations: int
    most: int
    median: float


def measure(options: Options) -> Report:
    """Medians over the rounds, for each world."""
    report = Report("control")
    for world in _WORLDS:
        for what, outcomes in _simulate(world, options.rounds).items():
            name = f"{world:,} ranks: {what}"
            cpu_ms = median(outcome.cpu_s for outcome in outcomes) * 1e3
            took_ms = [outcome.took_s * 1e3 for outcome in outcomes]
            note = f"{min(took_ms):.4g} to {max(took_ms):.4g}; processor time {cpu_ms:.4g} ms"
            if operations := sum(outcome.operations for outcome in outcomes):
                served_s = sum(outcome.served_s for outcome in outcomes)
                note += f", of the store {served_s / operations * 1e6:.3g} us an operation"
            report.fact(name, median(took_ms), "ms", note, _GOALS_MS.get((world, what)))
            report.fact(
                name,
                median(outcome.operations for outcome in outcomes) / world,
                "store operations a rank",
                f"of most ranks {median(outcome.median for outcome in outcomes):g}, "
                f"most of one {median(outcome.most for outcome in outcomes):g}",
                _GOALS.get(what),
            )
    return report


def _simulate(world: int, rounds: int) -> dict[str, list[_Outcome]]:
    """For each step, the outcomes of all rounds."""
    store = serve_store()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    workers = max(1, world // _RANKS_A_PROCESS)
    job = World(world)
    reports = {on[0]: node_report(job.records[n]) for n, on in ranks_by_node(job.nodes).items()}
    pipes, processes = [], []
    for number in range(workers):
        ours, theirs = context.Pipe()
        ranks = range(number, world, workers)
        of_process = {rank: reports[rank] for rank in ranks if rank in reports}
        arguments = (theirs, store.port, ranks, world, of_process, job if 0 in ranks else None)
        process = context.Process(target=_run_ranks, args=arguments, daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)

    def step(what: str, number: int) -> _Outcome:
        began_s, cpu_s = time.process_time(), 0.0
        for pipe in pipes:
            pipe.send((what, number))
        samples: list[_Sample] = []
        for pipe in pipes:
            if not pipe.poll(_TIMEOUT_S):
                raise TimeoutError(f"{world} simulated ranks did not {what} in {_TIMEOUT_S:g} s")
            of_process, of_process_s = pipe.recv()
            samples += of_process
            cpu_s += of_process_s
        took_s = max(end for _, end, _ in samples) - min(begin for begin, *_ in samples)
        counts = [count for *_, count in samples]
        served_s = time.process_time() - began_s
        return _Outcome(
            took_s, cpu_s + served_s, served_s, sum(counts), max(counts), median(counts)
        )

    step(_BEGIN, 0)
    results: dict[str, list[_Outcome]] = {}
    for number in range(rounds):
        for what in _STEPS + _STEPS_WITH_ALL * (world <= _LARGEST_WITH_ALL):
            results.setdefault(what, []).append(step(what, number))
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(_TIMEOUT_S)
    return results


def _run_ranks(
    pipe: Connection,
    port: int,
    ranks: range,
    world: int,
    reports: dict[int, list[Any]],
    job: World | None,
) -> None:
    """Carry out the steps that the parent names, each on all of the ranks at once."""
    threading.stack_size(_STACK_NBYTES)
    # Threads of a rank of a real job do not wait for an interpreter; here each that does would wake
    # up 200 times a second.
    sys.setswitchinterval(1.0)
    # A client, too, looks up names of addresses, for log messages only.
    os.environ["RES_OPTIONS"] = "attempts:0"
    # To copy a client takes less time than to make one.
    client: Any = TCPStore(
        *("127.0.0.1", port, None, False), timedelta(seconds=_TIMEOUT_S), wait_for_workers=False
    )
    outcomes: SimpleQueue[_Sample | Exception] = SimpleQueue()
    steps: list[SimpleQueue[tuple[str, int]]] = [SimpleQueue() for _ in ranks]
    for rank, inbox in zip(ranks, steps, strict=True):
        simulated = _SimulatedRank(rank, client.clone(), world, reports.get(rank), job)
        arguments = (simulated, inbox, outcomes)
        threading.Thread(target=_run_rank, args=arguments, daemon=True).start()
    while (step := pipe.recv()) is not None:
        began_s = time.process_time()
        for inbox in steps:
            inbox.put(step)
        samples = []
        for _ in ranks:
            outcome = outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            samples.append(outcome)
        pipe.send((samples, time.process_time() - began_s))


def _run_rank(
    simulated: _SimulatedRank,
    inbox: SimpleQueue[tuple[str, int]],
    outcomes: SimpleQueue[_Sample | Exception],
) -> None:
    try:
        while True:
            what, number = inbox.get()
            before, began = simulated.operations, time.monotonic()
            simulated.do(what, number)
            outcomes.put((began, time.monotonic(), simulated.operations - before))
    except Exception as error:  # noqa: BLE001 - raised by the process
        outcomes.put(error)


class _SimulatedRank:
    """One rank of a job, and how it takes part in each step.

    Args:
        rank: Its number.
        store: Its client.
        world: The number of ranks.
        report: On the first rank of a node, what the node holds.
        job: On the root, the whole job.
    """

    def __init__(
        self, rank: int, store: Store, world: int, report: list[Any] | None, job: World | None
    ) -> None:
        self._rank, self._world, self._report, self._job = rank, world, report, job
        self._counts: list[CountingStore] = []
        self._watched: list[Watched] = []
        self._group = Members(rank, tuple(range(world)), store)
        self._steps: dict[str, Callable[[int], object]] = {
            _BEGIN: lambda _: self._begin(),
            _DECIDE: lambda _: self._ranks.decide("finalize", lambda: _RECORD, _agree),
            _FIND: lambda _: self._ranks.decide("find", lambda: self._report, self._find),
            _POLL: self._poll,
            _AGREE: self._agree,
            _GATHER: lambda _: self._ranks.decide("gather", lambda: _RECORD, list),
            _READ: self._read_all,
        }

    @property
    def operations(self) -> int:
        """Number of the operations that this rank has asked of the store."""
        return sum(count.operations for count in self._counts)

    def do(self, what: str, number: int) -> None:
        self._steps[what](number)

    def _begin(self) -> None:
        self._ranks = Ranks("control", timeout_s=_TIMEOUT_S, group=self._group)
        self._ranks.decide("begin", lambda: None)
        self._counts = CountingStore.count(self._ranks)
        self._watch = Watch(_TIMEOUT_S, ranks=self._ranks)

    def _find(self, reports: list[Any]) -> list[Any]:
        """The root's part of ``find_latest``."""
        assert self._job is not None
        inventory = Inventory(ranks_by_node(self._job.nodes))
        inventory.merge_all(reports)
        found = Found.among(inventory, self._job.protection())
        if [*found.complete] != self._job.checkpoints:
            raise RuntimeError("not all checkpoints were found complete")
        return found.to_json()

    def _poll(self, number: int) -> None:
        """Poll while a call is under way; one rank, since threads take the interpreter in turn."""
        call = PendingCall("save")
        watched = Watched(number, call.name, call)
        self._watched.append(watched)
        self._watch.add(watched)
        self._watch.poll(blocking=False)
        for _ in range(_POLLS if self._rank == 0 else 0):
            self._watch.poll(blocking=False)
            self._watch.verdict(watched, blocking=False, no_dist=False, await_own=_nothing)

    def _agree(self, number: int) -> None:
        watched = self._watched[number]
        watched.ending.end(None)  # type: ignore[attr-defined]
        verdict = self._watch.verdict(watched, blocking=True, no_dist=False, await_own=_nothing)
        if verdict is None or verdict.failure is not None:
            raise RuntimeError(f"the ranks did not agree: {verdict}")

    def _read_all(self, number: int) -> list[Any]:
        """Every rank reads the record of every rank."""
        store, world = self._counts[0], self._world
        store.set(f"all/{number}/{self._rank}", json.dumps(_RECORD))
        store.add(f"all/{number}", 1)
        pause_s = 0.0002
        while store.add(f"all/{number}", 0) < world:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        values = store.multi_get([f"all/{number}/{other}" for other in range(world)])
        # A message with so many keys is as many operations.
        store.operations += world - 2
        return [json.loads(value) for value in values]


def _nothing(since: float) -> None:
    """Have nothing to wait for on this rank."""


def _agree(records: list[Any]) -> list[Any]:
    return [len(records), all(record == _RECORD for record in records)]
