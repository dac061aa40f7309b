"""One drain of one rank: shards that the nodes keep become a shared checkpoint.

    chosen -> planned -> written -> committed | failed

All of it is done behind training, from the images on the nodes, by a thread of each rank. Each rank
drains its own shard. One that its node lacks, or whose copy there is damaged, is drained by a rank
whose node has a copy. The methods of :class:`Drain` stand in this order. What a drain that was cut
off has written is not written again by the next attempt.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.profiler import record_function

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    PeerLostError,
    StorageError,
)
from localckpt.events.event import Outcome
from localckpt.events.stream import EventStream
from localckpt.failure_texts import ranks_named, said_by
from localckpt.global_tier.drain_files import FILE_NBYTES, DrainFiles
from localckpt.global_tier.drain_items import RankPlan
from localckpt.global_tier.drain_plan import (
    Merged,
    choose_readers,
    fingerprint,
    merge_plans,
    own_key,
    unsettled,
)
from localckpt.global_tier.drain_shard import DrainedShard
from localckpt.global_tier.messages import Written, pack, unpack
from localckpt.global_tier.metadata import FORMAT_VERSION
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.global_tier.save_plan import require_same
from localckpt.global_tier.staging import item_nbytes
from localckpt.global_tier.write_items import ItemReader
from localckpt.ids import ShardIdentity
from localckpt.lineage import Lineage
from localckpt.pacing import Pacer
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.ranks.values import Message
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused
from localckpt.storage.failures import storage_errors
from localckpt.storage.kept_shard import KeptShard
from localckpt.storage.write import sync_folder
from localckpt.threads import Latch, Task

__all__ = ["Drain"]

logger = logging.getLogger(__name__)

# Each attempt takes five decisions at most: whose shards are where, who reads those that are not on
# their own nodes, the plan, whether parts of one name are equal, and the commit.
_DECISIONS = 5
# After each attempt but the last one a damaged copy is in quarantine.
_ATTEMPTS = 4
# Shared storage may be slower than the rate that is asked for.
_SLOWER = 2.0


class Drain:
    """One drain.

    Args:
        shard: This rank's shard.
        number: Number of the drain, the same on all ranks.
        rate_limit: Bytes a second that this rank writes at most; ``None`` for any number.
        ranks: The ranks of the job; used by one drain after another, and by nobody else.
        root: The checkpoints.
        safe_globals: Classes and functions that objects in the state may name, beyond torch's own.
        events: Is told how it went.

    Attributes:
        iteration: Iteration of the checkpoint.
        committed: True once the checkpoint is on shared storage, as far as this rank knows.
        unequal: Keys whose values differ between ranks; known on the first rank.
        written_nbytes: Bytes that this rank has written.
        kept_nbytes: Bytes of files that an attempt before had written.
    """

    def __init__(
        self,
        shard: KeptShard,
        number: int,
        rate_limit: float | None,
        ranks: Ranks,
        root: CheckpointRoot,
        safe_globals: Iterable[Any],
        events: EventStream,
    ) -> None:
        self.iteration = shard.identity.iteration
        self.committed = False
        self.unequal: list[str] = []
        self.written_nbytes = self.kept_nbytes = 0
        self._shard = shard
        self._number = number
        self._rate_limit = rate_limit
        self._ranks = ranks
        self._root = root
        allowed = tuple(safe_globals)
        self._objects, self._allowed = ItemReader(allowed), SafeGlobals(allowed)
        self._events = events
        self._pacer = Pacer(rate_limit)
        self._stopped = Latch()
        self._is_running = False
        # On the first rank: why nodes cannot give the shards of their ranks, and the plans.
        self._lacking: dict[int, str] = {}
        self._told: list[tuple[dict[int, RankPlan], Lineage | None]] = []
        self._merged: Merged | None = None
        self._drain: BegunSave | None = None
        self.task: Task[None] = Task(self._run)
        """The work, for the thread that carries it out."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is over.

        Args:
            timeout_s: The longest wait, in seconds; ``None`` for as long as it takes.

        Raises:
            CheckpointingException: What it failed with, the same on every rank.
            TimeoutError: It is not over in time, and goes on.
        """
        self.task.result(timeout_s)

    def stop(self) -> None:
        """End it soon, from any thread; what it has written stays for the next attempt."""
        self._stopped.set()
        self._pacer.stop()
        # The ranks may be those of the drain before, which goes on.
        if self._is_running:
            self._ranks.stop_waiting()

    # In the thread.

    def _run(self) -> None:
        began = time.monotonic()
        error: BaseException | None = None
        self._is_running = True
        try:
            with record_function("localckpt.global.drain"):
                self._carry_out()
        except CheckpointingException as failed:
            error = failed
            raise
        except BaseException as failed:
            error = failed
            raise CheckpointingException(
                f"iteration {self.iteration} was not drained: {failed!r}"
            ) from failed
        finally:
            self._is_running = False
            # The plans of all ranks.
            self._merged, self._told = None, []
            details: dict[str, Any] = {"kept_bytes": self.kept_nbytes}
            if self._rate_limit is not None:
                details["rate_limit"] = self._rate_limit
            if self.unequal:
                details["unequal"] = self.unequal[:10]
            outcome: Outcome | None = None
            if isinstance(error, PeerLostError) and not self.committed:
                outcome = "stopped" if self._stopped.is_set() else "unknown"
            self._events.emit(
                "drain",
                began=began,
                step=self.iteration,
                nbytes=self.written_nbytes,
                tier="shared",
                outcome=outcome,
                error=error,
                details=details,
            )
            # Else the error would keep itself by this variable.
            del error

    def _carry_out(self) -> None:
        ranks = self._ranks
        ranks.wait_again()
        if self._stopped.is_set():
            ranks.stop_waiting()
        ranks.rounds = _ATTEMPTS * _DECISIONS * self._number
        fails_again = False
        try:
            self._attempt()
        except BaseException as error:
            # Ranks that were lost, or stopped, come again; anything else would fail again.
            fails_again = not (isinstance(error, PeerLostError) or self._stopped.is_set())
            raise
        finally:
            # The others write no more once they have read the verdict.
            ranks.see_off()
            if self._drain is not None and ranks.is_root:
                if fails_again and not self.committed:
                    self._root.roll_back(self._drain)
                self._root.end_drain(self._drain)
        if ranks.is_root and self._drain is not None:
            self._prune(self._drain)

    def _attempt(self) -> None:
        """Drain from the copies that are good; all ranks begin the same attempts."""
        damage = ""
        for left in reversed(range(_ATTEMPTS)):
            self._pacer = Pacer(self._rate_limit)
            # In this order: stop() in another thread stops this pacer, or was called before.
            if self._stopped.is_set():
                self._pacer.stop()
            try:
                self._drain_shards(self._choose_shards())
                return
            except CorruptShardError as error:
                # That copy is in quarantine now.
                if not left:
                    raise
                damage = str(error)
                logger.warning("iteration %d: looking for another copy", self.iteration)
            except NoReplicasAvailableError as error:
                if not damage:
                    raise
                raise CorruptShardError(f"{damage} Also: {error}") from error

    def _prune(self, drain: BegunSave) -> None:
        began = time.monotonic()
        if removed := self._root.prune(drain):
            details = {"removed": removed}
            self._events.emit(
                "pruned", began=began, step=self.iteration, tier="shared", details=details
            )

    # Chosen.

    def _choose_shards(self) -> dict[int, DrainedShard]:
        """The shards that this rank drains, by the ranks that saved them."""
        ranks = self._ranks
        lacking: list[int] = ranks.act(
            f"look for the shards of iteration {self.iteration}",
            self._look,
            self._find_lacking,
            kind="look for shards",
            read=shaped([int]),
            in_vain=self._pacer.stop,
        )
        mine = [] if ranks.rank in lacking else [ranks.rank]
        if lacking:
            found: Any = ranks.act(
                f"find copies of the shards of iteration {self.iteration}",
                lambda: [owner for owner in lacking if self._why_unreadable(owner) is None],
                lambda readable: self._choose_readers(lacking, readable),
                kind="find copies of shards",
                read=shaped((object, list | None)),
                in_vain=self._pacer.stop,
            )
            mine += found[1] or []
        return {owner: DrainedShard(self._shard_of(owner), self._objects) for owner in mine}

    def _look(self) -> list[Any]:
        self._check()
        identity = self._shard.identity
        tag = [
            *(identity.session_id, identity.iteration, list(identity.generation)),
            *(identity.world_size, self._rate_limit),
        ]
        return [tag, self._why_unreadable(self._ranks.rank)]

    def _why_unreadable(self, owner: int) -> str | None:
        """Why this node cannot give a shard, with those that hold parts of its tensors."""
        try:
            self._shard_of(owner).use(lambda image: None)
        except StorageError as error:
            return str(error)
        except CorruptShardError as error:
            if owner == self._ranks.rank:
                raise
            return str(error)
        return None

    def _shard_of(self, owner: int) -> KeptShard:
        identity = self._shard.identity
        return replace(self._shard, identity=identity.checkpoint.shard(owner, identity.session_id))

    def _find_lacking(self, reports: list[Any]) -> list[int]:
        """On the first rank: the ranks whose nodes cannot give their shards."""
        require_same([tag for tag, _ in reports], self._ranks.global_ranks)
        self._lacking = {rank: why for rank, (_, why) in enumerate(reports) if why is not None}
        return list(self._lacking)

    def _choose_readers(self, lacking: list[int], readable: list[list[int]]) -> PerRank:
        readers = choose_readers(lacking, readable)
        if gone := sorted(set(lacking).difference(*readers.values())):
            why = said_by({self._ranks.global_ranks[rank]: self._lacking[rank] for rank in gone})
            raise NoReplicasAvailableError(
                f"no node can give the shards of "
                f"{ranks_named(self._ranks.global_ranks[rank] for rank in gone)} ({why}). Nothing "
                f"was drained. A drain computes no shards from other pieces: load() this "
                f"checkpoint first, which puts them on their nodes again, or promote another"
            )
        for reader, owners in readers.items():
            logger.info("rank %d drains the shards of %s, whose nodes lack them", reader, owners)
        return PerRank(None, readers)

    def _drain_shards(self, shards: dict[int, DrainedShard]) -> None:
        ranks = self._ranks
        planned: Any = ranks.act(
            f"plan the drain of iteration {self.iteration}",
            lambda: self._plan(shards),
            self._merge,
            kind="plan a drain",
            read=shaped((list | None, Message | None)),
            in_vain=self._pacer.stop,
        )
        common, part = planned
        if common is None:
            asked: dict[int, list[MetadataIndex]] = {}
            if part is not None:
                asked = unpack(part.data, dict, self._allowed)
            planned = ranks.act(
                f"compare parts of one name in iteration {self.iteration}",
                lambda: self._compare(shards, asked),
                self._merge_compared,
                kind="compare parts",
                read=shaped(((int, str, bool, int), Message | None)),
                in_vain=self._pacer.stop,
            )
            common, part = planned
        epoch, save_id, is_there, nbytes = common
        if is_there:
            self.committed = True
            return
        if not ranks.is_root:
            self._drain = self._root.drain(self.iteration, epoch, save_id)
        plans: dict[int, SavePlan] = unpack(part.data, dict, self._allowed)
        # Ranks write different numbers of bytes, at one rate.
        slower_s = 0.0 if self._rate_limit is None else _SLOWER * nbytes / self._rate_limit
        ranks.act(
            f"drain iteration {self.iteration}",
            lambda: self._write(shards, plans),
            self._commit,
            kind="drain",
            timeout_s=ranks.timeout_s + slower_s,
            in_vain=self._pacer.stop,
        )
        self.committed = True

    # Planned.

    def _plan(self, shards: dict[int, DrainedShard]) -> Message:
        plans = {owner: shard.plan(self._check) for owner, shard in shards.items()}
        lineage = shards[0].lineage if 0 in shards else None
        return Message(None if lineage is None else lineage.to_json(), pack(plans))

    @collection_paused()
    def _merge(self, reports: list[Message]) -> PerRank:
        """On the first rank: ask for what must be compared, or divide what is to be written."""
        self._told = [
            (
                unpack(report.data, dict, self._allowed),
                None if report.record is None else Lineage.from_json(report.record),
            )
            for report in reports
        ]
        by_owner = self._plans_by_owner()
        lacking = unsettled(by_owner)
        if not lacking:
            return self._divide(by_owner)
        asked = {
            rank: {owner: lacking[owner] for owner in plans if owner in lacking}
            for rank, (plans, _) in enumerate(self._told)
        }
        return PerRank(None, {r: Message(None, pack(of)) for r, of in asked.items() if of})

    def _compare(
        self, shards: dict[int, DrainedShard], asked: dict[int, list[MetadataIndex]]
    ) -> Message:
        digests = {o: shards[o].digests(indices, self._check) for o, indices in asked.items()}
        return Message(None, pack(digests))

    def _merge_compared(self, reports: list[Message]) -> PerRank:
        """On the first rank: as :meth:`_merge`, once ranks have told what it asked for."""
        by_owner = self._plans_by_owner()
        for report in reports:
            for owner, digests in unpack(report.data, dict, self._allowed).items():
                by_owner[owner].digests.update(digests)
        return self._divide(by_owner)

    def _plans_by_owner(self) -> list[RankPlan]:
        by_owner = {owner: plan for plans, _ in self._told for owner, plan in plans.items()}
        return [by_owner[owner] for owner in range(len(by_owner))]

    def _divide(self, by_owner: list[RankPlan]) -> PerRank:
        """Divide what is to be written, and begin or go on."""
        told, self._told = self._told, []
        merged = merge_plans(by_owner)
        if merged.unequal:
            self.unequal = merged.unequal
            logger.warning(
                "iteration %d: values that differ between ranks are drained under a key for each "
                "rank (as %s), and as the first rank has them: %s",
                *(self.iteration, own_key(merged.unequal[0], 1), ", ".join(merged.unequal[:10])),
            )
        lineage = next(lineage for plans, lineage in told if 0 in plans)
        save_id = _save_id(self._shard.identity, merged)
        drain, is_there = self._root.begin_drain(self.iteration, save_id, lineage)
        parts = {
            rank: {owner: merged.plans[owner] for owner in plans}
            for rank, (plans, _) in enumerate(told)
        }
        most = max(sum(map(_nbytes, plans.values())) for plans in parts.values())
        common = [drain.folder.epoch, save_id, is_there, most]
        if is_there:
            logger.info("%s is there: nothing is drained", drain.folder.path)
            return PerRank(common, {})
        self._drain, self._merged = drain, merged
        return PerRank(common, {r: Message(None, pack(p)) for r, p in parts.items()})

    # Written.

    def _write(self, shards: dict[int, DrainedShard], plans: dict[int, SavePlan]) -> Message:
        assert self._drain is not None, "it is planned"
        began = time.monotonic()
        files = DrainFiles(self._drain.path, self._drain.save_id, self._before_write)
        try:
            written = [shard.write(plans[owner], files) for owner, shard in shards.items()]
            if any(part.files for part in written):
                with storage_errors("make durable", self._drain.path):
                    sync_folder(self._drain.path)
        finally:
            self.written_nbytes, self.kept_nbytes = files.written_nbytes, files.kept_nbytes
            files.close()
        seconds = time.monotonic() - began
        logger.info(
            "drained to %s: wrote %.3f GB in %.3f s, %.3f GB were there",
            *(self._drain.path, self.written_nbytes / 1e9, seconds, self.kept_nbytes / 1e9),
        )
        return Message(None, pack(written))

    def _before_write(self, nbytes: int) -> None:
        self._check()
        self._pacer.wait(nbytes)
        self._check()

    def _check(self) -> None:
        if self._pacer.is_stopped:
            raise PeerLostError(
                f"the drain of iteration {self.iteration} was stopped: promote it again, and it "
                f"goes on where it was. The checkpoint on the nodes is as it was"
            )

    # Committed.

    @collection_paused()
    def _commit(self, reports: list[Message]) -> None:
        """On the first rank: make it a checkpoint."""
        assert self._merged is not None, "it is planned"
        assert self._drain is not None, "it is planned"
        written: list[Written] = [
            part for report in reports for part in unpack(report.data, list, self._allowed)
        ]
        metadata = self._merged.metadata
        metadata.version = FORMAT_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for part in written for result in part.results
        }
        files = {name: nbytes for part in written for name, nbytes in part.files.items()}
        self._root.commit(self._drain, pickle.dumps(metadata), files, self._ranks.world_size)
        self.committed = True


def _nbytes(plan: SavePlan) -> int:
    return sum(item_nbytes(item) for item in plan.items if item.tensor_data is not None)


def _save_id(identity: ShardIdentity, merged: Merged) -> str:
    """The same for each attempt to drain a checkpoint, so that its files can be told."""
    what = (
        *(identity.session_id, identity.generation, identity.iteration, identity.world_size),
        *(fingerprint(merged), FILE_NBYTES, torch.__version__),
    )
    return xxhash.xxh3_128_hexdigest(repr(what).encode())
