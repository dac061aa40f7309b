"""Checkpoints on shared storage that outlive the job, committed behind training.

All ranks plan a save together and copy their tensors; then training goes on. What follows is done
by a thread of each rank, which reaches the others over the job's store only. When all have
written, the first rank makes the directory a checkpoint; or all learn at once what went wrong.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, SupportsFloat, SupportsIndex, Unpack

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.profiler import record_function

from localckpt.availability.retention import plain_metrics
from localckpt.errors import CheckpointingException
from localckpt.events.stream import EventStream
from localckpt.failure_texts import shown
from localckpt.global_tier.drain import Drain, Drains
from localckpt.global_tier.folders import SharedCheckpoint, folder_in
from localckpt.global_tier.images import SharedImages
from localckpt.global_tier.load import fill
from localckpt.global_tier.places import Place, place_of
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.global_tier.save import SharedSave
from localckpt.global_tier.save_plan import PlanCache, plan_save
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.ids import CkptID, Generation, ShardIdentity
from localckpt.interrupted import OfOneProcess, closed_by_interrupts
from localckpt.lineage import EpochId, Lineage, LineageKeeper, Point
from localckpt.options import Options, SharedOptions
from localckpt.ranks.deadline import answered
from localckpt.ranks.ranks import Ranks, refused_together, shaped, timeout_in
from localckpt.state_dict.replicated import without_markers
from localckpt.storage.kept_shard import KeptShard
from localckpt.trust import is_orderly

logger = logging.getLogger(__name__)

# For a save under way when a call is interrupted.
_ENDING_S = 1.0


class GlobalCheckpointManager(OfOneProcess):
    """Manager of checkpoints of all ranks together, in torch.distributed.checkpoint's format.

    Every rank makes its manager and calls its methods in the same order as the others. A checkpoint
    can be loaded by any number of ranks with any sharding, and by ``dcp.load``.

    Args:
        root: A directory that all ranks share, or a URL (``s3://bucket/run``) of a store that
            fsspec knows.
        session_id: A name for the training run; runs with different ones may share a root.
        concurrent_bytes: How many bytes a rank that loads reads at once at most, beside its
            tensors.
        thread_count: Into how many files, written side by side, a rank's items are divided.
        separation_hint: Items whose names begin with it go to files of their own.
        local: The manager of the same job's checkpoints on the nodes, if it has one. Then both are
            one lineage: what is saved here records what the job resumed from on the nodes, and what
            :meth:`load` gives is what the nodes' next checkpoints descend from.
        options: See :class:`localckpt.options.Options`.

    Attributes:
        plans: Plans of the saves before; they tell what the last save sent.
        is_to_stop: Tells whether the job is to stop, so that no save begins that has to wait for
            storage. A training loop may set it.
    """

    _noun = "manager"

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str = "",
        *,
        concurrent_bytes: int = 32_000_000_000,
        thread_count: int = 2,
        separation_hint: str | None = None,
        local: LineageKeeper | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        # For rejoin().
        self._made_with: dict[str, Any] = {
            "root": root,
            "session_id": session_id,
            "concurrent_bytes": concurrent_bytes,
            "thread_count": thread_count,
            "separation_hint": separation_hint,
            "local": local,
            **options,
        }
        process_group = options.get("process_group")
        with refused_together("global manager", process_group, timeout_in(options)):
            chosen = Options.of_shared(options)
            timeout = chosen.timeout
            if concurrent_bytes < 1:
                raise CheckpointingException(
                    f"concurrent_bytes is {concurrent_bytes}; it must be above 0"
                )
            self.session_id = session_id
            self.timeout = timeout
            self.is_to_stop: Callable[[], bool] = lambda: False
            allowed = tuple(chosen.safe_globals)
            # The most frequent cause of ranks that do not come to plan a save.
            self._hint = ""
            path = place_of(root)
            self._ranks = Ranks("global manager", process_group, timeout, hint=lambda: self._hint)
            self._root = CheckpointRoot(path, session_id, self._ranks, chosen)
            # Saves end behind training, whatever is called meanwhile.
            self._saving = Ranks("global saves", process_group, timeout)
            draining = Ranks("global drains", process_group, timeout)
            self._writer = FileSystemWriterAsync(
                self._root.path,
                thread_count=thread_count,
                separation_hint=separation_hint,
                staging_threads=chosen.staging_threads,
                timeout_s=timeout,
                safe_globals=allowed,
                _own_folders=True,
            )
            self._local = local
            self._events = chosen.events or EventStream()
            self._drains = Drains(draining, self._root, allowed, self._events)
            self.read_only = chosen.read_only
            self._newest_iteration = -1
            self._save: SharedSave | None = None

            self._make_reader = partial(
                CachedMetadataFileSystemReader,
                concurrent_bytes=concurrent_bytes,
                process_group=process_group,
                safe_globals=allowed,
                timeout_s=timeout,
            )
            super().__init__()

    def __repr__(self) -> str:
        return shown(self, self.session_id, self._root.path)

    @property
    def rank(self) -> int:
        """This process's rank among those of the job."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._ranks.world_size

    @property
    def root(self) -> Place:
        """Directory (a ``Path``) of this session's checkpoints, or their place in a store."""
        return self._root.path

    @property
    def plans(self) -> PlanCache:
        return self._writer.plans

    # Saving.

    @closed_by_interrupts
    def save(
        self,
        state_dict: dict[str, Any],
        iteration: SupportsIndex,
        is_async: bool = False,
        on_commit: Callable[[], None] | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> None:
        """Save the state of all ranks; all ranks call it.

        What is saved is the value that the state has at the call. A save that comes while the one
        before is being written waits for it.

        What several ranks have under one name, and no DTensor or ShardedTensor says to be a part,
        is saved once, so it must be equal: it is compared by digests, and a difference fails the
        save. Comparing takes one reading of all that other ranks have as well.

        Args:
            state_dict: This rank's part: DTensors, ShardedTensors, tensors that are the same on all
                ranks, objects, and ``Stateful`` values.
            iteration: Its number, above that of the save before.
            is_async: Return as soon as the tensors are copied; else when it is committed. What goes
                wrong from there on is raised by :meth:`check_for_errors`,
                :meth:`wait_until_finished`, the next save, or :meth:`close`.
            on_commit: Called on the first rank, in another thread, when the checkpoint is there.
            metrics: Numbers that are recorded with it, such as a loss, for ``Retention(best=...)``
                and for whoever looks. Those of the first rank count.

        Raises:
            MismatchError: Ranks have different values under one name; of the save before, or
                raised as what goes wrong behind training is.
            CheckpointingException: The save before failed, and some rank has not been told yet;
                nothing was begun. Or this one did. The same on every rank; older checkpoints are as
                they were, and training may go on and save again.
            PeerLostError: Some rank did not come in time.
        """
        self._require_writable()
        self.count_attempt()
        iteration = operator.index(iteration)
        if iteration < 0:
            raise CheckpointingException(f"iteration is {iteration}; it must not be negative")
        plain = plain_metrics(metrics)
        began = time.monotonic()
        with self._events.noting_failure("save", began, iteration, "shared"):
            self._require_usable()
            called = time.monotonic()
            lineage = None if self._local is None else self._local.lineage_of_save(iteration)
            planner, begun = self._plan(state_dict, iteration, lineage)
        self._saving.prepare()
        with self.plans.kept_if_all_is_well():
            epoch, save_id, number = begun
            folder = folder_in(self.root, iteration, epoch).unfinished(save_id, is_drain=False)
            save = self._save = SharedSave(
                BegunSave(folder, save_id, lineage=self._root.lineage, metrics=plain),
                number,
                ranks=self._saving,
                root=self._root,
                writer=self._writer,
                on_commit=on_commit,
                on_over=self._free_if_left,
                began=began,
                called=called,
                events=self._events,
            )
        save.begin(planner)
        try:
            if not is_async:
                self.wait_until_finished()
        finally:
            save.record.note_blocking()

    def check_for_errors(self) -> None:
        """Raise what the last save failed with, once; waits for nothing.

        Every rank is told, though not all at the same step.
        """
        if self._save is not None and self._save.over.is_set():
            self._take_error()

    @closed_by_interrupts
    def wait_until_finished(self) -> None:
        """Return when the last save is committed on all ranks, or raise what it failed with."""
        self._await_last_save()
        self._take_error()

    # Draining.

    def drain(
        self,
        shard: KeptShard,
        *,
        rate_limit: float | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> Drain:
        """Begin to make a checkpoint of what the ranks keep on their nodes; all ranks call it.

        The managers of the nodes call it in their ``promote``, and finalize the drain. It is
        carried out behind training, beside saves.

        Args:
            shard: This rank's shard, which stays until the drain is over.
            rate_limit: Bytes a second that this rank writes at most; ``None`` for any number.
            metrics: Numbers that are recorded with it, as for :meth:`save`.

        Raises:
            CheckpointingException: This manager is closed, or the shard is another rank's.
        """
        self._require_writable()
        self._require_open()
        return self._drains.begin(shard, rate_limit, plain_metrics(metrics))

    @closed_by_interrupts
    def hurry(self) -> None:
        """Let this rank's drains, and those to come, keep to no rate, as the job ends soon."""
        self._drains.hurry()

    def unfinished_drains(self) -> list[int]:
        """List iterations whose drains were begun and cut off, oldest first; all ranks call it."""
        self._require_usable()
        return self._root.unfinished_drains()

    def note_drained(self, iteration: int) -> None:
        """Note on every rank that a drain is committed: what is saved next is newer."""
        self._newest_iteration = max(self._newest_iteration, iteration)
        if self._local is None:
            self.note_progress(iteration)

    # Keeping.

    @closed_by_interrupts
    def pin(self, iteration: int) -> None:
        """Have every job keep a checkpoint until it is unpinned; all ranks call it.

        It waits for the last save. The pin lies beside the checkpoint, so later runs and other
        tools respect it. May be called twice.

        Args:
            iteration: The checkpoint; the newest one, if several have the number.

        Raises:
            NoReplicasAvailableError: There is no such checkpoint.
            StorageError: It could not be written; the same on every rank, as all errors.
            PeerLostError: Some rank did not come in time.
        """
        self._change_pin("pin", iteration)

    @closed_by_interrupts
    def unpin(self, iteration: int) -> None:
        """Leave a checkpoint to the retention again; all ranks call it. May be called twice.

        Raises:
            NoReplicasAvailableError, StorageError, PeerLostError: As for :meth:`pin`.
        """
        self._change_pin("unpin", iteration)

    # Loading.

    @closed_by_interrupts
    def find_latest(self, *, on_nodes: int | None = None) -> int:
        """Iteration of the newest checkpoint, or ``-1``; all ranks call it.

        Args:
            on_nodes: Newest iteration on the nodes, -1 for none, of a program that has checkpoints
                there, too. What the job went back from to begin its epoch is then left out.

        Raises:
            StorageError: The root cannot be read; the same on every rank.
            PeerLostError: A rank did not come in time.
        """
        self._require_usable()
        with self._events.timed("find"):
            found = self._root.find_latest(self._lineage_on_nodes(on_nodes))
        return -1 if found is None else found.folder.iteration

    @closed_by_interrupts
    def all_iterations(self, *, on_nodes: int | None = None) -> list[int]:
        """Iterations that :meth:`load` can give, in the order in which a restart tries them.

        All ranks call it, and get the same.

        Args:
            on_nodes: As for :meth:`find_latest`.

        Raises:
            StorageError: The root cannot be read; the same on every rank.
            PeerLostError: A rank did not come in time.
        """
        self._require_usable()
        return self._root.iterations(self._lineage_on_nodes(on_nodes))

    @closed_by_interrupts
    def go_back(self, iteration: int) -> None:
        """Give up all that is newer: the job goes on from an older one, here or on the nodes.

        All ranks call it.

        Raises:
            StorageError: The root cannot be read; the same on every rank.
            PeerLostError: Some rank did not come in time.
        """
        self._require_writable()
        self._require_usable()
        self._newest_iteration = iteration
        points = self._ranks.commit(
            f"go back to iteration {iteration}",
            lambda: None,
            lambda _: [[*point.epoch, point.iteration] for point in self._root.go_back(iteration)],
            read=shaped([(int, int, int)]),
        )
        if self._local is not None:
            self._local.leave([Point(EpochId(number, draw), at) for number, draw, at in points])

    def _lineage_on_nodes(self, iteration: int | None) -> Lineage | None:
        if self._local is None or iteration is None:
            return None
        return self._local.lineage_of(iteration)

    @closed_by_interrupts
    def load(
        self,
        *,
        into: dict[str, Any],
        iteration: int | None = None,
        partial: bool = False,
        allow_dtype_change: bool = False,
    ) -> tuple[dict[str, Any], CkptID]:
        """Fill a state in place, with whatever sharding it has; all ranks call it.

        Every block is verified as it is read. If the newest checkpoint turns out damaged, all ranks
        take the one before; not with ``partial``, where values of both would be left.

        Args:
            into: The state to fill. Tensors on the meta device are made; objects are replaced.
            iteration: The checkpoint; ``None`` for the newest.
            partial: Leave values that the checkpoint has not as they are, leave out saved values
                that no rank gives, and fill those of which a drain found different ones with the
                first rank's; all of it is logged.
            allow_dtype_change: Convert values to the dtypes of the tensors that they fill.

        Returns:
            The state, and its ID, as the managers of the nodes return them.

        Raises:
            NoReplicasAvailableError: There is no such checkpoint.
            MismatchError: The state does not fit: values are in the checkpoint and not in the state
                of any rank, or the reverse, or have another shape or dtype; or tensors that share
                memory were saved with different values; or a drain found different values on the
                ranks. Nothing was changed.
            CorruptShardError, StorageError: It is damaged, or cannot be read. As every error it is
                raised on every rank, and the state may be partly filled.
        """
        given = without_markers(into)
        self._prepare_load()
        with self._events.timed("read"):
            found = self._root.load_newest(
                iteration,
                lambda found: fill(
                    *(given, found, self._reader_of(found), self._ranks),
                    is_partial=partial,
                    allow_dtype_change=allow_dtype_change,
                ),
                # With a partial load, values of both would be left.
                tries_others=iteration is None and not partial,
            )
        self._go_on_from(found)
        return into, CkptID(found.folder.iteration, self.rank, self.session_id)

    @contextmanager
    def images(self, iteration: int) -> Iterator[tuple[SharedImages, ShardIdentity]]:
        """Context in which all ranks load the images of a checkpoint that was drained.

        What is saved after it goes on from the checkpoint, unless an error leaves the context.

        Yields:
            The images, and the identity of the first one.

        Raises:
            MismatchError: The checkpoint was saved by other means, and has no images.
            NoReplicasAvailableError, CorruptShardError, StorageError: As for :meth:`load`.
        """
        self._prepare_load()
        with self._events.timed("read"):
            found = self._root.load_newest(iteration, lambda _: None, tries_others=False)
            # While all are here, since they share it.
            images = SharedImages(found, self._reader_of(found).read_metadata().storage_data)

            def look(_: Any) -> list[Any]:
                first = images.identity(0)
                return [first.session_id, *first.generation, first.world_size]

            session_id, epoch, sequence, world_size = self._ranks.commit(
                f"look at the images of iteration {iteration}",
                *(lambda: None, look),
                read=shaped((str, int, int, int)),
            )
            generation = Generation(epoch, sequence)
            yield images, ShardIdentity(session_id, generation, iteration, 0, world_size)
        self._go_on_from(found)

    def _reader_of(self, found: SharedCheckpoint) -> CachedMetadataFileSystemReader:
        return self._make_reader(
            found.folder.path,
            save_id=found.record.save_id,
            metadata_digest=found.record.metadata_digest,
        )

    def _prepare_load(self) -> None:
        self._require_usable()
        try:
            self._take_error()
        except CheckpointingException as error:
            logger.error("the last save had failed: %s", error)

    def _go_on_from(self, found: SharedCheckpoint) -> None:
        """Have what is saved from here on belong to a new epoch, newer than all there is."""
        self._newest_iteration = found.folder.iteration
        self._root.go_on_from(found)
        if self.rank == 0:
            self._root.resuming.begin(found.folder.as_checkpoint)
        if self._local is not None and not self.read_only:
            self._local.begin(found.folder.iteration, lineage=found.record.lineage)

    def note_progress(self, iteration: int) -> None:
        """Note that the job has got on, to a checkpoint that is complete; asks no other rank."""
        self._root.resuming.note_progress(iteration)

    def forget_attempts(self) -> None:
        """Count no start so far as one in vain: the job has got on by its own account."""
        if self.rank == 0:
            self._root.resuming.forget()

    def count_attempt(self) -> None:
        """Count this start from here on, as the managers of the nodes do on request."""
        if self.rank == 0 and not self._is_fork:
            self._root.resuming.count()

    def take_back_attempt(self) -> None:
        """Do not count this start as one in vain, as the managers of the nodes do on request."""
        if not self._is_fork:
            self._root.resuming.take_back()

    def close(self) -> None:
        """Wait for the last save, then free everything. May be called twice.

        Raises:
            CheckpointingException: What the last save failed with; everything is freed.
        """
        if self._closed or self._is_fork:
            return
        if self._has_left:
            self._closed = True
            return
        if self._abort.is_set() or self._interrupted:
            # An interrupt may have come into the closing after another one.
            self._close_alone()
            return
        if is_orderly(sys.exception()):
            self.take_back_attempt()
        try:
            self.wait_until_finished()
        finally:
            self._closed = True
            self._drains.close(is_in_step=True)
            self._writer.close()
            self._root.close()
            self._ranks.close()
            self._saving.close()

    def rejoin(self, *, process_group: dist.ProcessGroup | None = None) -> None:
        """Work with the ranks of the process group as they are now; all of them call it.

        As :meth:`CheckpointManager.rejoin`, after that of a manager of the nodes that this one was
        given as ``local``. A save or a drain that was not finalized is given up.

        Args:
            process_group: Takes the place of the group of a manager that was given one.

        Raises:
            MismatchError, StorageError, PeerLostError: As when a manager is made. Rejoin again, or
                close.
        """
        self._begin_rejoin()
        if not self._has_left:
            if (save := self._save) is not None:
                # It holds the root as long as it goes on.
                save.over.wait(_ENDING_S)
            self._close_alone()
        given = self._made_with
        if process_group is not None:
            given = {**given, "process_group": process_group}
        is_to_stop = self.is_to_stop
        try:
            GlobalCheckpointManager.__init__(self, **given)
            self.is_to_stop = is_to_stop
        except BaseException:
            self._closed = False
            self._fail_rejoin()
            raise

    def _end_waits(self) -> None:
        self._ranks.cut_off()
        self._saving.cut_off()
        self._drains.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not (self._closed or self._is_fork):
            if is_orderly(error):
                self.take_back_attempt()
            self._close_alone()

    def _close_interrupted(self, call: str) -> None:
        if not (self._closed or self._is_fork):
            self._interrupted = call
            if (save := self._save) is not None:
                save.begin_if_interrupted()
                # A new manager finds the root held as long as a save goes on.
                save.over.wait(_ENDING_S)
            self._close_alone()

    def _close_alone(self) -> None:
        # The others may never come: a save under way goes on, and frees everything at its end.
        self._closed = True
        self._ranks.abandon()
        self._drains.close(is_in_step=False)
        if self._save is not None:
            self._save.leave()
        if self._save is None or self._save.over.is_set():
            self._leave()

    def _free_if_left(self) -> None:
        if self._closed:
            self._leave()

    def _leave(self) -> None:
        self._writer.close()
        self._root.close(is_alone=True)
        self._saving.abandon()

    def _plan(
        self, state_dict: dict[str, Any], iteration: int, lineage: Lineage | None
    ) -> tuple[DefaultSavePlanner, list[Any]]:
        planner = DefaultSavePlanner()

        def prepare(plan: SavePlan) -> SavePlan:
            # Here, where all ranks learn of it: each may have been told of the last save, or not.
            self._take_error()
            if iteration <= self._newest_iteration:
                raise CheckpointingException(
                    f"iteration {iteration} cannot be saved after {self._newest_iteration}: "
                    f"numbers must grow. To go back, load() the checkpoint to go on from"
                )
            if plan != self.plans.local:
                # Before training goes on, with what could never be loaded.
                self._writer.require_loadable(plan, planner)
            return plan

        self._hint = f" Was save({iteration}) called on every rank?"
        with record_function("localckpt.global.plan"):
            begun = plan_save(
                self._ranks,
                without_markers(state_dict),
                planner,
                *(self._writer, self.plans),
                what=f"the save of iteration {iteration}",
                order=iteration,
                tag=[self.session_id, iteration],
                begin=lambda: self._begin(iteration, lineage),
                begun=(int, str, int),
                prepare=prepare,
            )
        self._hint = ""
        return planner, begun

    def _change_pin(self, what: str, iteration: int) -> None:
        self._require_writable()
        self._require_usable()
        self._root.change_pin(what, operator.index(iteration))

    def _begin(self, iteration: int, lineage: Lineage | None) -> list[Any]:
        """On the first rank, when all have planned: what all are to know of the save."""
        begin = partial(self._root.begin, iteration, lineage)
        begun = answered("begin a save in", self._root.path, self.timeout, begin, self.is_to_stop)
        number = self._saving.rounds
        self._saving.rounds += 1
        return [begun.folder.epoch, begun.save_id, number]

    def _await_last_save(self) -> None:
        """Wait for the last save, and leave its error to whoever asks for it."""
        self._check_usable(also_closed=True)
        if self._save is not None:
            # Writing has no deadline of its own, and the decision one for each of its two waits.
            self._save.wait(4 * self.timeout)

    def _take_error(self) -> None:
        save, self._save = self._save, None
        if save is not None:
            if save.committed:
                self._newest_iteration = save.iteration
                if self._local is None:
                    self.note_progress(save.iteration)
            if save.error is not None:
                raise save.error

    def _require_usable(self) -> None:
        """Refuse a call of a closed manager; in others the last save comes first."""
        self._require_open()
        self._await_last_save()

    def _require_open(self) -> None:
        self._check_usable()
        self._ranks.require_same_world()

    def _require_writable(self) -> None:
        if self.read_only:
            raise CheckpointingException(
                "this manager was made with read_only=True: it loads, and saves nothing"
            )
