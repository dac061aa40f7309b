"""Drains: shards that the nodes keep become a shared checkpoint.

    chosen -> planned -> written -> committed | failed

Each rank drains its own shard behind training. One that its node lacks, or whose copy there is
damaged, is drained by a rank whose node has a copy. What a drain that was cut off has written is
not written again by the next attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
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
from localckpt.global_tier.data_files import gathered, verify_data_file, write_data_file
from localckpt.global_tier.drain_items import (
    ImageItems,
    Merged,
    choose_readers,
    fingerprint,
    merge_plans,
)
from localckpt.global_tier.folders import folder_in
from localckpt.global_tier.images import envelope_name
from localckpt.global_tier.metadata import RankPlan, pack, pickled_metadata, unpack
from localckpt.global_tier.objects import Retries
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.global_tier.save import BackgroundSave
from localckpt.global_tier.save_plan import require_same
from localckpt.global_tier.staging import FILE_NBYTES, ItemReader, item_nbytes
from localckpt.ids import ShardIdentity
from localckpt.lineage import Lineage
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.ranks.values import Message
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused
from localckpt.storage.buffers import PrivateBuffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.kept_shard import KeptShard
from localckpt.threads import Latch, SerialThread
from localckpt.waiting import Pacer

logger = logging.getLogger(__name__)

# Decisions of an attempt at most: whose shards are where, who reads those that are not on their own
# nodes, the plan, and the commit.
_DECISIONS = 4
# After each attempt but the last one a damaged copy is in quarantine.
_ATTEMPTS = 4
# Shared storage may be slower than the rate that is asked for.
_SLOWER = 2.0
# Whole digest blocks. The rate is kept from piece to piece.
_PIECE_NBYTES = 8 << 20


class Drain(BackgroundSave):
    """One drain. ``ranks`` are used by one drain after another, and by nobody else."""

    def __init__(
        self,
        shard: KeptShard,
        number: int,
        rate_limit: float | None,
        metrics: Mapping[str, float],
        ranks: Ranks,
        root: CheckpointRoot,
        safe_globals: tuple[Any, ...],
        events: EventStream,
    ) -> None:
        super().__init__(shard.identity.iteration, None, ranks, root, events)
        self._not_done = f"iteration {self.iteration} was not drained"
        self._written_nbytes = self._kept_nbytes = 0
        self._shard, self._identity = shard, shard.identity
        self._objects, self._allowed = ItemReader(safe_globals), SafeGlobals(safe_globals)
        # Those that this rank drains, by the ranks that saved them.
        self._items: dict[int, ImageItems] = {}
        self._number = number
        self._rate_limit, self._metrics = rate_limit, metrics
        self._pacer = Pacer(rate_limit)
        self._is_hurried = False
        self._stopped = Latch()
        self._began = time.monotonic()
        # On the first rank: why nodes cannot give the shards of their ranks.
        self._lacking: dict[int, str] = {}
        self._merged: Merged | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is over, or raise its error. A TimeoutError leaves it going on."""
        if not self.over.wait(timeout_s):
            raise TimeoutError(f"it was not over after {timeout_s:g} s")
        if self.error is not None:
            raise self.error

    def hurry(self) -> None:
        """Keep to no rate from now on, in any thread."""
        self._is_hurried = True
        self._pacer.lift()

    def stop(self) -> None:
        """End it soon, from any thread; what it has written stays for the next attempt."""
        self._stopped.set()
        self._pacer.stop()
        # The ranks may be those of the drain before, which goes on.
        if self._thread is not None and not self.over.is_set():
            self._ranks.abort()

    # In the thread.

    def _note_end(self) -> None:
        # The plans of all ranks, and the objects of this rank's images.
        merged, self._merged = self._merged, None
        self._items.clear()
        details: dict[str, Any] = {"kept_bytes": self._kept_nbytes}
        if self._rate_limit is not None:
            details["rate_limit"] = self._rate_limit
        if merged is not None and merged.unequal:
            details["unequal"] = merged.unequal[:10]
        outcome: Outcome | None = None
        if isinstance(self.error, PeerLostError) and not self.committed:
            outcome = "stopped" if self._stopped.is_set() else "unknown"
        self._events.emit(
            "drain",
            began=self._began,
            step=self.iteration,
            nbytes=self._written_nbytes,
            tier="shared",
            outcome=outcome,
            error=self.error,
            details=details,
        )

    def _is_resumed(self, error: BaseException) -> bool:
        # Ranks that were lost, or stopped, come again; anything else would fail again.
        return isinstance(error, PeerLostError) or self._stopped.is_set()

    def _save(self) -> str:
        self._began = time.monotonic()
        self._ranks.wait_again()
        if self._stopped.is_set():
            self._ranks.abort()
        self._ranks.rounds = _ATTEMPTS * _DECISIONS * self._number
        damage = ""
        for left in reversed(range(_ATTEMPTS)):
            self._pacer = Pacer(self._rate_limit)
            # In this order: another thread tells this pacer, or has called the method before.
            if self._is_hurried:
                self._pacer.lift()
            if self._stopped.is_set():
                self._pacer.stop()
            try:
                with record_function("localckpt.global.drain"):
                    self._drain(self._choose_shards())
                break
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
        self.committed = True
        return ""

    # Chosen.

    def _choose_shards(self) -> list[int]:
        """The ranks whose shards this rank drains."""
        own = self._ranks.rank
        lacking: list[int] = self._ranks.commit(
            *(f"look for the shards of iteration {self.iteration}", self._look, self._find_lacking),
            kind="look for shards",
            on_failure=self._pacer.stop,
            read=shaped([int]),
        )
        if not lacking:
            return [own]
        verdict: Any = self._ranks.commit(
            f"find copies of the shards of iteration {self.iteration}",
            lambda: [owner for owner in lacking if self._why_unreadable(owner) is None],
            lambda readable: self._choose_readers(lacking, readable),
            kind="find copies of shards",
            on_failure=self._pacer.stop,
            read=shaped((object, list | None)),
        )
        return [*([] if own in lacking else [own]), *(verdict[1] or [])]

    def _look(self) -> list[Any]:
        self._check()
        identity = self._identity
        tag = [
            *(identity.session_id, identity.iteration, list(identity.generation)),
            *(identity.world_size, self._rate_limit),
        ]
        return [tag, self._why_unreadable(self._ranks.rank)]

    def _why_unreadable(self, owner: int) -> str | None:
        """Why this node cannot give a shard, with those that hold parts of its tensors."""
        try:
            self._shard_of(owner).use(lambda image: None)
        except (CorruptShardError, StorageError) as error:
            if isinstance(error, CorruptShardError) and owner == self._ranks.rank:
                raise
            return str(error)
        return None

    def _shard_of(self, owner: int) -> KeptShard:
        identity = self._identity.checkpoint.shard(owner, self._identity.session_id)
        return replace(self._shard, identity=identity)

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

    def _drain(self, owners: list[int]) -> None:
        verdict: Any = self._ranks.commit(
            f"plan the drain of iteration {self.iteration}",
            *(lambda: self._plan(owners), self._merge),
            kind="plan a drain",
            on_failure=self._pacer.stop,
            read=shaped(((int, str, bool, int, [str]), Message | None)),
        )
        (epoch, save_id, is_there, nbytes, unequal), part = verdict
        if is_there:
            return
        if not self._ranks.is_root:
            folder = folder_in(self._root.path, self.iteration, epoch)
            self._begun = BegunSave(folder.unfinished(save_id, is_drain=True), save_id)
        plans = {} if part is None else unpack(part.data, dict, self._allowed)
        # Ranks write different numbers of bytes, at one rate.
        slower_s = 0.0 if self._rate_limit is None else _SLOWER * nbytes / self._rate_limit
        timeout_s = self._ranks.timeout_s + slower_s
        retries = Retries(Deadline.after(timeout_s).at, self._check)
        self._ranks.commit(
            f"drain iteration {self.iteration}",
            *(lambda: self._write(plans, unequal, retries), self._commit),
            kind="drain",
            timeout_s=timeout_s,
            on_failure=self._pacer.stop,
        )

    # Planned.

    def _plan(self, owners: list[int]) -> Message:
        self._items = {}
        plans = {owner: self._shard_of(owner).use(self._list_items) for owner in owners}
        lineages = (items.lineage for items in self._items.values() if items.lineage is not None)
        lineage = next(lineages, None)
        return Message(None if lineage is None else lineage.to_json(), pack(plans))

    def _list_items(self, image: ImageReader) -> RankPlan:
        items = self._items[image.identity.rank] = ImageItems(image, self._objects)
        return items.rank_plan(image, self._check)

    @collection_paused()
    def _merge(self, reports: list[Message]) -> PerRank:
        """On the first rank: divide what is to be written, and begin or go on."""
        told = [unpack(report.data, dict, self._allowed) for report in reports]
        by_owner = {owner: plan for plans in told for owner, plan in plans.items()}
        self._merged = merged = merge_plans([by_owner[owner] for owner in range(len(by_owner))])
        lineages = (report.record for report in reports if report.record is not None)
        lineage = next(map(Lineage.from_json, lineages), None)
        if merged.unequal:
            logger.info(
                "iteration %d: values that differ between ranks are drained in the image of each "
                "rank, and as the first rank has them: %s",
                *(self.iteration, ", ".join(merged.unequal[:10])),
            )
        save_id = _save_id(self._identity, merged)
        begun = self._root.begin_drain(self.iteration, save_id, lineage, self._metrics)
        is_there = begun.is_there
        sizes = [
            sum(item_nbytes(item) for item in plan.items if item.tensor_data is not None)
            for plan in merged.plans
        ]
        most = max(sum(sizes[owner] for owner in plans) for plans in told)
        common = [begun.folder.epoch, save_id, is_there, most, merged.unequal]
        if is_there:
            logger.info("%s is there: nothing is drained", begun.folder.path)
            return PerRank(common, {})
        self._begun = begun
        parts = {
            rank: Message(None, pack({owner: merged.plans[owner] for owner in plans}))
            for rank, plans in enumerate(told)
            if plans
        }
        return PerRank(common, parts)

    # Written.

    def _write(
        self, plans: dict[int, SavePlan], unequal: Sequence[str], retries: Retries
    ) -> Message:
        assert self._begun is not None, "it is planned"
        began, path = time.monotonic(), self._begun.folder.path
        if self._ranks.is_root:
            self._root.sweep(self._begun)
        self._written_nbytes = self._kept_nbytes = 0
        results: list[WriteResult] = []
        envelopes: list[list[int]] = []
        with closing(PrivateBuffer(_PIECE_NBYTES)) as buffer:
            memory = buffer.view[:_PIECE_NBYTES]
            write = partial(self._write_file, self._begun, memory, retries)
            for owner, plan in plans.items():
                items = self._items[owner]
                put = partial(items.write, plan=plan, unequal=unequal, write=write)
                placed, nbytes = self._shard_of(owner).use(put)
                results += placed
                envelopes.append([owner, nbytes])
        with storage_errors("make durable", path):
            path.sync()
        seconds = time.monotonic() - began
        logger.info(
            "drained to %s: wrote %.3f GB in %.3f s, %.3f GB were there",
            *(path, self._written_nbytes / 1e9, seconds, self._kept_nbytes / 1e9),
        )
        return Message(envelopes, pack(results))

    def _write_file(
        self,
        begun: BegunSave,
        memory: memoryview,
        retries: Retries,
        name: str,
        nbytes: int | None,
        content: Callable[[], Iterable[bytes | memoryview]],
    ) -> None:
        """Write a file by way of ``memory``, unless an attempt before has, where it has a size."""
        path, save_id = begun.folder.path / name, begun.save_id
        if nbytes is not None:
            # Where nothing can be read it is written.
            with suppress(CorruptShardError, StorageError):
                verify_data_file(path, save_id, nbytes, lambda _: self._before_write(0))
                self._kept_nbytes += nbytes
                return
        write_data_file(
            *(path, save_id, lambda: gathered(content(), memory), retries),
            before_write=self._before_write,
        )

    def _before_write(self, nbytes: int) -> None:
        self._check()
        self._pacer.wait(nbytes)
        self._check()
        self._written_nbytes += nbytes

    def _check(self) -> None:
        if self._pacer.stopped.is_set():
            raise PeerLostError(
                f"the drain of iteration {self.iteration} was stopped: begun again, it "
                f"goes on where it was. The checkpoint on the nodes is as it was"
            )

    # Committed.

    @collection_paused()
    def _commit(self, reports: list[Message]) -> None:
        assert self._merged is not None, "it is planned"
        places: Iterable[WriteResult] = chain.from_iterable(
            unpack(report.data, list, self._allowed) for report in reports
        )
        metadata, files = pickled_metadata(self._merged.metadata, places)
        for report in reports:
            envelopes = shaped([(int, int)])(report.record)
            files |= {envelope_name(owner): nbytes for owner, nbytes in envelopes}
        self._commit_files(metadata, files, self._merged.unequal)


def _save_id(identity: ShardIdentity, merged: Merged) -> str:
    """The same for each attempt to drain a checkpoint, so that its files can be told."""
    what = (
        *(identity.session_id, identity.generation, identity.iteration, identity.world_size),
        *(fingerprint(merged), FILE_NBYTES, torch.__version__),
    )
    return xxhash.xxh3_128_hexdigest(repr(what).encode())


class Drains:
    """Drains of one manager, carried out one after another; all ranks begin the same ones."""

    def __init__(
        self,
        ranks: Ranks,
        root: CheckpointRoot,
        safe_globals: tuple[Any, ...],
        events: EventStream,
    ) -> None:
        self._ranks = ranks
        self._path = root.path
        self._new = partial(Drain, ranks=ranks, root=root, safe_globals=safe_globals, events=events)
        self._thread = SerialThread("localckpt-drain")
        self._begun = 0
        self._is_hurried = False
        self._under_way: list[Drain] = []

    def begin(
        self, shard: KeptShard, rate_limit: float | None, metrics: Mapping[str, float]
    ) -> Drain:
        """Begin a drain, or put it behind those that are not over."""
        ranks, identity = self._ranks, shard.identity
        if (identity.rank, identity.world_size) != (ranks.rank, ranks.world_size):
            raise CheckpointingException(
                f"the manager of the nodes is rank {identity.rank} of {identity.world_size}, and "
                f"the one of shared storage rank {ranks.rank} of {ranks.world_size}: make both "
                f"with the same process_group. Nothing was drained"
            )
        if rate_limit is not None and rate_limit <= 0:
            raise CheckpointingException(
                f"rate_limit is {rate_limit}; it must be above 0 bytes a second, or None"
            )
        ranks.prepare()
        self._under_way = [drain for drain in self._under_way if not drain.task.done()]
        drain = self._new(shard, self._begun, rate_limit, metrics)
        self._begun += 1
        self._under_way.append(drain)
        if self._is_hurried:
            drain.hurry()
        try:
            self._thread.submit(drain.task)
        except RuntimeError as error:
            drain.task.call_off()
            raise CheckpointingException(
                f"this process cannot start a thread ({error}): nothing was drained"
            ) from error
        return drain

    def hurry(self) -> None:
        """Let the drains of this rank, and those to come, keep to no rate: the job ends soon."""
        self._is_hurried = True
        for drain in self._under_way:
            drain.hurry()

    def abort(self) -> None:
        """End what is under way, from any thread, without the other ranks."""
        for drain in tuple(self._under_way):
            drain.stop()
        self._ranks.cut_off()

    def close(self, *, is_in_step: bool) -> None:
        """End what is under way, and free everything; ``is_in_step`` with the other ranks."""
        for drain in self._under_way:
            if not drain.task.done():
                logger.error("the drain of iteration %d is ended by close()", drain.iteration)
                drain.stop()
        # Whatever ends a drain is looked at before each piece that it writes.
        if not self._thread.close(self._ranks.timeout_s):
            logger.error("a drain does not end: is %s stuck?", self._path)
        self._under_way = []
        if is_in_step:
            self._ranks.close()
        else:
            self._ranks.abandon()
