"""torch's file system writer, asynchronous: a thread of the trainer writes what is staged.

The flow is that of Megatron-Core's writer of the same name: plan, ``prepare_write_data``, hand
``get_save_function_and_args()`` to a queue, and when it is done on all ranks ``finish`` with the
results of all. A writer may be used for one checkpoint after the other (``reset``); then it keeps
its buffers and what it has planned.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from localckpt.async_save.callers import HandedOver, given, wait_for
from localckpt.async_save.request import do_nothing
from localckpt.errors import CheckpointingException, SaveFailedError, StorageError
from localckpt.failure_texts import with_class
from localckpt.global_tier.metadata import (
    DATA_SUFFIX,
    METADATA_NAME,
    StoragePrefix,
    pickled_metadata,
)
from localckpt.global_tier.objects import Retries
from localckpt.global_tier.places import Place, place_of
from localckpt.global_tier.save_plan import PlanCache, plan_save
from localckpt.global_tier.staging import (
    FileLayout,
    ItemReader,
    StagedFiles,
    Staging,
    lay_out_files,
    marked,
)
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.values import Message
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.failures import storage_errors
from localckpt.threads import SerialThread

logger = logging.getLogger(__name__)

# So many times as long as ranks wait for each other a save may be written.
_PATIENCE = 4


class FileSystemWriterAsync(FileSystemWriter):
    """Writer of one rank's part of a checkpoint that torch.distributed.checkpoint can read.

    Args:
        path: The checkpoint's directory, or its URL, the same for all ranks.
        thread_count: Into how many files, written side by side, this rank's items are divided.
        separation_hint: Items whose names begin with it go to files of their own.
        overwrite: Replace a checkpoint that is there; it can be loaded until the new one is
            complete. Names of files hold the save's ID, so nothing that is written late, or again,
            gets into another save.
        sync_files: Return from writing when the files are durable.
        single_file_per_rank: ``True``: a file for each item is not offered.
        staging_threads: Threads that copy tensors; by default this rank's share of the cores.
        timeout_s: The longest that a save waits for the one before to be written, in seconds.
        safe_globals: Classes and functions that objects in the state may name, beyond torch's own.
        _own_folders: Each save has a directory that no other has, so files need no ID.

    Attributes:
        plans: What was planned before, so that it need not be planned again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Place,
        *,
        thread_count: int = 2,
        separation_hint: str | None = None,
        overwrite: bool = False,
        sync_files: bool = True,
        single_file_per_rank: bool = True,
        staging_threads: int | None = None,
        timeout_s: float = 300.0,
        safe_globals: Iterable[Any] = (),
        _own_folders: bool = False,
    ) -> None:
        if not single_file_per_rank:
            raise CheckpointingException(
                "single_file_per_rank=False is not offered: a rank writes thread_count files"
            )
        if thread_count < 1:
            raise CheckpointingException(f"thread_count is {thread_count}; it must be above 0")
        self.folder = place_of(path)
        # torch makes a plain path of it, which it pickles.
        super().__init__(
            str(self.folder),
            sync_files=sync_files,
            thread_count=thread_count,
            overwrite=overwrite,
        )
        self.separation_hint = separation_hint
        self.save_id = uuid.uuid4().hex
        allowed = tuple(safe_globals)
        self.plans = PlanCache(SafeGlobals(allowed))
        self._own_folders = _own_folders
        self._items = ItemReader(allowed)
        self._staging = Staging(staging_threads, timeout_s)
        self._timeout_s = timeout_s
        self._thread = SerialThread("localckpt-writer")
        self._writing: HandedOver | None = None
        # A writer that is made for one checkpoint only is often left, not closed.
        weakref.finalize(self, _close, self._staging, self._thread, timeout_s, os.getpid())
        self._process = os.getpid()
        self._laid_out: tuple[SavePlan, frozenset[int], tuple[FileLayout, ...]] | None = None
        self._prepared: StagedFiles | None = None
        self._failed: BaseException | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | Place | None = None) -> None:
        """Switch to the next checkpoint."""
        if checkpoint_id:
            self.folder = place_of(checkpoint_id)
        super().reset(str(self.folder))
        self.save_id = uuid.uuid4().hex
        self._prepared = self._failed = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, or see that no checkpoint is there.

        Raises:
            StorageError: One is there, and is not to be overwritten; or the directory cannot be.
        """
        folder = self.folder
        with storage_errors("make", folder):
            folder.make()
        with storage_errors("look at", folder):
            if not self.overwrite and (folder / METADATA_NAME).size() is not None:
                raise StorageError(
                    f"{folder} holds a checkpoint: choose another directory, or make the writer "
                    f"with overwrite=True. Nothing was changed"
                )
        return plan

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Make what :meth:`prepare_global_plan` would make of this rank's plan."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return dataclasses.replace(local_plan, storage_data=StoragePrefix(f"__{rank}_"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> NoReturn:
        """Refuse: this writer writes behind training only.

        Raises:
            CheckpointingException: Always; it names what to use.
        """
        raise CheckpointingException(
            "FileSystemWriterAsync does not write in the trainer: use save_state_dict_async_plan() "
            "and get_save_function_and_args(), or GlobalCheckpointManager; for dcp.save, torch's "
            "own FileSystemWriter"
        )

    def require_loadable(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Check that what a rank plans to save could be loaded again; copies nothing.

        Raises:
            UnsafeGlobalError: The state holds an object that could not be loaded again.
            CheckpointingException: It could not be loaded again for another reason.
        """
        for item in plan.items:
            self._items.read(item, planner)

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Find what this rank is to write, and where. Tensors are not copied yet.

        Args:
            plan: This rank's final plan.
            planner: Knows the state.

        Raises:
            UnsafeGlobalError: The state holds an object that could not be loaded again.
        """
        values = {n: self._items.read(item, planner) for n, item in enumerate(plan.items)}
        tensors = {n: value for n, value in values.items() if isinstance(value, torch.Tensor)}
        contents = {n: value for n, value in values.items() if isinstance(value, memoryview)}
        last = self._laid_out
        if last is None or last[0] is not plan or last[1] != contents.keys():
            files = lay_out_files(
                *(plan, contents.keys()),
                prefix=plan.storage_data.prefix,
                bins=self.thread_count,
                separation_hint=self.separation_hint,
            )
            last = self._laid_out = plan, frozenset(contents), files
        self._prepared = StagedFiles(
            *(plan, last[2], tensors, contents, self.folder, self.save_id),
            mark=self._mark,
            sync=self.sync_files,
        )

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Callable[[], None]] | None, list[Any]]:
        """Return what a queue calls behind training, as the fields of an :class:`AsyncRequest`.

        A thread of the trainer writes, whatever queue calls the function, which waits for it.

        Returns:
            The function; what stages the tensors and returns the function's second argument; and
            three arguments. ``(None, None, [])`` if nothing is to be written, or it failed before.
        """
        if self._failed is not None:
            return None, None, []
        prepared = self._require_prepared()
        if not prepared.files:
            return None, None, []
        rank = int(prepared.plan.storage_data.prefix.strip("_"))
        return wait_for, _Begin(self), [rank, None, None]

    def preload_tensors(self) -> StagedFiles | None:
        """Copy this rank's tensors to a buffer; return the files to write, if there are any."""
        prepared = self._require_prepared()
        if not prepared.files:
            return None
        self._staging.stage(prepared)
        return prepared

    def begin(self) -> Callable[[], None]:
        """Stage, and have a thread write; return what waits for it, in any process."""
        staged = self.preload_tensors()

        def write() -> str | None:
            try:
                if staged is not None:
                    staged.write(Retries(Deadline.after(self._timeout_s).at))
            except Exception as error:  # noqa: BLE001 - raised when the save is finalized
                return with_class(error)
            return None

        # Writing has no deadline of its own.
        self._writing = HandedOver(write, _PATIENCE * self._timeout_s)
        self._thread.submit(self._writing.task)
        return self._writing.function

    def retrieve_write_results(self) -> list[WriteResult]:
        """Return the place of each item of this rank, for :meth:`finish`.

        Names of files lack the save's ID there, which differs in each save.

        Raises:
            SaveFailedError: Writing failed; it says how. Or not all was written.
        """
        if self._failed is not None:
            raise self._failed
        prepared = self._require_prepared()
        if not prepared.files:
            return []
        writing, self._writing = self._writing, None
        if writing is None:
            raise SaveFailedError(
                f"nobody has written this rank's part of {self.folder}: was the function of "
                f"get_save_function_and_args() run to its end?"
            )
        if (error := writing.await_error()) is not None:
            raise SaveFailedError(f"this rank's part of {self.folder} was not written: {error}")
        return prepared.results()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: write what makes it a checkpoint.

        Data files that are not part of it, of saves before or of some that failed, are removed.

        Args:
            metadata: What planning made.
            results: Results of all ranks.

        Raises:
            StorageError: The file system refused.
        """
        metadata.storage_meta = self.storage_meta()
        folder = self.folder
        pickled, _ = pickled_metadata(metadata, map(self._named, chain.from_iterable(results)))
        with storage_errors("write", folder / METADATA_NAME):
            (folder / METADATA_NAME).put(pickled)
        mine = {info.relative_path for info in metadata.storage_data.values()}
        try:
            for name in folder.names():
                if name.endswith(DATA_SUFFIX) and name not in mine:
                    (folder / name).remove()
        except OSError as error:
            # The checkpoint is complete.
            logger.warning("files of other saves stay in %s: %s", folder, error)

    def give_up(self, error: BaseException) -> None:
        """Forget a save that failed, and take its buffer back, which nobody may use any more.

        It is made for the ``failure_fns`` of an :class:`AsyncCall`.
        """
        self._failed, prepared = error, self._prepared
        if prepared is None:
            return
        # By its owner: an interrupt may have come before the buffer was noted here.
        self._staging.release(prepared)
        self._prepared = None
        if self._writing is not None:
            self._writing.close()

    def close(self) -> None:
        """Free the buffers and end the threads. May be called twice."""
        _close(self._staging, self._thread, self._timeout_s, self._process)

    def _named(self, result: WriteResult) -> WriteResult:
        """A result of any rank with the name that the file has in this save."""
        info = result.storage_data
        named = dataclasses.replace(info, relative_path=marked(info.relative_path, self._mark))
        return dataclasses.replace(result, storage_data=named)

    @property
    def _mark(self) -> str:
        return "" if self._own_folders else f".{self.save_id[:8]}"

    def _require_prepared(self) -> StagedFiles:
        if self._prepared is None:
            raise CheckpointingException(
                "nothing is prepared: call prepare_write_data() or save_state_dict_async_plan() "
                "for each checkpoint"
            )
        return self._prepared


def _close(staging: Staging, thread: SerialThread, timeout_s: float, process: int) -> None:
    # A fork of the trainer must not take the memory away from it.
    if os.getpid() == process:
        staging.close()
        if not thread.close(timeout_s):
            logger.error(
                "a save is still being written %g s after its writer was closed", timeout_s
            )


class _Begin:
    """Stages the tensors of a writer and begins to write; returns what waits for the end.

    Queues with a worker process pickle this function to have it called there. The worker does not
    have the tensors, so the function is called when it is pickled, and the worker waits.
    """

    def __init__(self, writer: FileSystemWriterAsync) -> None:
        self._writer = writer

    def __call__(self) -> Callable[[], None]:
        return self._writer.begin()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        try:
            wait = self._writer.begin()
        except Exception as error:  # noqa: BLE001 - raised on every rank when it is finalized
            # Here it would be lost in a thread of that queue, and training would wait for ever.
            self._writer.give_up(error)
            wait = do_nothing
        return partial, (given, wait)


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
        begun = plan_save(
            ranks,
            state_dict,
            planner,
            *(storage_writer, storage_writer.plans),
            what=f"the save to {storage_writer.folder}",
            tag=str(storage_writer.folder),
            begin=lambda: storage_writer.save_id,
            prepare=storage_writer.prepare_local_plan,
        )
    except BaseException:
        ranks.close()
        raise
    storage_writer.save_id = begun
    plans = storage_writer.plans
    try:
        storage_writer.prepare_write_data(planner.finish_plan(plans.plan), planner)
    except Exception as error:  # noqa: BLE001 - raised on every rank when it is finalized
        storage_writer.give_up(error)
    return storage_writer, plans.metadata, ranks


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
                f"finish the checkpoint {storage_writer.folder}",
                lambda: plans.report_written(storage_writer.retrieve_write_results()),
                finish,
                kind="finish the checkpoint",
            )
    except BaseException as error:
        storage_writer.give_up(error)
        raise
    finally:
        dist_wrapper.close()
