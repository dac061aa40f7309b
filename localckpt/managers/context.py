"""What the saves, the loads and the searches of one manager share of the job.

That is the checkpoints that are complete, and the epoch that saves belong to: its generation, its
lineage, and what it resumed from. An epoch begins with each start of the job, and anew when the job
goes back to something older than what it has saved. Nothing here reads or writes shards.
"""

from __future__ import annotations

import operator
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, SupportsIndex, TypeVar

from localckpt.availability.coverage import (
    JoinRecord,
    Standing,
    judge_join,
    judge_resumed,
    newest_first,
)
from localckpt.availability.durability import Durability, Found, durability_at, durability_found
from localckpt.availability.inventory import Inventory, ranks_by_node
from localckpt.availability.retention import Candidate, Retention, Retirement, retire
from localckpt.errors import CheckpointingException
from localckpt.events.stream import EventStream
from localckpt.failure_texts import ranges
from localckpt.ids import SAVES_AN_ATTEMPT, Checkpoint, Generation, ShardIdentity
from localckpt.lineage import EpochId, Lineage, Origin, Point, Resumed, begin_lineage, unsaid
from localckpt.options import Options
from localckpt.ranks.deadline import answered
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.replication.base import ReplicationStrategy
from localckpt.resuming import Resuming
from localckpt.state_dict.header import FORMAT_VERSION
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.store import Store
from localckpt.trust import Mark, Trusts

T = TypeVar("T")

# Sequence numbers stay below 2**60, so that they fit wherever integers go.
_DRAWS = 2**32


class JobCheckpoints:
    """Complete checkpoints of one job, and the level of each; the same on all ranks.

    What a repair finds is known to this rank first, and to all when the next save ends, since it
    is the same on all ranks what is kept.
    ``complete`` has the newest first; ``exhausted`` are those that are passed over, as too many
    starts failed from them, and why. ``seen`` is what the last look found, and ``job_has_looked``
    says that the job asked, or told what it resumes from: then it knows what it gives up.
    """

    def __init__(self, redundancy: ReplicationStrategy) -> None:
        self._redundancy = redundancy
        self.complete: list[Checkpoint] = []
        self.exhausted: dict[Checkpoint, str] = {}
        self.trusts = Trusts()
        self.under_way: list[int] = []
        self._reached: dict[Checkpoint, Durability] = {}
        # What repairs have found since all ranks agreed.
        self._found: dict[Checkpoint, Durability] = {}
        self._held: Counter[Checkpoint] = Counter()
        self.lineages: dict[EpochId, Lineage] = {}
        self.seen: list[Point] | None = None
        self.job_has_looked = False
        self._lineage: Lineage | None = None

    def copies_wanted(self, rank: int) -> int:
        """Target number of copies of a rank's shard; see :class:`Durability`."""
        group = self._redundancy.protection.get(rank)
        return 1 + (0 if group is None else group.tolerated)

    @property
    def lacking(self) -> int:
        """Number of shards of the newest checkpoint that have fewer copies than asked for."""
        newest = self._known(self.complete[0]) if self.complete else None
        return 0 if newest is None else newest.lacking

    def status(self, rank: int) -> list[Durability]:
        captured = [
            Durability(iteration, "captured", 0, self.copies_wanted(rank))
            for iteration in reversed(self.under_way)
        ]
        reached = ((c, self._known(c)) for c in self.complete)
        return captured + [
            replace(durability, level="drained") if self.trusts[c].is_drained else durability
            for c, durability in reached
            if durability is not None
        ]

    def _known(self, checkpoint: Checkpoint) -> Durability | None:
        return self._found.get(checkpoint) or self._reached.get(checkpoint)

    def lacks_copies(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint can be had, and has fewer copies than asked for."""
        known = self._known(checkpoint)
        return known is not None and known.lacking > 0 and known.level != "incomplete"

    def take_in(self, found: Found) -> None:
        self.complete = list(found.complete)
        self.exhausted = dict(found.exhausted)
        # This job's notes may be under way. A mark counts only as it is noted.
        own = {c: replace(self.trusts[c], mark=None, why="") for c in self.complete}
        self.trusts = Trusts.of([found.trusts, own])
        self._reached.update(found.complete)
        self._found.clear()
        self.lineages |= {lineage.epoch: lineage for lineage in found.lineages}
        # The job goes back from what it passes over, too.
        seen = (*found.complete, *found.quarantined, *found.exhausted)
        self.seen = [Point(c.generation.epoch_id, c.iteration) for c in seen]

    def began(self, lineage: Lineage) -> None:
        self._lineage = self.lineages[lineage.epoch] = lineage

    def refresh(self, checkpoint: Checkpoint, inventory: Inventory) -> None:
        protection = self._redundancy.protection
        self._reached[checkpoint] = durability_found(checkpoint, inventory, protection)
        self._found.pop(checkpoint, None)

    def note_found(self, checkpoint: Checkpoint, inventory: Inventory) -> None:
        """Note what a repair has found, for :meth:`status`, and for all ranks to agree on."""
        protection = self._redundancy.protection
        self._found[checkpoint] = durability_found(checkpoint, inventory, protection)

    def found(self) -> tuple[Standing, ...]:
        """Return what repairs have found on this rank, and not all ranks know."""
        return tuple(
            Standing(c, found.copies, found.wanted, found.lacking)
            for c, found in dict(self._found).items()
            if c in self.complete and found != self._reached.get(c)
        )

    def agree_on(self, found: Sequence[Standing]) -> None:
        """Take in what any rank has found, and forget what cannot be had; all ranks call it."""
        for checkpoint, copies, wanted, lacking in found:
            agreed = durability_at(checkpoint.iteration, copies, wanted, lacking)
            self._reached[checkpoint] = agreed
            if not copies:
                self.remove(checkpoint)

    @property
    def metrics(self) -> dict[Checkpoint, tuple[str, float]]:
        metrics = ((c, self.trusts[c].metric) for c in self.complete)
        return {c: metric for c, metric in metrics if metric is not None}

    def note(self, checkpoint: Checkpoint, **changes: Any) -> None:
        trust = replace(self.trusts[checkpoint], **changes)
        self.trusts = Trusts({**self.trusts, checkpoint: trust})

    def add(self, checkpoint: Checkpoint, reached: Durability) -> None:
        self.complete = newest_first({*self.complete, checkpoint}, self.lineages)
        self._reached = {c: self._reached[c] for c in self.complete if c in self._reached}
        self._reached[checkpoint] = reached
        for gone in {*self._found} - {*self.complete}:
            self._found.pop(gone, None)

    def forget(self, iteration: int) -> None:
        """Forget an iteration under way, which is finalized or never will be."""
        self.under_way = [other for other in self.under_way if other != iteration]

    def remove(self, checkpoint: Checkpoint) -> None:
        self.complete = [other for other in self.complete if other != checkpoint]
        self.exhausted.pop(checkpoint, None)

    def hold(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint from being pruned until :meth:`release` was called as often."""
        self._held[checkpoint] += 1

    def release(self, checkpoint: Checkpoint) -> None:
        """Undo one :meth:`hold`; the next save prunes what is over."""
        self._held[checkpoint] -= 1
        self._held += Counter()

    def keep(self, saved: int, retention: Retention) -> Retirement | None:
        """Forget all but the newest checkpoints, and those that must stay beside them.

        Beside them stays the newest that survives the loss of a node, if none of them does; the
        newest that is marked good, if none of them is; those with the best metric, if the job did
        not go back from them; and what other lineages have that is newer by iteration, unless the
        job gave it up knowingly. One that is marked bad counts for nothing, and only the newest of
        them stays, as long as nothing newer is complete. What is held stays in any case.

        Returns ``None`` if nothing may go.
        """
        lineage, metrics = self._lineage if self.job_has_looked else None, self.metrics
        rule = Retirement(saved, lineage)
        passed = {
            c: Candidate(
                (-place, c.iteration),
                # What the job went back from is not best.
                dict([metrics[c]] if c in metrics and not rule.gives_up(c) else []),
                mark=self.trusts[c].mark,
                is_redundant=c in self._reached and self._reached[c].survives_node_loss,
            )
            for place, c in enumerate(filter(rule.takes, self.complete))
        }
        if (retirement := retire(retention, passed, lineage, self._held)) is None:
            return None
        self.complete = [c for c in self.complete if not retirement.takes(c)]
        self.trusts = Trusts({c: self.trusts[c] for c in self.complete if c in self.trusts})
        return retirement

    def marked(self, mark: Mark) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.complete if self.trusts[checkpoint].mark == mark]


class Epoch:
    """The epoch of one manager's saves; the same on all ranks.

    ``generation`` is that of the last save, ``lineage`` is ``None`` before the first one, and
    ``newest_iteration`` is what the job saved or loaded last, or -1.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ranks = context.ranks
        self._strategy, self._checkpoints = context.strategy, context.checkpoints
        self.nodes: list[str] = []
        self._is_joined = self._is_placed = False
        self.generation = Generation(0, 0)
        self.lineage: Lineage | None = None
        self.newest_iteration = -1
        self._resumed: Resumed | None = None
        self._left: list[Point] = []

    def join(self) -> None:
        """Check that all ranks belong together, and number the epoch, once; all ranks call it."""
        if not self._is_joined:
            with self._context.events.timed("meet"):
                self.nodes, self.generation = self._meet()
            self._is_joined = self._is_placed = True
        elif not self._is_placed:
            self._strategy.place(self.nodes, self._ranks.timeout_s)
            self._is_placed = True

    def _meet(self) -> tuple[list[str], Generation]:
        """Find the name of each rank's node, and the generation from which to count saves."""
        ranks, store = self._ranks, self._context.store
        mine = None
        with Attempt() as looking:
            mine = self._context.read(self._join_record)
        (epoch, draw, runs), owners = ranks.decide(
            *("join the job", looking.of(mine), _judge_join),
            read=shaped(((int, int, [(int, int)]), list)),
        )
        nodes = _node_names([number for number, count in runs for _ in range(count)])
        self._strategy.place(nodes, ranks.timeout_s)
        # Every node notes the epoch before anything is saved in it. Else an attempt of which only
        # some nodes keep a shard could share its number with the next, which does not see those
        # nodes; and shards of both would pass for one checkpoint later.
        with Attempt() as noting:
            begin = partial(store.claim.begin_epoch, epoch, owners, ranks.timeout_s)
            answered("begin an attempt in", "this node's store", ranks.timeout_s, begin)
        ranks.decide("begin a new attempt", noting)
        # Attempts on nodes that have none in common know nothing of each other and come to the same
        # epoch; the numbers of their saves must differ, or their shards could pass for one
        # checkpoint later.
        return nodes, Generation(epoch, draw * SAVES_AN_ATTEMPT)

    def _join_record(self) -> JoinRecord:
        store = self._context.store
        epochs = [s.record.identity.generation.epoch for s in store.list_stored() if s.record]
        return JoinRecord(
            self._context.session_id,
            self._ranks.world_size,
            FORMAT_VERSION,
            store.domain,
            max([store.claim.newest_epoch(), *epochs]),
            store.claim.owner,
            secrets.randbelow(_DRAWS),
            self._context.options.elastic,
        )

    def place_again(self) -> None:
        """Have the strategy begin anew, as a rank that saved alone counts one more."""
        self._is_placed = False

    # Saves.

    def checked(self, iteration: SupportsIndex) -> int:
        """Return the iteration to save, if it can be saved now."""
        number = _as_int(iteration)
        if number is None or number < 0:
            raise CheckpointingException(
                f"the iteration to save is {iteration!r}; it must be an int and not negative"
            )
        if number <= self.newest_iteration:
            raise CheckpointingException(
                f"iteration {number} cannot be saved: this manager has saved or loaded "
                f"iteration {self.newest_iteration}, and the next must be above it. To go back, "
                f"load(iteration=...), or say with begin() what the job goes on from"
            )
        return number

    def begin(self, iteration: int, given_up: Callable[[], bool]) -> Lineage:
        """Fix the lineage before the epoch's first save, and note it; all ranks call it."""
        if self.lineage is not None:
            return self.lineage
        seen = [*(self._checkpoints.seen or ()), *self._left]
        resumed = self._resumed or unsaid(iteration, seen)
        lineage = begin_lineage(self.generation.epoch_id, resumed, seen, self._checkpoints.lineages)
        with Attempt() as noting:
            note = partial(self._context.store.claim.note_lineage, lineage)
            answered("write to", "this node's store", self._ranks.timeout_s, note, given_up)
        self._ranks.decide("note what the job resumed from", noting)
        self.generation = self.generation._replace(epoch=lineage.epoch.number)
        self._checkpoints.began(lineage)
        self.lineage, self._left = lineage, []
        return lineage

    def identity(self, iteration: int) -> ShardIdentity:
        return ShardIdentity(
            self._context.session_id,
            self.generation,
            iteration,
            self._ranks.rank,
            self._ranks.world_size,
            lineage=self.lineage,
        )

    def next_identity(self, iteration: int) -> ShardIdentity:
        """Make the identity of this rank's shard in the next save, which begins a generation."""
        self.generation = self.generation.next()
        return self.identity(iteration)

    # What the job resumes from.

    def resume_from(self, loaded: Checkpoint) -> None:
        """Go on from a checkpoint of the nodes, which was loaded."""
        epoch = loaded.generation.epoch_id
        goes_on = self.lineage is not None and (
            epoch == self.lineage.epoch and loaded.iteration >= self.newest_iteration
        )
        # The newest one of this epoch changes nothing.
        if not goes_on:
            # A user's hooks keep no lineages.
            parent = self._checkpoints.lineages.get(epoch, Lineage(epoch, "elsewhere", is_cut=True))
            self._resume(Resumed("local", loaded.iteration, parent))
        self.newest_iteration = loaded.iteration

    def resume_elsewhere(self, iteration: int, lineage: Lineage | None) -> None:
        """Go on from what the nodes do not hold; all ranks call it."""
        mine = [iteration, lineage and lineage.to_json()]
        self._ranks.decide("begin", lambda: mine, judge_resumed)
        if self.lineage is not None:
            # It has saved since it looked.
            self._checkpoints.seen = None
        self._checkpoints.job_has_looked = True
        origin: Origin = "shared" if lineage else "nothing" if iteration < 0 else "elsewhere"
        self._resume(Resumed(origin, iteration, lineage))
        self.newest_iteration = iteration

    def leave(self, points: Sequence[Point]) -> None:
        """Have the next epoch give up checkpoints elsewhere that the job goes back from."""
        self._left += points

    def begin_anew(self) -> None:
        """Have the next :meth:`join` begin another epoch, which goes on from the last save."""
        if self.lineage is not None:
            self._resume(Resumed("local", self.newest_iteration, self.lineage))
        self._is_joined = False

    def start_over(self) -> None:
        """Go on from nothing: no checkpoint is left, and any iteration may be saved."""
        self._resume(None)
        self.newest_iteration = -1

    def _resume(self, resumed: Resumed | None) -> None:
        self._resumed = resumed
        if self.lineage is not None:
            # The next save does not descend from what this epoch has saved, nor from saves in
            # flight, which a look at the nodes does not find.
            self._left += [
                self.lineage.left(iteration) for iteration in self._checkpoints.under_way
            ]
            self.lineage, self._is_joined = None, False


@dataclass(eq=False)
class Context:
    """Objects that the saves, the loads and the searches of one manager share.

    ``placed`` has for each rank the place of its store, if that is no node's.
    """

    session_id: str
    options: Options
    events: EventStream
    ranks: Ranks
    strategy: ReplicationStrategy
    allowed: SafeGlobals
    store: Store
    placed: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.checkpoints = JobCheckpoints(self.strategy)
        self.resuming = Resuming(self.store.claim, self.options.max_attempts)
        self.epoch = Epoch(self)

    @property
    def nodes(self) -> Sequence[str]:
        """For each rank the name of the node whose store it reads, once the ranks have joined."""
        return self.placed or self.epoch.nodes

    def read(self, read: Callable[[], T]) -> T:
        """Return what is read in this node's store; StorageError if it does not answer in time."""
        if self.images is None:
            # A user's hooks are called in the trainer's thread only.
            return read()
        return answered("read", "this node's store", self.ranks.timeout_s, read)

    @property
    def images(self) -> DirectoryStore | None:
        """The store, if it keeps images; ``None`` for the hooks of a user's manager."""
        return self.store if isinstance(self.store, DirectoryStore) else None


def checked_origin(iteration: SupportsIndex) -> int:
    """Return the iteration that a job goes on from, as an ``int``."""
    number = _as_int(iteration)
    if number is None:
        raise CheckpointingException(
            f"the iteration to go on from is {iteration!r}; it must be an int"
        )
    if number < -1:
        raise CheckpointingException(
            f"the iteration to go on from is {number}; it must be -1 or above"
        )
    return number


def _as_int(number: SupportsIndex) -> int | None:
    """Convert an integer of any type, such as numpy's; ``None`` for anything else."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)
    except TypeError:
        return None


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
