"""Load on all ranks: from the own node, a peer, pieces of other kinds, or an older checkpoint.

Works in rounds, until every shard is good. In each, all ranks make the same plan, move what has to
move, verify, and report how it went; bad copies are left out of the next round's plan. If
a shard has no good copy left, an older checkpoint is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

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
from localckpt.managers.copies import Reprotection
from localckpt.managers.elastic import ElasticLoad
from localckpt.managers.look import Finder
from localckpt.managers.recovery import Recovery
from localckpt.managers.restoring import (
    BadShardError,
    Loaded,
    LoadOptions,
    compare_with_shard,
    incurable,
    restore,
)
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.ranks.ranks import shaped
from localckpt.replication.exchange import ExchangePlan, ExchangePlanEntry, plan_shards
from localckpt.replication.retrieval import WatchedSource
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.source import ReadProgress

logger = logging.getLogger(__name__)


_Bad = tuple[int, int, str]
"""Bad copy of a shard: a rank on its node, the rank whose shard it is, and what is wrong."""


class Load:
    """One call of ``load``; ``bad`` are copies that could not be read, the same on all ranks."""

    def __init__(self, context: Context, inventory: Inventory, options: LoadOptions) -> None:
        self._context, self._options = context, options
        self._ranks, self._store = context.ranks, context.store
        self._checkpoints = context.checkpoints
        # What each node holds; copies that turn out bad are taken out of it.
        self._inventory = inventory
        self.bad: list[BadCopy] = []
        # Why no copy at all can be loaded on this rank, until it is reported.
        self._failure: Exception | None = None
        # Who sent the shards that have arrived, by the ranks of these.
        self._senders: dict[int, int] = {}
        # Reader of this rank's shard that was compared with the state to load into.
        self._compared: ImageReader | None = None

    def run(
        self, iteration: int | None, finder: Finder, reprotection: Reprotection | None
    ) -> Loaded:
        """Load the newest checkpoint, or ``iteration`` and no other, and protect it again."""
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
        self._mine = checkpoint.shard(self._ranks.rank, self._context.session_id)
        self._recovery = Recovery(self._context, self._inventory, checkpoint, self.bad)
        with record_function("localckpt.load"), collection_paused():
            if checkpoint.world_size == self._ranks.world_size:
                return self._load()
            return self._load_elastic()

    def _load_elastic(self) -> Loaded | None:
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
                    if not self._recovery.run({rank: rank for rank in self._recovery.groups}):
                        continue
                    if plan.transfers and not self._fetch(plan):
                        continue
                    lacking = self._compare_with_shards() if self._store.keeps_images else {}
                    if lacking and not self._fetch(self._plan_parts(lacking)):
                        continue
                if lacking is None:
                    self._drop_slots()
                    return self._load_elastic()
                with self._context.events.timed("read", step):
                    loaded, bad = self._verify_and_restore()
                if self._agree(f"load iteration {step}", bad):
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
        return plan_shards(self._checkpoint, self._context.session_id, self._inventory, wanted)

    def _plan_parts(self, lacking: Mapping[int, Sequence[int]]) -> ExchangePlan[CkptID]:
        """Plan the transfers of shards that hold parts of tensors of ranks on other nodes."""
        computed = self._recovery.groups
        held = {rank: [o for o in owners if o not in computed] for rank, owners in lacking.items()}
        plan = plan_shards(self._checkpoint, self._context.session_id, self._inventory, held)
        # A shard that was computed is in the memory of its own rank.
        sent = [
            ExchangePlanEntry(owner, rank, self._named(owner).ckpt_id)
            for rank, owners in lacking.items()
            for owner in owners
            if owner in computed
        ]
        return ExchangePlan((*plan.entries, *sent))

    def _named(self, owner: int) -> ShardIdentity:
        return self._checkpoint.shard(owner, self._context.session_id)

    # Fetch.

    def _fetch(self, plan: ExchangePlan[CkptID]) -> bool:
        """Carry out a plan; return False on all ranks if a copy was bad, and is left out."""
        sources: list[tuple[int, WatchedSource]] = []
        refused: dict[int, StorageError | CorruptShardError] = {}
        timeout_s, sends = self._ranks.timeout_s, plan.sends(self._ranks.rank)
        sizes = self._inventory.shards(self._checkpoint) | self._recovery.nbytes
        nbytes = sum(sizes[entry.id_.rank] for entry in sends)
        progress = ReadProgress(f"sending {len(sends)} shards to peers", nbytes)

        def open_source(id_: CkptID) -> WatchedSource:
            try:
                source = self._recovery.open(self._named(id_.rank))
            except (StorageError, CorruptShardError) as error:
                refused[id_.rank] = error
                raise
            except Exception as error:
                self._failure = incurable(error)
                raise self._failure from error
            watched = WatchedSource(source, progress.add)
            sources.append((id_.rank, watched))
            return watched

        def reserve(id_: CkptID, nbytes: int) -> memoryview:
            slot = self._store.reserve(self._named(id_.rank), nbytes, timeout_s, is_kept=False)
            self._recovery.arrived[id_.rank] = slot
            return slot.image

        try:
            self._context.strategy.retrieve_image(plan, open_source, reserve, timeout_s)
        except PeerLostError:
            raise
        except CheckpointingException:
            # The same on all ranks. If a sender could not read its copy, another may do.
            refused |= {owner: source.refused for owner, source in sources if source.refused}
            rank = self._ranks.rank
            bad = [(rank, owner, described(error)) for owner, error in refused.items()]
            if self._agree("send what peers need", bad):
                raise
            return False
        self._senders |= {e.id_.rank: e.sender for e in plan.receives(self._ranks.rank)}
        return True

    # Verify and restore.

    def _compare_with_shards(self) -> dict[int, list[int]] | None:
        """Compare what ranks load into with their shards, before any of them fills a tensor.

        Returns by rank the shards with parts of its tensors that are not on its node; ``None`` on
        all ranks if the tensors of some are other parts of global tensors than those saved. Raises
        MismatchError if the state of some does not fit.
        """
        differs, parts, misfit, lacks = False, list[str](), None, list[int]()
        with Attempt() as comparing:
            try:
                self._compared, differs, parts, misfit = compare_with_shard(
                    self._context, self._recovery, self._mine, self._options
                )
                held = self._inventory.shards_on(
                    self._checkpoint, self._inventory.node_of(self._ranks.rank)
                )
                lacks = [rank for rank in self._compared.co_owners if rank not in held]
            except (StorageError, CorruptShardError) as error:
                # Reading the shard to restore it finds that, too, and says it to all ranks.
                forget_frames(error)
            except Exception as error:
                raise incurable(error) from error
        step = self._checkpoint.iteration
        what = f"compare iteration {step} with the states to load into"
        report = differs, parts, misfit is not None, lacks
        reports = self._ranks.merge(
            *(what, comparing, list(report) if any(report) else None),
            read=shaped((bool, [str], bool, [int])),
        )
        if saved := {part for _, those, *_ in reports.values() for part in those}:
            self._options.rules.require_named(saved)
        if any(differs for differs, *_ in reports.values()):
            logger.info("iteration %d is loaded into tensors that are sharded otherwise", step)
            return None
        if any(is_misfit for _, _, is_misfit, _ in reports.values()):
            self._failure = misfit
            self._agree(f"load iteration {step}")
        return {rank: those for rank, (*_, those) in reports.items() if those}

    def _verify_and_restore(self) -> tuple[Loaded | None, list[_Bad]]:
        """Read this rank's shard from the store, a peer's bytes, or the computed image."""
        rank = self._ranks.rank
        holder = self._senders.get(rank, rank)
        came_from = "own node" if holder == rank else f"peer rank {holder}"
        computed = self._recovery.slots.get(rank)
        if computed is not None:
            came_from = self._recovery.groups[rank].kind
        try:
            state, nbytes = restore(
                self._context, self._recovery, self._mine, self._options, self._compared
            )
        except BadShardError as bad:
            # Its text alone is reported. It may refer to the state that was to be filled.
            forget_frames(bad.error)
            forget_frames(bad)
            holder = self._senders.get(bad.rank, rank)
            return None, [(holder, bad.rank, described(bad.error))]
        except Exception as error:  # noqa: BLE001 - raised on every rank once reported
            self._failure = incurable(error)
            return None, []
        # What was computed is kept by the caller.
        self._store.release([*self._recovery.arrived.values()])
        self._recovery.arrived, self._senders = {}, {}
        return Loaded(self._checkpoint, state, nbytes, came_from), []

    # Agree.

    def _agree(self, phase: str, bad: Sequence[_Bad] = ()) -> bool:
        """Report copies that are bad, and take all ranks' bad copies out of the plans."""
        attempt = Attempt()
        attempt.failure, self._failure = self._failure, None
        forget_frames(attempt.failure)
        # What others cannot load is reported with it, so all are waited for.
        reports: dict[int, list[_Bad]] = self._ranks.merge(
            *(phase, attempt, bad or None),
            grace_s=self._ranks.timeout_s,
            read=shaped([(int, int, str)]),
        )
        for copies in reports.values():
            for holder, owner, why in copies:
                self._recovery.take_out(Piece(owner), holder, why)
        return not reports

    def _drop_slots(self) -> None:
        self._recovery.drop([self._mine])
        self._senders, self._compared = {}, None
