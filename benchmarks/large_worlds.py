"""What it takes to find a checkpoint, and to plan who sends what, in a job of thousands of ranks.

One process stands for the job: it makes what every node would tell, and then does what the root
does with it, and what each rank does with what the root tells. Eight ranks a node, nodes in pairs
that hold each other's shards, two checkpoints. The job's key-value store, which brings what is told
from rank to rank, is not measured.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import median
from typing import TypeVar

from benchmarks.report import Report
from benchmarks.setup import Options
from localckpt.availability.durability import Found
from localckpt.availability.explanation import explain
from localckpt.availability.inventory import Inventory, node_report, packed, ranks_by_node, unpacked
from localckpt.ids import Checkpoint, CkptID, Generation, Group, ShardRecord
from localckpt.lineage import MOST_ANCESTORS, EpochId, Lineage, Point
from localckpt.replication.exchange import ExchangePlan, missing_copies, plan_shards

__all__ = ["World", "measure"]

T = TypeVar("T")

_WORLDS = (1024, 4096, 16384)
_LOST = (1, 8, 64)
_RANKS_A_NODE, _NODES_A_CLIQUE = 8, 2
_NBYTES = 20_000_000_000
_GOAL_BYTES, _GOAL_MS, _GOAL_LOAD = 32.0, 500.0, 2.0
_SESSION = "benchmark"
# As long as those of jobs that were often restarted.
_LINEAGE = Lineage(
    Generation(1234, 2**60 - 1).epoch_id,
    "local",
    10**7 - 1000,
    tuple(Point(EpochId(1233 - n, 2**32 - n - 1), 10**7 - n) for n in range(MOST_ANCESTORS)),
    is_cut=True,
)
_TELL, _FIND, _SHARE, _LEARN, _EXPLAIN, _MISS = _FOUND = (
    "one node: say what it holds",
    "the root: find the newest complete checkpoint",
    "the root: say to all what the nodes hold",
    "a rank: learn what the nodes hold",
    "explain it",
    "the root: say what is missing, a pair of nodes lost",
)


def measure(options: Options) -> Report:
    """Medians over the rounds; in each round each world in turn."""
    report = Report("large-worlds")
    worlds = {ranks: World(ranks) for ranks in _WORLDS}
    timings = {ranks: _Timings() for ranks in _WORLDS}
    plans: dict[tuple[int, int], dict[str, ExchangePlan[CkptID]]] = {}
    for _ in range(options.rounds):
        for ranks, world in worlds.items():
            _find(world, timings[ranks])
            for lost in _LOST:
                plans[ranks, lost] = _plan(world, lost, timings[ranks])
    for ranks, world in worlds.items():
        _tell_figures(report, world, timings[ranks])
        for lost in _LOST:
            _tell_plans(report, world, lost, plans[ranks, lost], timings[ranks])
    return report


class World:
    """A job as it restarts, and what its nodes tell."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.verdict_nbytes = self.shared_nbytes = 0
        self.nodes = [f"{rank // _RANKS_A_NODE:032x}" for rank in range(ranks)]
        self.checkpoints = [
            Checkpoint(Generation(1234, 2**60 - number), 10**7 - 50 * number, ranks)
            for number in (1, 2)
        ]
        self.records = {
            node: [
                ShardRecord(
                    replace(checkpoint.shard(owner, _SESSION), lineage=_LINEAGE), _NBYTES + owner
                )
                for checkpoint in self.checkpoints
                for member in self.clique_of(on[0])
                for owner in (member + place for place in range(_RANKS_A_NODE))
            ]
            for node, on in ranks_by_node(self.nodes).items()
        }

    def clique_of(self, rank: int) -> list[int]:
        """The ranks that hold each other's shards, one of each node."""
        place, node = rank % _RANKS_A_NODE, rank // _RANKS_A_NODE
        first = node - node % _NODES_A_CLIQUE
        return [(first + n) * _RANKS_A_NODE + place for n in range(_NODES_A_CLIQUE)]

    def cliques(self) -> list[list[int]]:
        return [
            self.clique_of(rank) for rank in range(self.ranks) if self.clique_of(rank)[0] == rank
        ]

    def keepers(self) -> dict[int, list[int]]:
        """For each rank the ranks that keep a copy of its shard."""
        return {
            owner: [rank for rank in clique if rank != owner]
            for clique in self.cliques()
            for owner in clique
        }

    def protection(self) -> dict[int, Group]:
        """For each rank the group that protects its shard."""
        return {owner: Group((owner, *kept), len(kept)) for owner, kept in self.keepers().items()}

    def values(self, lost: Collection[str] = ()) -> list[str]:
        """What each rank gives to the job's store; for lost nodes, what their replacements do."""
        leaders = {on[0]: node for node, on in ranks_by_node(self.nodes).items()}
        reports = {
            rank: node_report([] if node in lost else self.records[node])
            for rank, node in leaders.items()
        }
        # As the coordinator says it, with the phase and the outcome.
        phase = "find the latest checkpoint"
        return [json.dumps([phase, [None, reports.get(rank)]]) for rank in range(self.ranks)]

    def merged(self, values: list[str]) -> Inventory:
        """The inventory that a rank has of it."""
        inventory = Inventory(ranks_by_node(self.nodes))
        gathered = [json.loads(value)[1][1] for value in values]
        for node in inventory.ranks_on:
            inventory.merge(node, gathered[inventory.leader(node)])
        return inventory

    def lose(self, count: int) -> set[str]:
        """Nodes of different cliques, the same at each call."""
        firsts = [clique[0] for clique in self.cliques()[::_RANKS_A_NODE]]
        chance = random.Random(count)
        members = (chance.choice(self.clique_of(rank)) for rank in chance.sample(firsts, count))
        return {self.nodes[rank] for rank in members}


@dataclass
class _Timings:
    """Milliseconds of everything that was timed, by what it was."""

    ms: dict[str, list[float]] = field(default_factory=dict)

    def time(self, what: str, call: Callable[[], T]) -> T:
        # What came before is not paid for now.
        gc.collect()
        began = time.perf_counter()
        result = call()
        self.ms.setdefault(what, []).append((time.perf_counter() - began) * 1e3)
        return result

    def note(self, what: str) -> str:
        return f"{min(self.ms[what]):.4g} to {max(self.ms[what]):.4g} over {len(self.ms[what])}"


def _find(world: World, timings: _Timings) -> None:
    """What ``find_latest`` and ``explain`` do."""
    node = world.nodes[0]
    timings.time(_TELL, lambda: json.dumps(node_report(world.records[node])))
    values = world.values()
    without = world.values({world.nodes[rank] for rank in world.clique_of(0)})

    def find(values: list[str]) -> tuple[Inventory, Found]:
        inventory = world.merged(values)
        return inventory, Found.among(inventory, world.protection())

    inventory, found = timings.time(_FIND, lambda: find(values))
    if [*found.complete] != world.checkpoints:
        raise RuntimeError("not all checkpoints were found complete")
    shared = timings.time(_SHARE, lambda: packed(inventory.reports()))
    learned = Inventory(ranks_by_node(world.nodes))
    timings.time(_LEARN, lambda: learned.merge_all(unpacked(shared)))
    if learned.reports() != inventory.reports():
        raise RuntimeError("a rank learned something else than the root knows")
    world.verdict_nbytes, world.shared_nbytes = len(json.dumps(found.to_json())), len(shared)
    timings.time(_EXPLAIN, lambda: str(explain(inventory, world.ranks)))

    if not timings.time(_MISS, lambda: find(without)[1].incomplete):
        raise RuntimeError("a checkpoint without a pair of nodes was found complete")


def _plan(world: World, count: int, timings: _Timings) -> dict[str, ExchangePlan[CkptID]]:
    """What ``load`` decides after a loss: who sends what now, and for the copies made then."""
    inventory = world.merged(world.values(world.lose(count)))
    newest = world.checkpoints[0]
    keepers = world.keepers()

    def plan(wanted: Mapping[int, list[int]]) -> ExchangePlan[CkptID]:
        made = plan_shards(newest, _SESSION, inventory, wanted)
        # A rank looks for its own part.
        made.sends(0)
        made.receives(0)
        return made

    def plan_copies() -> ExchangePlan[CkptID]:
        wanted: dict[int, list[int]] = {}
        for owner, receivers in missing_copies(newest, inventory, keepers).items():
            for rank in receivers:
                wanted.setdefault(rank, []).append(owner)
        return plan(wanted)

    own = {rank: [rank] for rank in range(world.ranks)}
    return {
        "load": timings.time(f"load {count}", lambda: plan(own)),
        "copies": timings.time(f"copies {count}", plan_copies),
    }


def _tell_figures(report: Report, world: World, timings: _Timings) -> None:
    sizes = [len(json.dumps(node_report(records))) for records in world.records.values()]
    values = [len(value) for value in world.values()]
    report.fact(
        f"{world.ranks:,} ranks: told of each shard",
        sum(sizes) / sum(map(len, world.records.values())),
        "bytes",
        f"said by the first rank of a node: {values[0]} bytes, by the others: {values[1]}, by all "
        f"ranks: {sum(values) / 1e6:.3g} MB",
        _GOAL_BYTES,
    )
    report.fact("the verdict, to each rank", world.verdict_nbytes, "bytes")
    report.fact("what the nodes hold, to each rank at a load", world.shared_nbytes / 1e3, "kB")
    for what in _FOUND:
        report.fact(what, median(timings.ms[what]), "ms", timings.note(what), _GOAL_MS)


def _tell_plans(
    report: Report,
    world: World,
    lost: int,
    plans: Mapping[str, ExchangePlan[CkptID]],
    timings: _Timings,
) -> None:
    for kind, plan in plans.items():
        what = f"{kind} {lost}"
        name = f"plan {'the load' if kind == 'load' else 'new copies'}, nodes lost: {lost}"
        report.fact(name, median(timings.ms[what]), "ms", timings.note(what), _GOAL_MS)
        sends = [len(plan.sends(rank)) for rank in range(world.ranks)]
        # Of every pair one node is left at least, so its ranks are all that can send its shards.
        ideal = ceil(len(plan.transfers) / (lost * _RANKS_A_NODE))
        report.fact(
            "the busiest rank sends, of what it must",
            max(sends) / ideal,
            "",
            f"{max(sends)} of {len(plan.transfers)} transfers, ideal {ideal}; "
            f"{sum(map(bool, sends))} ranks send",
            _GOAL_LOAD,
        )
