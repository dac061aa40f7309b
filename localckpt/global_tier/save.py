"""One save of one rank: planned, staged, written, and then committed or failed, as on all ranks.

:class:`SharedSave` is the manager's: training waits until the tensors are staged, and a thread of
each rank does the rest. The two functions are the ends of a save whose middle runs in whatever
queue the job has: planning, and finishing. Their names and the order of their arguments are those
of Megatron-Core and NVRx.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.profiler import record_function

from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.events.saves import SaveRecord
from localckpt.events.stream import EventStream
from localckpt.global_tier.background import BackgroundSave
from localckpt.global_tier.data_files import FileWrite, write_files
from localckpt.global_tier.replicas import CommonValues, differing, judge_differing
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.global_tier.save_plan import PlannedSave, plan_save
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.ranks.values import Message
from localckpt.threads import Task

logger = logging.getLogger(__name__)


class SharedSave(BackgroundSave):
    """One save, which all ranks have planned.

    ``began`` and ``called`` are times by ``time.monotonic()``: when the trainer asked for it, and
    when the save before was over.
    """

    _begun: BegunSave

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
    ) -> None:
        super().__init__(begun.folder.iteration, begun, ranks, root, events, on_over)
        self._planned = planned
        self._number = number
        self._writer = writer
        self._plans = writer.plans
        self._on_commit = on_commit
        self._common: CommonValues | None = None
        self._writes: list[FileWrite] = []
        self._staging_error: Exception | None = None
        self._called, self._planned_at = called, time.monotonic()
        self._staged_at = 0.0
        self._record = SaveRecord(events, self.iteration, began, "shared")
        self._record.waited_s = called - began

    def stage(self, planner: SavePlanner) -> None:
        """Copy this rank's tensors. What goes wrong is told to all ranks, by what follows."""
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
                )
                self._writes = self._writer.preload_tensors()
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            self._staging_error = error

    def start(self) -> None:
        """Have the rest done by a thread, also if nothing could be staged."""
        self._staged_at = self._record.went_on = time.monotonic()
        self._record.copied = self._planned_at, self._staged_at
        self._record.nbytes = self._nbytes
        if self._staging_error is not None:
            self._writer.give_up(self._staging_error)
        try:
            # Not a daemon: the interpreter must not take the memory away that is being written.
            self.task.start("localckpt-global", daemon=False)
        except RuntimeError:
            # No thread can be had: training waits for this save.
            self.task.run()

    def begin_if_interrupted(self) -> None:
        """Have a save that an interrupt kept from beginning be given up on all ranks."""
        if self.task.call_off() and not self.over.is_set():
            self._staging_error = CheckpointingException("it was interrupted")
            self.task = Task(self._run)
            self.start()

    def note_blocking(self) -> None:
        """Note that training goes on."""
        self._record.note_blocking()

    def wait(self, timeout_s: float) -> None:
        """Return when it is over, well or badly; raises CheckpointingException if not in time."""
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

    @property
    def _nbytes(self) -> int:
        return sum(write.nbytes for write in self._writes)

    # In the thread.

    @property
    def _not_done(self) -> str:
        return f"{self._begun.folder.path} was not saved"

    def _note_end(self) -> None:
        # Another rank may know more than one that has lost it.
        is_unknown = not self.committed and isinstance(self.error, PeerLostError)
        self._record.note_end(
            durable=time.monotonic() if self.committed else None,
            tier="shared",
            outcome="unknown" if is_unknown else None,
            error=None if self.committed else self.error,
        )

    def _save(self) -> str:
        self._ranks.rounds = self._number
        with self._plans.kept_if_all_is_well():
            problem, groups = self._ranks.commit(
                f"save iteration {self.iteration}",
                self._write,
                self._commit,
                read=shaped((str, dict)),
            )
            if groups:
                self._raise_differing(groups)
        self.committed = True
        return problem

    def _write(self) -> Message:
        if self._staging_error is not None:
            raise self._staging_error
        if self._ranks.is_root:
            self._root.sweep(self._begun)
        with record_function("localckpt.global.write"):
            write_files(self._writes)
        self._log_written()
        assert self._common is not None, "everything is staged"
        return self._plans.report_written(self._writer.planned_results(), self._common.folded())

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

        Returns what went wrong after the commit, and the sets of ranks whose values differ.
        """
        if groups := differing([message.record for message in reports]):
            return "", groups
        assert self._planned.metadata is not None, "the first rank has planned"
        self._commit_files(*self._plans.pickled(self._planned.metadata, reports))
        try:
            if self._on_commit is not None:
                self._on_commit()
        except Exception as error:  # noqa: BLE001 - raised on every rank
            return f"iteration {self.iteration} is committed, but on_commit failed: {error!r}", {}
        return "", {}

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
            *(storage_writer, storage_writer.plans),
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
        storage_writer.finish(global_metadata, plans.merge_written(reports))

    try:
        with plans.kept_if_all_is_well():
            dist_wrapper.commit(
                f"finish the checkpoint {storage_writer.path}",
                lambda: plans.report_written(storage_writer.retrieve_write_results()),
                finish,
                kind="finish the checkpoint",
            )
    except BaseException as error:
        storage_writer.give_up(error)
        raise
    finally:
        dist_wrapper.close()
