"""Load on all ranks: from the own node, a peer, pieces of other kinds, or an older checkpoint.

Works in rounds, until every shard is good. In each, all ranks make the same plan, move what has to
move, verify, and report how it went; bad copies are left out of the next round's plan. If
a shard has no good copy left, an older checkpoint is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from torch.profiler import record_function

from localckpt.availability.coverage import judge_newest
from localckpt.availability.explanation import BadCopy, why_not_that, why_nothing_loads
from localckpt.availability.inventory import Inventory
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    PeerLostError,
    StorageError,
)
from localckpt.failure_texts import described
from localckpt.ids import Checkpoint, CkptID, Piece, ShardIdentity
from localckpt.managers.context import Context
from localckpt.managers.elastic import ElasticLoad
from localckpt.managers.look import Finder
from localckpt.managers.recovery import Recovery
from localckpt.managers.reprotection import Reprotection
from localckpt.managers.restoring import (
    BadPartError,
    Loaded,
    LoadOptions,
    PartsElsewhereError,
    ReadProgress,
    compare_with_shard,
    incurable,
    restore,
)
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.ranks.ranks import shaped
from localckpt.replication.exchange import ExchangePlan, ExchangePlanEntry, plan_shards
from localckpt.replication.retrieval import WatchedSource
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.storage.catalog import Problem
from localckpt.storage.store import Slot

__all__ = ["Load"]

logger = logging.getLogger(__name__)


class _Bad(NamedTuple):
    """Bad copy of a shard; ranks are those of the job."""

    holder: int
    owner: int
    why: str


class _Outcome(NamedTuple):
    """Outcome of a round on one rank."""

    bad: Sequence[_Bad] = ()
    lacks: Sequence[int] = ()
    """Ranks whose shards hold parts of its tensors and are not on its node."""


class _ShardedOtherwiseError(Exception):
    """The tensors to load into are other parts of global tensors than those of the shards."""


class Load:
    """One call of ``load``; its methods are the steps, in their order.

    Attributes:
        bad: Copies that could not be read; the same on all ranks.
    """

    def __init__(self, context: Context, inventory: Inventory, options: LoadOptions) -> None:
        self._context = context
        self._ranks = context.ranks
        self._strategy = context.strategy
        self._store = context.store
        self._allowed = context.allowed
        self._checkpoints = context.checkpoints
        self._session_id = context.session_id
        # What each node holds; copies that turn out bad are taken out of it.
        self._inventory = inventory
        self._options = options
        self.bad: list[BadCopy] = []
        # Why no copy at all can be loaded on this rank, until it is reported.
        self._failure: Exception | None = None
        # Slots of the shards that peers have sent, by their ranks, and who sent them.
        self._arrived: dict[int, Slot] = {}
        self._senders: dict[int, int] = {}
        # Reader of this rank's shard that was compared with the state to load into.
        self._compared: ImageReader | None = None
        # By rank, the shards with parts of its tensors that are not on its node; on all ranks.
        self._lacking: dict[int, Sequence[int]] = {}

    def run(
        self, iteration: int | None, finder: Finder, reprotection: Reprotection | None
    ) -> Loaded:
        """Read this rank's shard of the newest checkpoint that can be had, and protect it again.

        ``iteration`` is the only one that will do; ``None`` for any.
        """
        while wanted := self._wanted(iteration):
            judge_newest(wanted, self._ranks.world_size, is_elastic=self._context.options.elastic)
            loaded = self.load(wanted[0])
            if loaded is not None:
                self._context.epoch.resume_from(self._checkpoint)
                self._protect(reprotection)
                return loaded
            logger.error(
                "iteration %d cannot be had any more; trying another checkpoint",
                self._checkpoint.iteration,
            )
            # It must not count among those that are kept, and push out one that can be had.
            self._checkpoints.remove(self._checkpoint)
        if iteration is not None:
            others = finder.iterations()
            raise NoReplicasAvailableError(why_not_that(iteration, others, self.bad))
        explanation, nodes = finder.explain(), self._context.nodes
        raise NoReplicasAvailableError(
            why_nothing_loads(self._inventory, explanation, self.bad, nodes)
        )

    def _wanted(self, iteration: int | None) -> list[Checkpoint]:
        """Return the checkpoints to try; one that the caller names may be one that was given up."""
        if iteration is None:
            return self._checkpoints.complete
        known = (*self._checkpoints.complete, *self._checkpoints.exhausted)
        return [checkpoint for checkpoint in known if checkpoint.iteration == iteration]

    def _protect(self, reprotection: Reprotection | None) -> None:
        """Begin to make again the copies that the loaded checkpoint lacks."""
        self._checkpoints.refresh(self._checkpoint, self._inventory)
        if reprotection is not None:
            reprotection.begin(self._recovery)
        else:
            self._store.release(list(self._recovery.slots.values()))

    def load(self, checkpoint: Checkpoint) -> Loaded | None:
        """Read this rank's shard of a checkpoint; ``None`` if that cannot be had."""
        self._checkpoint = checkpoint
        self._mine = checkpoint.shard(self._ranks.rank, self._session_id)
        self._recovery = Recovery(self._context, self._inventory, checkpoint, self.bad)
        with record_function("localckpt.load"), collection_paused():
            if checkpoint.world_size == self._ranks.world_size:
                with suppress(_ShardedOtherwiseError):
                    return self._load()
            return ElasticLoad(self._context, self._recovery, self._options).run()

    def _load(self) -> Loaded | None:
        try:
            while True:
                self._drop_slots()
                try:
                    plan = self._plan()
                except NoReplicasAvailableError:
                    return None
                step = self._checkpoint.iteration
                with self._context.events.timed("fetch", step):
                    if not self._recover_and_fetch(plan):
                        continue
                    if self._store.keeps_images:
                        self._compare_with_shards()
                with self._context.events.timed("read", step):
                    loaded, outcome = self._verify_and_restore()
                if not self._agree(f"load iteration {self._checkpoint.iteration}", outcome):
                    continue
                if self._lacking:
                    loaded = self._load_with_parts(loaded)
                    if loaded is None:
                        continue
                return loaded
        except BaseException:
            self._drop_slots()
            raise

    # Plan.

    def _plan(self) -> ExchangePlan[CkptID]:
        """Plan the transfers of shards that some node holds, and find groups for the others."""
        groups = self._recovery.plan()
        ranks = range(self._ranks.world_size)
        wanted = {rank: [rank] for rank in ranks if rank not in groups}
        return plan_shards(self._checkpoint, self._session_id, self._inventory, wanted)

    def _recover_and_fetch(self, plan: ExchangePlan[CkptID]) -> bool:
        """Compute and fetch the shards that are not on their own node; as :meth:`_fetch`."""
        if not self._recovery.run({rank: rank for rank in self._recovery.groups}):
            return False
        return self._fetch(plan) if plan.transfers else True

    # Parts of tensors on other nodes.

    def _load_with_parts(self, loaded: Loaded | None) -> Loaded | None:
        """Fetch the shards that hold parts of tensors, and restore where they were lacking.

        Returns ``None`` on all ranks if another round is needed.
        """
        step, lacking = self._checkpoint.iteration, self._lacking
        try:
            plan = self._plan_parts(lacking)
        except NoReplicasAvailableError:
            # A copy was bad, and none is left: the next round computes the shard, or gives up.
            return None
        with self._context.events.timed("fetch", step):
            if not self._fetch(plan):
                return None
        outcome = _Outcome()
        if self._ranks.rank in lacking:
            with self._context.events.timed("read", step):
                loaded, outcome = self._verify_and_restore()
        return loaded if self._agree(f"load the parts of iteration {step}", outcome) else None

    def _plan_parts(self, lacking: Mapping[int, Sequence[int]]) -> ExchangePlan[CkptID]:
        """Plan the transfers of shards that hold parts of other ranks' tensors."""
        computed = self._recovery.groups
        held = {rank: [o for o in owners if o not in computed] for rank, owners in lacking.items()}
        plan = plan_shards(self._checkpoint, self._session_id, self._inventory, held)
        # A shard that was computed is in the memory of its own rank.
        sent = [
            ExchangePlanEntry(owner, rank, self._named(owner).ckpt_id)
            for rank, owners in lacking.items()
            for owner in owners
            if owner in computed
        ]
        return ExchangePlan((*plan.entries, *sent))

    def _named(self, owner: int) -> ShardIdentity:
        return self._checkpoint.shard(owner, self._session_id)

    # Fetch.

    def _fetch(self, plan: ExchangePlan[CkptID]) -> bool:
        """Send and receive the shards of a plan.

        Returns False on all ranks when a copy could not be read, and is out of the next plan.
        """
        sources: dict[CkptID, WatchedSource] = {}
        refused: dict[CkptID, CheckpointingException] = {}
        for entry in plan.sends(self._ranks.rank):
            identity = self._named(entry.id_.rank)
            computed = self._recovery.slots.get(entry.id_.rank)
            try:
                source: ShardSource = (
                    self._store.open(identity) if computed is None else MemorySource(computed.image)
                )
                sources[entry.id_] = WatchedSource(source)
            except (StorageError, CorruptShardError) as error:
                refused[entry.id_] = error
            except Exception as error:  # noqa: BLE001 - raised on every rank once reported
                self._failure = incurable(error)
        timeout_s = self._ranks.timeout_s

        def reserve(id_: CkptID, nbytes: int) -> memoryview:
            slot = self._store.reserve(self._named(id_.rank), nbytes, timeout_s, is_kept=False)
            self._arrived[id_.rank] = slot
            return slot.image

        def all_well(phase: str) -> bool:
            refused.update({id_: s.refused for id_, s in sources.items() if s.refused})
            return self._agree(phase, self._left_out(refused))

        with ExitStack() as opened:
            for source in sources.values():
                opened.callback(source.close)
            if not all_well("open what peers need"):
                return False
            nbytes = sum(source.nbytes for source in sources.values())
            progress = ReadProgress(f"sending {len(sources)} shards to peers", nbytes)
            for source in sources.values():
                source.on_read = progress.add
            try:
                self._strategy.retrieve_image(plan, sources.__getitem__, reserve, timeout_s)
            except PeerLostError:
                raise
            except CheckpointingException:
                # The same on all ranks. If a sender could not read its copy, another may do.
                if all_well("send what peers need"):
                    raise
                return False
        self._senders |= {e.id_.rank: e.sender for e in plan.receives(self._ranks.rank)}
        return True

    def _left_out(self, refused: Mapping[CkptID, CheckpointingException]) -> _Outcome:
        """Report own copies that could not be read, and quarantine those with bad bytes."""
        bad = []
        for id_, error in refused.items():
            if isinstance(error, CorruptShardError):
                identity = self._checkpoint.shard(id_.rank, self._session_id)
                self._store.quarantine(identity, Problem.of(error))
            bad.append(_Bad(self._ranks.rank, id_.rank, described(error)))
        return _Outcome(tuple(bad))

    # Verify and restore.

    def _compare_with_shards(self) -> None:
        """Compare what ranks load into with their shards, before any of them fills a tensor.

        Raises :class:`_ShardedOtherwiseError` on all ranks if some have other parts of global
        tensors, and MismatchError if the state of some does not fit.
        """
        differs, parts, misfit = False, list[str](), None
        with Attempt() as comparing:
            try:
                self._compared, differs, parts, misfit = compare_with_shard(
                    *(self._store, self._mine, self._images(), self._options, self._allowed),
                    is_elastic=self._context.options.elastic,
                )
            except (StorageError, CorruptShardError) as error:
                # Reading the shard to restore it finds that, too, and says it to all ranks.
                forget_frames(error)
            except Exception as error:
                raise incurable(error) from error
        step = self._checkpoint.iteration
        what = f"compare iteration {step} with the states to load into"
        report = [differs, parts, misfit is not None] if differs or parts or misfit else None
        reports = self._ranks.merge(what, comparing, report, read=shaped((bool, [str], bool)))
        if reports:
            saved = {part for _, those, _ in reports.values() for part in those}
            self._options.rules.require_named(saved)
        if any(differs for differs, _, _ in reports.values()):
            logger.info("iteration %d is loaded into tensors that are sharded otherwise", step)
            raise _ShardedOtherwiseError
        if any(is_misfit for _, _, is_misfit in reports.values()):
            self._failure = misfit
            self._agree(f"load iteration {step}", _Outcome())

    def _images(self) -> dict[int, memoryview]:
        """Return the images that are not in this node's store, by the rank of the shard."""
        images = {owner: slot.image for owner, slot in self._arrived.items()}
        if (computed := self._recovery.slots.get(self._ranks.rank)) is not None:
            images[self._ranks.rank] = computed.image
        return images

    def _verify_and_restore(self) -> tuple[Loaded | None, _Outcome]:
        """Read this rank's shard from the store, a peer's bytes, or the computed image."""
        rank = self._ranks.rank
        holder = self._senders.get(rank, rank)
        came_from = "own node" if holder == rank else f"peer rank {holder}"
        computed = self._recovery.slots.get(rank)
        if computed is not None:
            came_from = self._recovery.groups[rank].kind
        held = self._inventory.shards_on(self._checkpoint, self._inventory.node_of(rank))
        try:
            state, nbytes = restore(
                *(self._store, self._mine, self._images(), self._options, self._allowed),
                held if self._store.keeps_images else None,
                self._compared,
            )
        except PartsElsewhereError as away:
            return None, _Outcome(lacks=away.ranks)
        except BadPartError as error:
            forget_frames(error.error)
            where = self._senders.get(error.rank, rank)
            why = described(error.error)
            forget_frames(error)
            return None, _Outcome((_Bad(where, error.rank, why),))
        except (StorageError, CorruptShardError) as error:
            # Its text alone is reported. It may refer to the state that was to be filled.
            forget_frames(error)
            # What the node refused once it may give the next time: only bad bytes go to quarantine.
            if isinstance(error, CorruptShardError) and holder == rank and computed is None:
                self._store.quarantine(self._mine, Problem.of(error))
            return None, _Outcome((_Bad(holder, rank, described(error)),))
        except Exception as error:  # noqa: BLE001 - raised on every rank once reported
            self._failure = incurable(error)
            return None, _Outcome()
        # What was computed is kept by the caller.
        self._release_arrived()
        return Loaded(self._checkpoint, state, nbytes, came_from), _Outcome()

    # Agree.

    def _agree(self, phase: str, mine: _Outcome) -> bool:
        """Report this rank's outcome, and take all ranks' bad copies out of the plans."""
        attempt = Attempt()
        attempt.failure, self._failure = self._failure, None
        forget_frames(attempt.failure)
        report = mine if any(mine) else None
        # What others cannot load is reported with it, so all are waited for.
        outcomes: dict[int, _Outcome] = self._ranks.merge(
            *(phase, attempt, report),
            grace_s=self._ranks.timeout_s,
            read=lambda fields: _Outcome([_Bad(*copy) for copy in fields[0]], tuple(fields[1])),
        )
        bad = [(rank, copy) for rank, outcome in outcomes.items() for copy in outcome.bad]
        self._lacking = {rank: o.lacks for rank, o in outcomes.items() if o.lacks}
        for rank, (holder, owner, why) in bad:
            node = self._inventory.node_of(holder)
            # Of a shard with parts for several ranks of its node, one of these ranks looks again.
            is_on_node = owner != rank and node == self._inventory.node_of(rank)
            looker = self._inventory.reader([node], owner) if is_on_node else holder
            is_computed = owner in self._recovery.groups
            self._recovery.take_out(Piece(owner), holder, why)
            if looker == self._ranks.rank and not is_computed and (is_on_node or holder != rank):
                self._recovery.verify_again(Piece(owner), f"read for rank {rank}, where {why}")
        return not bad

    def _release_arrived(self) -> None:
        self._store.release([slot for slot in self._arrived.values() if not slot.is_kept])
        self._arrived, self._senders = {}, {}

    def _drop_slots(self) -> None:
        self._recovery.drop([self._mine, *map(self._named, self._arrived)])
        self._arrived, self._senders, self._lacking = {}, {}, {}
        self._compared = None
