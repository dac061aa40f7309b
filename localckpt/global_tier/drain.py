"""One drain of one rank: a shard that the node keeps becomes a part of a shared checkpoint.

    planned -> written -> committed | failed

All of it is done behind training, from the image on the node, by a thread of each rank. The methods
of :class:`Drain` stand in this order. What a drain that was cut off has written is not written
again by the next attempt.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.profiler import record_function

from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.events.event import Outcome
from localckpt.events.stream import EventStream
from localckpt.global_tier.drain_files import FILE_NBYTES, DrainFiles, lay_out_in_order
from localckpt.global_tier.drain_plan import (
    ImageItems,
    Merged,
    RankPlan,
    fingerprint,
    merge_plans,
    own_key,
)
from localckpt.global_tier.metadata import FORMAT_VERSION, StorageInfo
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.global_tier.save_plan import Written, require_same
from localckpt.global_tier.staging import FileLayout, Slot, item_nbytes
from localckpt.global_tier.write_items import ItemReader, frame_of
from localckpt.ids import ShardIdentity
from localckpt.lineage import Lineage
from localckpt.memory.host_memory import memory_at
from localckpt.pacing import Pacer
from localckpt.ranks.ranks import PerRank, Ranks
from localckpt.ranks.values import Message
from localckpt.state_dict.lazy_image import LazyImage
from localckpt.storage.failures import storage_errors
from localckpt.storage.kept_shard import KeptShard
from localckpt.storage.write import sync_folder
from localckpt.threads import Latch, SerialThread, Task

__all__ = ["Drain", "Drains"]

logger = logging.getLogger(__name__)

# Each drain takes two decisions: one on the plan, one on the commit.
_DECISIONS = 2
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
        self._objects = ItemReader(safe_globals)
        self._events = events
        self._pacer = Pacer(rate_limit)
        self._stopped = Latch()
        self._is_running = False
        self._lineage: Lineage | None = None
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
            self._merged = None
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
        fails_again = False
        try:
            ranks.rounds = _DECISIONS * self._number
            items: list[ImageItems] = []
            planned: Any = ranks.act(
                f"plan the drain of iteration {self.iteration}",
                lambda: self._plan(items),
                self._merge,
                kind="plan a drain",
                in_vain=self._pacer.stop,
            )
            (epoch, save_id, is_there, nbytes), part = planned
            if is_there:
                self.committed = True
                return
            if self._drain is None:
                self._drain = self._root.drain(self.iteration, epoch, save_id)
            plan: SavePlan = pickle.loads(part.data)
            ranks.rounds = _DECISIONS * self._number + 1
            # Ranks write different numbers of bytes, at one rate.
            slower_s = 0.0 if self._rate_limit is None else _SLOWER * nbytes / self._rate_limit
            ranks.act(
                f"drain iteration {self.iteration}",
                lambda: self._write(items[0], plan),
                self._commit,
                kind="drain",
                timeout_s=ranks.timeout_s + slower_s,
                in_vain=self._pacer.stop,
            )
            self.committed = True
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

    def _prune(self, drain: BegunSave) -> None:
        began = time.monotonic()
        if removed := self._root.prune(drain):
            details = {"removed": removed}
            self._events.emit(
                "pruned", began=began, step=self.iteration, tier="shared", details=details
            )

    # Planned.

    def _plan(self, items: list[ImageItems]) -> Message:
        def list_items(image: LazyImage) -> tuple[ImageItems, RankPlan]:
            self._lineage = image.identity.lineage
            found = ImageItems(image)
            return found, found.rank_plan(image, self._check)

        self._check()
        found, mine = self._shard.use(list_items)
        items.append(found)
        identity = self._shard.identity
        tag = [
            *(identity.session_id, identity.iteration, list(identity.generation)),
            *(identity.world_size, self._rate_limit),
        ]
        return Message(tag, pickle.dumps(mine))

    def _merge(self, reports: list[Message]) -> PerRank:
        """On the first rank: divide what is to be written, and begin or go on."""
        require_same([report.record for report in reports], self._ranks.global_ranks)
        merged = merge_plans([pickle.loads(report.data) for report in reports])
        if merged.unequal:
            self.unequal = merged.unequal
            logger.warning(
                "iteration %d: values that differ between ranks are drained under a key for each "
                "rank (as %s), and as the first rank has them: %s",
                *(self.iteration, own_key(merged.unequal[0], 1), ", ".join(merged.unequal[:10])),
            )
        save_id = _save_id(self._shard.identity, merged)
        drain, is_there = self._root.begin_drain(self.iteration, save_id, self._lineage)
        most = max(_nbytes(plan) for plan in merged.plans)
        common = [drain.folder.epoch, save_id, is_there, most]
        if is_there:
            logger.info("%s is there: nothing is drained", drain.folder.path)
            return PerRank(common, {})
        self._drain, self._merged = drain, merged
        plans = {rank: Message(None, pickle.dumps(p)) for rank, p in enumerate(merged.plans)}
        return PerRank(common, plans)

    # Written.

    def _write(self, items: ImageItems, plan: SavePlan) -> Message:
        assert self._drain is not None, "it is planned"
        began = time.monotonic()
        files = DrainFiles(self._drain.path, self._drain.save_id, self._before_write)
        try:
            written = self._shard.use(lambda image: _Writing(image, items, plan, self).run(files))
            if written.files:
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
        return Message(None, pickle.dumps(written))

    def file_prefix(self) -> str:
        """Beginning of the names of this rank's files."""
        return f"__{self._ranks.rank}_"

    def read_object(self, item: WriteItem, items: ImageItems) -> memoryview:
        """Bytes of an object, as a save of the state would write them."""
        planner, key = items.planner, item.index.fqn
        plain = key.removesuffix(own_key("", self._ranks.rank))
        if key not in planner.state_dict and plain in planner.state_dict:
            planner.state_dict[key] = planner.state_dict[plain]
        value = self._objects.read(item, planner)
        if isinstance(value, torch.Tensor):
            head, tail = frame_of(value.dtype, value.shape)
            data = value.contiguous()
            return memoryview(head + bytes(_memory_of(data)) + tail)
        return value

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

    def _commit(self, reports: list[Message]) -> None:
        """On the first rank: make it a checkpoint."""
        assert self._merged is not None, "it is planned"
        assert self._drain is not None, "it is planned"
        written: list[Written] = [pickle.loads(report.data) for report in reports]
        metadata = self._merged.metadata
        metadata.version = FORMAT_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for part in written for result in part.results
        }
        files = {name: nbytes for part in written for name, nbytes in part.files.items()}
        self._root.commit(self._drain, pickle.dumps(metadata), files, self._ranks.world_size)
        self.committed = True


class _Writing:
    """The writing of one rank's part, from one copy of its shard."""

    def __init__(self, image: LazyImage, items: ImageItems, plan: SavePlan, drain: Drain) -> None:
        self._image = image
        self._items = items
        self._plan = plan
        self._drain = drain
        self._suffix = own_key("", image.identity.rank)

    def run(self, files: DrainFiles) -> Written:
        starts = {
            number: self._start(item)
            for number, item in enumerate(self._plan.items)
            if self._place_key(item) is not None
        }
        results: list[WriteResult] = []
        sizes: dict[str, int] = {}
        for file in lay_out_in_order(self._plan, starts, self._drain.file_prefix()):
            if file.slots:
                sizes[file.name] = files.write_tensors(file, self._values)
                places = [(slot.number, slot.offset, slot.end - slot.offset) for slot in file.slots]
            else:
                places = self._write_objects(files, file, sizes)
            results += [
                WriteResult(
                    self._plan.items[number].index, nbytes, StorageInfo(file.name, at, nbytes)
                )
                for number, at, nbytes in places
            ]
        return Written(results, sizes)

    def _write_objects(
        self, files: DrainFiles, file: FileLayout, sizes: dict[str, int]
    ) -> list[tuple[int, int, int]]:
        others = [
            self._drain.read_object(self._plan.items[number], self._items) for number in file.others
        ]
        sizes[file.name] = files.write_objects(file, others)
        places, end = [], 0
        for number, content in zip(file.others, others, strict=True):
            places.append((number, end, len(content)))
            end += len(content)
        return places

    def _place_key(self, item: WriteItem) -> MetadataIndex | None:
        """Index under which the place of an item's tensor is known; ``None`` for an object."""
        places, index = self._items.places, item.index
        if index in places:
            return index
        plain = MetadataIndex(index.fqn.removesuffix(self._suffix), index.offset)
        return plain if plain in places and index.fqn.endswith(self._suffix) else None

    def _start(self, item: WriteItem) -> int:
        key = self._place_key(item)
        assert key is not None
        return self._image.start_of(self._items.places[key].number)

    def _values(self, slot: Slot) -> Iterator[memoryview]:
        key = self._place_key(self._plan.items[slot.number])
        assert key is not None
        number, part = self._items.places[key]
        if not slot.nbytes:
            return
        run = self._image.run_of(number)
        if run is not None and part is None:
            yield from self._image.read(*run)
            return
        tensor = self._image.tensor(number).detach()
        for dim, (start, end) in enumerate(part or ()):
            tensor = tensor.narrow(dim, start, end - start)
        tensor = tensor.contiguous()
        yield _memory_of(tensor)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return memory_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else memoryview(b"")


def _nbytes(plan: SavePlan) -> int:
    return sum(item_nbytes(item) for item in plan.items if item.tensor_data is not None)


def _save_id(identity: ShardIdentity, merged: Merged) -> str:
    """The same for each attempt to drain a checkpoint, so that its files can be told."""
    what = (
        *(identity.session_id, identity.generation, identity.iteration, identity.world_size),
        *(fingerprint(merged), FILE_NBYTES, torch.__version__),
    )
    return xxhash.xxh3_128_hexdigest(repr(what).encode())


class Drains:
    """Drains of one manager, carried out one after another; all ranks begin the same ones.

    Args:
        ranks: The ranks of the job; used by nobody else.
        root: The checkpoints.
        safe_globals: As for :class:`Drain`.
        events: Is told of each drain.
    """

    def __init__(
        self,
        ranks: Ranks,
        root: CheckpointRoot,
        safe_globals: Iterable[Any],
        events: EventStream,
    ) -> None:
        self._ranks = ranks
        self._root = root
        self._safe_globals = tuple(safe_globals)
        self._events = events
        self._thread = SerialThread("localckpt-drain")
        self._process = os.getpid()
        self._begun = 0
        self._under_way: list[Drain] = []

    def begin(self, shard: KeptShard, rate_limit: float | None) -> Drain:
        """Begin a drain, or put it behind those that are not over.

        Raises:
            CheckpointingException: No thread can be had.
        """
        self._under_way = [drain for drain in self._under_way if not drain.task.done()]
        drain = Drain(
            *(shard, self._begun, rate_limit, self._ranks, self._root, self._safe_globals),
            events=self._events,
        )
        self._begun += 1
        self._under_way.append(drain)
        try:
            self._thread.submit(drain.task)
        except RuntimeError as error:
            drain.stop()
            raise CheckpointingException(
                f"this process cannot start a thread ({error}): nothing was drained"
            ) from error
        return drain

    def close(self, *, is_in_step: bool) -> None:
        """End what is under way, and free everything. May be called twice.

        Args:
            is_in_step: Whether the other ranks close theirs, too.
        """
        if os.getpid() != self._process:
            return
        for drain in self._under_way:
            if not drain.task.done():
                logger.error("the drain of iteration %d is ended by close()", drain.iteration)
                drain.stop()
        # Whatever ends a drain is looked at before each piece that it writes.
        until = time.monotonic() + self._ranks.timeout_s
        if all(drain.task.wait(until - time.monotonic()) for drain in self._under_way):
            self._thread.close()
        else:
            logger.error("a drain does not end: is %s stuck?", self._root.path)
        self._under_way = []
        if is_in_step:
            self._ranks.close()
        else:
            self._ranks.abandon()
