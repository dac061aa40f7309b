"""One save of one rank: planned, staged, written, and then committed or failed, as on all ranks.

:class:`Save` is the manager's: training waits until the tensors are staged, and a thread of each
rank does the rest. The two functions are the ends of a save whose middle runs in whatever queue the
job has: planning, and finishing. Their names and the order of their arguments are those of
Megatron-Core and NVRx.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.profiler import record_function

from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.events.saves import SaveRecord
from localckpt.events.stream import EventStream
from localckpt.global_tier.messages import Written
from localckpt.global_tier.metadata import FORMAT_VERSION
from localckpt.global_tier.replicas import CommonValues, differing, judge_differing
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.global_tier.save_plan import PlannedSave, plan_save
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.global_tier.write_files import FileWrite, write_files
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.ranks.values import Message
from localckpt.threads import Latch, Task

if TYPE_CHECKING:
    from localckpt.global_tier.storage_writer import FileSystemWriterAsync

__all__ = ["Save", "save_state_dict_async_finalize", "save_state_dict_async_plan"]

logger = logging.getLogger(__name__)


class Save:
    """One save, which all ranks have planned.

    Args:
        begun: The save, as the first rank has begun it.
        planned: What this rank writes, and on the first rank what the checkpoint will hold.
        number: Number of the decision of ``ranks`` in which it ends.
        ranks: Those of the job. Nothing else is decided with them.
        root: The checkpoints.
        writer: Stages what this rank writes.
        on_commit: Called on the first rank once the checkpoint is there.
        on_over: Called on each rank when everybody can know that the save is over.
        began: When the trainer asked for it, by ``time.monotonic()``.
        called: When the save before was over, by the same clock.
        events: Stream for the end of the save.
        is_compared: Tells by name and value whether all ranks that have a value must have it equal.

    Attributes:
        committed: The checkpoint is there, as far as this rank knows.
        error: What the save failed with.
        over: Set when it is, well or badly.
    """

    def __init__(
        self,
        begun: BegunSave,
        planned: PlannedSave,
        number: int,
        *,
        ranks: Ranks,
        root: CheckpointRoot,
        writer: FileSystemWriterAsync,
        on_commit: Callable[[], None] | None,
        on_over: Callable[[], None],
        began: float,
        called: float,
        events: EventStream,
        is_compared: Callable[[str, Any], bool],
    ) -> None:
        self.iteration = begun.folder.iteration
        self.committed = False
        self.error: CheckpointingException | None = None
        self.over = Latch()
        self._begun = begun
        self._planned = planned
        self._number = number
        self._ranks = ranks
        self._root = root
        self._writer = writer
        self._plans = writer.plans
        self._on_commit = on_commit
        self._on_over = on_over
        self._is_compared = is_compared
        self._common: CommonValues | None = None
        self._process = os.getpid()
        self._writes: list[FileWrite] = []
        self._staging_error: BaseException | None = None
        self._task: Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._called, self._planned_at = called, time.monotonic()
        self._staged_at = 0.0
        self._events = events
        self._record = SaveRecord(events, self.iteration, began, "shared")
        self._record.waited_s = called - began

    def stage(self, planner: SavePlanner) -> None:
        """Copy this rank's tensors. What goes wrong is told to all ranks, by what follows.

        Raises:
            BaseException: An interrupt.
        """
        try:
            with record_function("localckpt.global.stage"):
                self._writer.reset(self._begun.path)
                self._writer.save_id = self._begun.save_id
                self._writer.prepare_write_data(planner.finish_plan(self._planned.plan), planner)
                self._common = CommonValues(
                    self._plans.local,
                    self._plans.common,
                    self._ranks.global_ranks,
                    planner,
                    self._is_compared,
                )
                self._writes = self._writer.preload_tensors()
        except BaseException as error:
            if os.getpid() != self._process:
                # A fork that ends here: the save goes on in the process that was forked.
                raise
            self._staging_error = error
            if not isinstance(error, Exception):
                self.start()
                raise

    def start(self) -> None:
        """Have the rest done by a thread, also if nothing could be staged."""
        self._staged_at = self._record.went_on = time.monotonic()
        self._record.copied = self._planned_at, self._staged_at
        self._record.nbytes = self._nbytes
        if self._staging_error is not None:
            self._writer.give_up(self._staging_error)
        self._task = Task(self._run)
        try:
            # Not a daemon: the interpreter must not take the memory away that is being written.
            self._task.start("localckpt-global", daemon=False)
        except RuntimeError:
            # No thread can be had: training waits for this save.
            self._task.run()

    def note_blocking(self) -> None:
        """Note that training goes on."""
        self._record.note_blocking()

    def wait(self, timeout_s: float) -> None:
        """Return when it is over, well or badly.

        Raises:
            CheckpointingException: It is not in time.
        """
        if not (self.over.is_set() or (self._task is not None and self._task.begins())):
            # An interrupt came first: the other ranks wait to be told.
            self._staging_error = CheckpointingException("it was interrupted")
            self.start()
        if threading.current_thread() is self._thread:
            raise CheckpointingException(
                "on_commit called the manager that waits for it: leave word for the training loop"
            )
        patience = self._ranks.patience(f"finish the save of iteration {self.iteration}")
        if not patience.wait(self.over.wait, timeout_s, self.waits_for):
            raise CheckpointingException(
                f"the save of iteration {self.iteration} is not over after {timeout_s:g} s: is "
                f"{self._root.path} stuck? Older checkpoints are as they were"
            )

    def waits_for(self) -> str:
        """Return in words whom or what it waits for, in any thread."""
        return self._ranks.awaits() or str(self._root.path)

    @property
    def _nbytes(self) -> int:
        return sum(write.nbytes for write in self._writes)

    # In the thread.

    def _run(self) -> None:
        self._thread = threading.current_thread()
        try:
            self._carry_out()
        except CheckpointingException as error:
            self.error = error
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the outcome
            self.error = CheckpointingException(
                f"{self._begun.folder.path} was not saved: {error!r}"
            )
            self.error.__cause__ = error
        finally:
            self._note_end()
            self.over.set()
            self._on_over()

    def _note_end(self) -> None:
        # Another rank may know more than one that has lost it.
        is_unknown = not self.committed and isinstance(self.error, PeerLostError)
        self._record.note_end(
            durable=time.monotonic() if self.committed else None,
            tier="shared",
            outcome="unknown" if is_unknown else None,
            error=None if self.committed else self.error,
        )

    def _carry_out(self) -> None:
        """Write, decide with the others, and commit or give up together.

        Raises:
            CheckpointingException: Some rank could not write, or the first could not commit; the
                same on every rank. Or it is committed, and ``on_commit`` failed.
            PeerLostError: Some rank did not come in time.
        """
        try:
            self._ranks.rounds = self._number
            with self._plans.kept_if_all_is_well():
                what = f"save iteration {self.iteration}"
                problem, groups = self._ranks.act(
                    what, self._write, self._commit, read=shaped((str, dict))
                )
                if groups:
                    self._raise_differing(groups)
        except BaseException:
            if self._ranks.is_root and not self.committed:
                self._root.roll_back(self._begun)
            raise
        finally:
            self._ranks.see_off()
        self.committed = True
        if self._ranks.is_root:
            began = time.monotonic()
            if removed := self._root.prune(self._begun):
                details = {"removed": removed}
                self._events.emit(
                    "pruned", began=began, step=self.iteration, tier="shared", details=details
                )
        if problem:
            raise CheckpointingException(problem)

    def _write(self) -> Message:
        if isinstance(self._staging_error, Exception):
            raise self._staging_error
        if self._staging_error is not None:
            raise CheckpointingException("it was interrupted") from self._staging_error
        if self._ranks.is_root:
            self._root.sweep(self._begun)
        with record_function("localckpt.global.write"):
            results = self._writer.results(write_files(self._writes))
        self._log_written()
        files = {write.path.name: write.nbytes for write in self._writes}
        assert self._common is not None, "everything is staged"
        return self._plans.report_written(Written(results, files), self._common.folded())

    def _raise_differing(self, groups: dict[str, list[list[int]]]) -> None:
        common = self._common
        assert common is not None, "everything is staged"
        # One rank of each group of equal ranks speaks for it.
        asked = {set_id: [ranks[0] for ranks in equal] for set_id, equal in groups.items()}
        self._ranks.decide(
            f"name what differs in iteration {self.iteration}",
            lambda: common.told(asked, self._ranks.rank),
            partial(judge_differing, self.iteration, groups),
        )

    def _commit(self, reports: list[Message]) -> tuple[str, dict[str, list[list[int]]]]:
        """On the first rank: make it a checkpoint, unless values under one name differ.

        Returns:
            What went wrong after the commit, and the sets of ranks whose values differ.
        """
        if groups := differing([message.record for message in reports]):
            return "", groups
        written, as_before = self._plans.merge_written(reports)
        files = {name: nbytes for part in written for name, nbytes in part.files.items()}
        metadata = self._pickle_metadata(written, as_before)
        self._root.commit(self._begun, metadata, files, self._ranks.world_size)
        self.committed = True
        try:
            if self._on_commit is not None:
                self._on_commit()
        except Exception as error:  # noqa: BLE001 - raised on every rank
            return f"iteration {self.iteration} is committed, but on_commit failed: {error!r}", {}
        return "", {}

    def _pickle_metadata(self, written: list[Written], as_before: bool) -> bytes:
        """Pickle the checkpoint's metadata, unless it is the same as that of the save before."""
        metadata, plans = self._planned.metadata, self._plans
        assert metadata is not None, "the first rank has planned"
        if not (as_before and plans.pickled and plans.pickled[0] is metadata):
            metadata.version = FORMAT_VERSION
            metadata.storage_data = {
                result.index: result.storage_data for part in written for result in part.results
            }
            plans.pickled = (metadata, pickle.dumps(metadata))
        return plans.pickled[1]

    def _log_written(self) -> None:
        nbytes = self._nbytes / 1e9
        plan, stage = self._planned_at - self._called, self._staged_at - self._planned_at
        write = time.monotonic() - self._staged_at
        logger.info(
            "wrote %s: %.3f GB, planned in %.3f s, staged in %.3f s (%.2f GB/s), written in %.3f s "
            "(%.2f GB/s)",
            *(self._begun.folder.path, nbytes, plan, stage, nbytes / max(stage, 1e-9)),
            *(write, nbytes / max(write, 1e-9)),
        )


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    *,
    timeout_s: float = 300.0,
) -> tuple[FileSystemWriterAsync, Metadata | None, Ranks]:
    """Plan a save and prepare this rank's part of it; all ranks call it.

    With a writer that has saved before, and is turned to its next checkpoint by ``reset``, nothing
    is planned again unless some rank's structure changed.

    Args:
        state_dict: This rank's state; values may be ``Stateful``.
        storage_writer: Writes it.
        process_group: The ranks that save; ``None`` for all.
        coordinator_rank: Which of them writes the metadata.
        planner: Made for this save; torch's default one by default.
        timeout_s: How long the ranks wait for each other, in seconds.

    Returns:
        What :func:`save_state_dict_async_finalize` is to be called with: the writer, the metadata
        on the coordinator, and the ranks.

    Raises:
        CheckpointingException: It failed on some rank; the same on every rank. What fails after the
            ranks have agreed is raised when the save is finalized.
    """
    if not isinstance(storage_writer, FileSystemWriterAsync):
        raise CheckpointingException(
            f"storage_writer is a {type(storage_writer).__name__}; it must be localckpt's "
            f"FileSystemWriterAsync"
        )
    planner = planner or DefaultSavePlanner()
    ranks = Ranks("global save", process_group, timeout_s, root=coordinator_rank)
    try:
        save = plan_save(
            ranks,
            state_dict,
            planner,
            storage_writer,
            what=f"the save to {storage_writer.path}",
            tag=str(storage_writer.path),
            begin=lambda: storage_writer.save_id,
            prepare=storage_writer.prepare_local_plan,
        )
    except BaseException:
        ranks.close()
        raise
    storage_writer.save_id = save.begun
    try:
        storage_writer.prepare_write_data(planner.finish_plan(save.plan), planner)
    except Exception as error:  # noqa: BLE001 - raised on every rank when it is finalized
        storage_writer.give_up(error)
    return storage_writer, save.metadata, ranks


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: Ranks
) -> None:
    """Make a checkpoint of what all ranks have written; all ranks call it when theirs is done.

    Args:
        storage_writer, global_metadata, dist_wrapper: What :func:`save_state_dict_async_plan` gave.

    Raises:
        CheckpointingException: Writing failed on some rank; the same on every rank, with its text.
        PeerLostError: Some rank did not come in time.
    """
    plans = storage_writer.plans

    def finish(reports: list[Message]) -> None:
        assert global_metadata is not None, "the coordinator has planned"
        written, _ = plans.merge_written(reports)
        results = [storage_writer.named(part.results) for part in written]
        storage_writer.finish(global_metadata, results)

    try:
        with plans.kept_if_all_is_well():
            dist_wrapper.act(
                f"finish the checkpoint {storage_writer.path}",
                lambda: plans.report_written(
                    Written(storage_writer.retrieve_unnamed_results(), {})
                ),
                finish,
                kind="finish the checkpoint",
            )
    except BaseException as error:
        storage_writer.give_up(error)
        raise
    finally:
        dist_wrapper.see_off()
        dist_wrapper.close()
