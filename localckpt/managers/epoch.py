"""The epoch that a job's saves belong to: its generation, its lineage, and what it resumed from.

An epoch begins with each start of the job, and anew when the job goes back to something older than
what it has saved. Nothing here reads or writes shards.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, SupportsIndex

from localckpt.availability.coverage import JoinRecord, judge_join, judge_resumed
from localckpt.availability.inventory import ranks_by_node
from localckpt.errors import CheckpointingException
from localckpt.events.stream import EventStream
from localckpt.failure_texts import ranges
from localckpt.ids import SAVES_AN_ATTEMPT, Checkpoint, Generation, ShardIdentity
from localckpt.lineage import Lineage, Origin, Point, Resumed, begin_lineage, unsaid
from localckpt.managers.job_checkpoints import JobCheckpoints
from localckpt.ranks.deadline import answered
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.header import FORMAT_VERSION
from localckpt.storage.store import Store

# Sequence numbers stay below 2**60, so that they fit wherever integers go.
_DRAWS = 2**32


class Epoch:
    """The epoch of one manager's saves; the same on all ranks.

    Attributes:
        generation: Generation of the last save.
        lineage: Descent of the epoch; ``None`` until its first save begins.
        newest_iteration: Iteration that the job saved or loaded last; -1 for none.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Store,
        strategy: ReplicationStrategy,
        session_id: str,
        checkpoints: JobCheckpoints,
        events: EventStream,
        *,
        is_elastic: bool = False,
    ) -> None:
        self._is_elastic = is_elastic
        self._ranks = ranks
        self._store = store
        self._strategy = strategy
        self._session_id = session_id
        self._checkpoints = checkpoints
        self._events = events
        self._nodes: list[str] | None = None
        self._is_joined = self._is_placed = False
        self.generation = Generation(0, 0)
        self.lineage: Lineage | None = None
        self.newest_iteration = -1
        self._resumed: Resumed | None = None
        self._left: list[Point] = []

    @property
    def known_nodes(self) -> list[str]:
        """Node of each rank; empty before :meth:`join`."""
        return self._nodes or []

    @property
    def nodes(self) -> list[str]:
        """For each rank the name of its node, once the ranks have joined."""
        assert self._nodes is not None, "join() comes first"
        return self._nodes

    def join(self) -> None:
        """Check that all ranks belong together, and number the epoch, once; all ranks call it."""
        if not self._is_joined:
            with self._events.timed("meet"):
                self._nodes, self.generation = self._meet()
            self._is_joined = self._is_placed = True
        elif not self._is_placed:
            self._strategy.place(self.nodes, self._ranks.timeout_s)
            self._is_placed = True

    def _meet(self) -> tuple[list[str], Generation]:
        """Find the name of each rank's node, and the generation from which to count saves."""
        ranks, store = self._ranks, self._store
        mine = None
        with Attempt() as looking:
            epochs = [s.record.identity.generation.epoch for s in store.list_stored() if s.record]
            mine = JoinRecord(
                self._session_id,
                ranks.world_size,
                FORMAT_VERSION,
                store.domain,
                max([store.claim.newest_epoch(), *epochs]),
                store.claim.owner,
                secrets.randbelow(_DRAWS),
                self._is_elastic,
            ).to_json()
        (epoch, draw, runs), owners = ranks.agree(
            *("join the job", looking, mine, _judge_join),
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
        ranks.agree("begin a new attempt", noting)
        # Attempts on nodes that have none in common know nothing of each other and come to the same
        # epoch; the numbers of their saves must differ, or their shards could pass for one
        # checkpoint later.
        return nodes, Generation(epoch, draw * SAVES_AN_ATTEMPT)

    def place_again(self) -> None:
        """Have the strategy begin anew in the next call: a rank that saved alone counts one more.

        All ranks call it after the same save.
        """
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
        """Fix the lineage before the epoch's first save, and note it on every node.

        All ranks call it before each save.
        """
        if self.lineage is not None:
            return self.lineage
        seen = [*(self._checkpoints.seen or ()), *self._left]
        resumed = self._resumed or unsaid(iteration, seen)
        lineage = begin_lineage(self.generation.epoch_id, resumed, seen, self._checkpoints.lineages)
        with Attempt() as noting:
            note = partial(self._store.claim.note_lineage, lineage)
            answered("write to", "this node's store", self._ranks.timeout_s, note, given_up)
        self._ranks.agree("note what the job resumed from", noting)
        self.generation = self.generation._replace(epoch=lineage.epoch.number)
        self._checkpoints.began(lineage)
        self.lineage, self._left = lineage, []
        return lineage

    def identity(self, iteration: int) -> ShardIdentity:
        """Make the identity of this rank's shard in the current generation."""
        return ShardIdentity(
            self._session_id,
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
