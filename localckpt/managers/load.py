"""Load on all ranks: from the own node, a peer, pieces of other kinds, or an older checkpoint.

Works in rounds, until every shard is good. In each, all ranks make the same plan, move what has to
move, verify, and report how it went; bad copies are left out of the next round's plan. If
a shard has no good copy left, an older checkpoint is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from torch.profiler import record_function

from localckpt.availability.coverage import judge_newest
from localckpt.availability.explanation import BadCopy, why_not_that, why_nothing_loads
from localckpt.availability.inventory import Inventory
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
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
from localckpt.managers.restoring import Loaded, LoadOptions, incurable
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.ranks.ranks import to_all
from localckpt.replication.exchange import ExchangePlan, ExchangePlanEntry, plan_shards
from localckpt.replication.retrieval import WatchedSource
from localckpt.state_dict.names import read_names
from localckpt.state_dict.reader import ImageReader, OpenImages
from localckpt.state_dict.skeleton import collection_paused
from localckpt.state_dict.source import ReadProgress
from localckpt.storage.hooks import HookStore
from localckpt.storage.write import Place

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
        # This rank's shard, once it was compared with the state to load into.
        self._reader: ImageReader | None = None

    def run(
        self, iteration: int | None, finder: Finder, reprotection: Reprotection | None
    ) -> Loaded:
        """Load the newest checkpoint, or ``iteration`` and no other, and protect it again."""
        while wanted := self._wanted(iteration):
            judge_newest(wanted, self._ranks.world_size, is_elastic=self._context.options.elastic)
            loaded = self.load(wanted[0])
            if loaded is not None and self._options.survey is not None:
                self._drop_slots()
                return loaded
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
        is_of_others = checkpoint.world_size != self._ranks.world_size
        self._is_elastic = is_of_others or self._options.is_elastic
        with record_function("localckpt.load"), collection_paused():
            try:
                while True:
                    self._drop_slots()
                    try:
                        lost = self._recovery.plan()
                    except NoReplicasAvailableError:
                        return None
                    # Each on its own rank, or in turn.
                    computed_by = {shard: shard % self._ranks.world_size for shard in lost}
                    with self._context.events.timed("fetch", checkpoint.iteration):
                        if not self._recovery.run(computed_by):
                            continue
                    with closing(OpenImages(self._recovery.open, self._context.allowed)) as images:
                        self._images = images
                        loaded = self._load_elastic() if self._is_elastic else self._load()
                    if loaded is not None:
                        return loaded
            except BaseException:
                self._drop_slots()
                raise

    def _load_elastic(self) -> Loaded | None:
        """Make one round on other ranks, or into another sharding."""
        return ElasticLoad(self._context, self._recovery, self._options, self._images).run()

    def _load(self) -> Loaded | None:
        """Make one round of a load of this rank's own shard; ``None`` if another one has to come.

        That is so where a copy is bad, and where the tensors of some rank are sharded otherwise.
        """
        step = self._checkpoint.iteration
        with self._context.events.timed("fetch", step):
            plan = self._plan()
            if plan.transfers and not self._fetch(plan):
                return None
            lacking = self._compare_with_shards() if self._store.keeps_images else {}
            if lacking and not self._fetch(self._plan_parts(lacking)):
                return None
        if self._is_elastic:
            return None
        with self._context.events.timed("read", step):
            loaded, bad = self._verify_and_restore()
        return loaded if self._agree(f"load iteration {step}", bad) else None

    # Plan.

    def _plan(self) -> ExchangePlan[CkptID]:
        """Plan the transfers of the shards that were not computed."""
        ranks, computed = range(self._ranks.world_size), self._recovery.groups
        wanted = {rank: [rank] for rank in ranks if rank not in computed}
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

        def reserve(id_: CkptID, nbytes: int) -> Place:
            slot = self._store.reserve(
                *(self._named(id_.rank), nbytes, timeout_s), is_kept=False, may_stage=True
            )
            self._recovery.arrived[id_.rank] = slot
            return slot.place

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

    def _compare_with_shards(self) -> dict[int, list[int]]:
        """Compare what ranks load into with their shards, before any of them fills a tensor.

        Returns by rank the shards with parts of its tensors that are not on its node; none if the
        tensors of some rank are other parts of global tensors than those saved, which an elastic
        load is for. Raises MismatchError if the state of some does not fit.
        """
        differs, parts, misfit, lacks = False, list[str](), None, list[int]()
        with Attempt() as comparing:
            try:
                reader = self._images.open(self._mine)
                differs, parts, misfit = self._compare(reader)
                held = self._inventory.shards_on(
                    self._checkpoint, self._inventory.node_of(self._ranks.rank)
                )
                lacks = [rank for rank in reader.co_owners if rank not in held]
                self._reader = reader
            except (StorageError, CorruptShardError) as error:
                # Reading the shard to restore it finds that, too, and says it to all ranks.
                self._images.bad.clear()
                forget_frames(error)
            except Exception as error:
                raise incurable(error) from error
        step = self._checkpoint.iteration
        what = f"compare iteration {step} with the states to load into"
        report = differs, parts, misfit is not None, lacks
        reports = self._ranks.decide(
            *(what, comparing.of(list(report) if any(report) else None)),
            **to_all((bool, [str], bool, [int])),
        )
        if saved := {part for _, those, *_ in reports.values() for part in those}:
            self._options.rules.require_named(saved)
        if any(differs for differs, *_ in reports.values()):
            logger.info("iteration %d is loaded into tensors that are sharded otherwise", step)
            self._is_elastic = True
            return {}
        if any(is_misfit for _, _, is_misfit, _ in reports.values()):
            self._failure = misfit
            self._agree(f"load iteration {step}")
        return {rank: those for rank, (*_, those) in reports.items() if those}

    def _compare(self, reader: ImageReader) -> tuple[bool, list[str], MismatchError | None]:
        """Compare the state to load into with a shard, before any of it is read.

        Returns whether tensors are other parts of global tensors than those of the shard, which
        matters to an elastic load alone; the parts of the shard, where the caller has named some;
        and what does not fit.
        """
        tables, rules = reader.tables[:2], self._options.rules
        if (targets := self._options.targets) is None:
            return False, [], None
        parts: list[str] = []
        if rules.named:
            skeleton, _ = reader.checked_skeleton
            parts = list(read_names(skeleton, self._context.allowed, rules.free) or ())
        if self._context.options.elastic and targets.are_sharded_otherwise(
            *tables, reader.dtensors
        ):
            return True, parts, None
        try:
            reader.match(targets)
        except MismatchError as error:
            return False, parts, error
        return False, parts, None

    def _verify_and_restore(self) -> tuple[Loaded | None, list[_Bad]]:
        """Read this rank's shard from the store, a peer's bytes, or the computed image."""
        rank, images = self._ranks.rank, self._images
        holder = self._senders.get(rank, rank)
        came_from = "own node" if holder == rank else f"peer rank {holder}"
        if rank in self._recovery.slots:
            came_from = self._recovery.groups[rank].kind
        images_here = self._context.images
        if holder == rank and images_here is not None and images_here.is_in_memory(self._mine):
            came_from = "own memory"
        try:
            try:
                state, nbytes = self._restore()
            except (StorageError, CorruptShardError) as error:
                # The texts alone are reported. Errors may refer to the state that was to be filled.
                images.find_bad(error)
                forget_frames(error)
                return None, [self._told(*bad) for bad in images.bad.items()]
        except Exception as error:  # noqa: BLE001 - raised on every rank once reported
            self._failure = incurable(error)
            return None, []
        # What was computed is kept by the caller. Nothing may view what is released.
        self._reader = None
        images.close()
        self._store.release([*self._recovery.arrived.values()])
        self._recovery.arrived, self._senders = {}, {}
        return Loaded(self._checkpoint, state, nbytes, came_from), []

    def _restore(self) -> tuple[Any, int]:
        """Return the state, and the bytes read for it: 0 for one that hooks gave as it is."""
        store, options, images = self._store, self._options, self._images
        is_plain = options == LoadOptions()
        is_here = self._recovery.is_here(self._ranks.rank)
        if isinstance(store, HookStore) and is_plain and not is_here:
            with images.noting(self._mine):
                state, nbytes = store.load(self._mine), 0
        else:
            reader = self._reader or images.open(self._mine)
            images.join(reader)
            state = reader.restore(options.targets, options.map_location)
            nbytes = reader.nbytes_read
        if not store.keeps_images and is_plain:
            state.restore_tensor_device(non_blocking=False)
        return state, nbytes

    def _told(self, shard: ShardIdentity, error: CheckpointingException) -> _Bad:
        forget_frames(error)
        return self._senders.get(shard.rank, self._ranks.rank), shard.rank, described(error)

    # Agree.

    def _agree(self, phase: str, bad: Sequence[_Bad] = ()) -> bool:
        """Report copies that are bad, and take all ranks' bad copies out of the plans."""
        attempt = Attempt()
        attempt.failure, self._failure = self._failure, None
        forget_frames(attempt.failure)
        # What others cannot load is reported with it, so all are waited for.
        reports: dict[int, list[_Bad]] = self._ranks.decide(
            *(phase, attempt.of(bad or None)),
            grace_s=self._ranks.timeout_s,
            **to_all([(int, int, str)]),
        )
        for copies in reports.values():
            for holder, owner, why in copies:
                self._recovery.take_out(Piece(owner), holder, why)
        return not reports

    def _drop_slots(self) -> None:
        self._recovery.drop([self._mine])
        self._senders, self._reader = {}, None
