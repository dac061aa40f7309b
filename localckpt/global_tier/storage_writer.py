"""torch's file system writer, asynchronous: what is staged in the trainer is written elsewhere.

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
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from localckpt.errors import CheckpointingException, SaveFailedError, StorageError
from localckpt.global_tier.data_files import (
    FileWrite,
    HandedOver,
    read_outcome,
    write_durably,
    write_preloaded_data,
    write_preloaded_data_in_trainer,
    write_preloaded_data_multiproc,
)
from localckpt.global_tier.metadata import (
    DATA_SUFFIX,
    METADATA_NAME,
    StoragePrefix,
    pickled_metadata,
)
from localckpt.global_tier.save_plan import PlanCache
from localckpt.global_tier.staging import FileLayout, Staging, WriteData, lay_out_files
from localckpt.global_tier.write_items import ItemReader
from localckpt.own_folders import folder_mode
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import local_path
from localckpt.storage.write import sync_folder

__all__ = ["FileSystemWriterAsync"]

logger = logging.getLogger(__name__)


class FileSystemWriterAsync(FileSystemWriter):
    """Writer of one rank's part of a checkpoint that torch.distributed.checkpoint can read.

    Args:
        path: The checkpoint's directory, the same for all ranks.
        thread_count: Into how many files, written side by side, this rank's items are divided.
        separation_hint: Items whose names begin with it go to files of their own.
        overwrite: Replace a checkpoint that is there; it can be loaded until the new one is
            complete. Names of files hold the save's ID, so nothing that is written late, or again,
            gets into another save.
        sync_files: Return from writing when the files are durable.
        single_file_per_rank: ``True``: a file for each item is not offered.
        writer: Where the save function runs: in another ``"process"``, or in a ``"thread"`` of this
            one, which saves staging through shared memory.
        staging_threads: Threads that copy tensors; by default this rank's share of the cores.
        timeout_s: The longest that a save waits for the one before to be written, in seconds.
        safe_globals: Classes and functions that objects in the state may name, beyond torch's own.
        _own_folders: Each save has a directory that no other has, so files need no ID.

    Attributes:
        plans: What was planned before, so that it need not be planned again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int = 2,
        separation_hint: str | None = None,
        overwrite: bool = False,
        sync_files: bool = True,
        single_file_per_rank: bool = True,
        writer: Literal["thread", "process"] = "process",
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
        if writer not in ("thread", "process"):
            raise CheckpointingException(f"writer is {writer!r}; it can be 'thread' or 'process'")
        super().__init__(
            local_path(path),
            sync_files=sync_files,
            thread_count=thread_count,
            overwrite=overwrite,
        )
        self.separation_hint = separation_hint
        self.save_id = uuid.uuid4().hex
        allowed = tuple(safe_globals)
        self.plans = PlanCache(SafeGlobals(allowed))
        self._kind = writer
        self._own_folders = _own_folders
        self._items = ItemReader(allowed)
        self._staging = Staging(writer, staging_threads, timeout_s)
        # A writer that is made for one checkpoint only is often left, not closed.
        weakref.finalize(self, _close, self._staging, os.getpid())
        self._process = os.getpid()
        self._laid_out: tuple[SavePlan, frozenset[int], tuple[FileLayout, ...]] | None = None
        self._prepared: WriteData | None = None
        self._failed: BaseException | None = None

    # Planning, as torch asks for it.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to the next checkpoint."""
        super().reset(checkpoint_id and local_path(checkpoint_id))
        self.save_id = uuid.uuid4().hex
        self._prepared = self._failed = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, or see that no checkpoint is there.

        Raises:
            StorageError: One is there, and is not to be overwritten; or the directory cannot be.
        """
        folder = Path(self.path)
        with storage_errors("make", folder):
            # To stay there after the power failed.
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            for path in reversed(missing):
                path.mkdir(folder_mode(path.parent), exist_ok=True)
                sync_folder(path.parent)
        with storage_errors("look at", folder):
            if not self.overwrite and (folder / METADATA_NAME).exists():
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

    # One save.

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
        tensors: dict[int, torch.Tensor] = {}
        others: dict[int, memoryview] = {}
        for number, item in enumerate(plan.items):
            value = self._items.read(item, planner)
            if isinstance(value, torch.Tensor):
                tensors[number] = value
            else:
                others[number] = value
        files = self._lay_out(plan, frozenset(others))
        self._prepared = WriteData(
            plan, files, tensors, [[others[number] for number in file.others] for file in files]
        )

    def warm_up(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Lay out a plan, and make the memory for it."""
        self.prepare_write_data(plan, planner)
        self._staging.prepare(self._require_prepared())
        self._prepared = None

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], list[FileWrite]] | None, list[Any]]:
        """Return what a queue calls behind training, as the fields of an :class:`AsyncRequest`.

        Returns:
            The function; what stages the tensors before training goes on, and gives the function
            its second argument; and the function's arguments. ``(None, None, [])`` when there is
            nothing to write on this rank, or something went wrong, which finalizing raises.
        """
        if self._failed is not None:
            return None, None, []
        prepared = self._require_prepared()
        if not prepared.files:
            return None, None, []
        by_thread = self._kind == "thread"
        write = write_preloaded_data_in_trainer if by_thread else write_preloaded_data_multiproc
        return (
            partial(write, self._outcome_of(prepared)),
            _Preload(self),
            [int(prepared.plan.storage_data.prefix.strip("_")), []],
        )

    def preload_tensors(self) -> list[FileWrite]:
        """Copy this rank's tensors to a buffer; returns when all values are there.

        Returns:
            The files to write, by names and numbers only.
        """
        prepared = self._require_prepared()
        if not prepared.files:
            return []
        buffer = self._staging.stage(prepared)
        return [
            FileWrite(
                Path(self.path) / self._name(file.name),
                *(self.save_id, buffer, start, stop),
                sync=self.sync_files,
            )
            for file, (start, stop) in zip(prepared.files, prepared.ranges(), strict=True)
        ]

    def stage_for_foreign_queue(self) -> tuple[FileWrite, ...]:
        """:meth:`preload_tensors`, but what goes wrong is raised when the save is finalized."""
        try:
            if self._kind == "thread":
                raise CheckpointingException(
                    f"{self.path} is not written: with writer='thread' the data is in memory of "
                    f"the trainer, and the queue writes in another process. Make the writer with "
                    f"writer='process', or use localckpt's AsyncCallsQueue"
                )
            return tuple(self.preload_tensors())
        except Exception as error:  # noqa: BLE001 - raised on every rank when it is finalized
            self._failed = error
            return ()

    write_preloaded_data_multiproc = staticmethod(write_preloaded_data_multiproc)
    write_preloaded_data = staticmethod(write_preloaded_data)

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
        outcome = read_outcome(self._outcome_of(prepared))
        if outcome is None:
            raise SaveFailedError(
                f"nobody has said what came of writing this rank's part of {self.path}: was the "
                f"function of get_save_function_and_args() run to its end?"
            )
        if isinstance(outcome, str):
            raise SaveFailedError(f"this rank's part of {self.path} was not written: {outcome}")
        results = prepared.results()
        if outcome != len(results):
            raise SaveFailedError(
                f"of {len(results)} files with {sum(map(len, results))} items only {outcome} with "
                f"{sum(map(len, results[:outcome]))} were written to {self.path}"
            )
        return self.planned_results()

    def planned_results(self) -> list[WriteResult]:
        """Return where each item of this rank is once everything is written, as prepared."""
        return [*chain.from_iterable(self._require_prepared().results())]

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
        folder = Path(self.path)
        pickled, _ = pickled_metadata(metadata, map(self._named, chain.from_iterable(results)))
        write_durably(folder / METADATA_NAME, pickled)
        mine = {info.relative_path for info in metadata.storage_data.values()}
        try:
            for path in (*folder.glob(f"*{DATA_SUFFIX}"), *folder.glob(".__*_written.*")):
                if path.name not in mine:
                    path.unlink(missing_ok=True)
        except OSError as error:
            # The checkpoint is complete.
            logger.warning("files of other saves stay in %s: %s", folder, error)

    def give_up(self, error: BaseException) -> None:
        """Forget a save that failed, and take its buffer back, which nobody may use any more.

        One of the ``failure_fns`` that an :class:`AsyncCall` can have: the process that was writing
        may be dead.
        """
        self._failed, prepared = error, self._prepared
        if prepared is None:
            return
        # By its owner: an interrupt may have come before the buffer was noted here.
        self._staging.release(prepared.owner)
        self._prepared = None
        if prepared.is_staged:
            with storage_errors("clean up", Path(self.path)):
                self._outcome_of(prepared).unlink(missing_ok=True)

    def close(self) -> None:
        """Free the buffers and end the threads. May be called twice."""
        _close(self._staging, self._process)

    def _outcome_of(self, prepared: WriteData) -> Path:
        prefix = prepared.plan.storage_data.prefix
        return Path(self.path) / f".{prefix}written.{self.save_id[:8]}"

    def _named(self, result: WriteResult) -> WriteResult:
        """A result of any rank with the name that the file has in this save."""
        info = result.storage_data
        named = dataclasses.replace(info, relative_path=self._name(info.relative_path))
        return dataclasses.replace(result, storage_data=named)

    def _name(self, name: str) -> str:
        if self._own_folders:
            return name
        return f"{name.removesuffix(DATA_SUFFIX)}.{self.save_id[:8]}{DATA_SUFFIX}"

    def _require_prepared(self) -> WriteData:
        if self._prepared is None:
            raise CheckpointingException(
                "nothing is prepared: call prepare_write_data() or save_state_dict_async_plan() "
                "for each checkpoint"
            )
        return self._prepared

    def _lay_out(self, plan: SavePlan, others: frozenset[int]) -> tuple[FileLayout, ...]:
        last = self._laid_out
        if last is not None and last[0] is plan and last[1] == others:
            return last[2]
        files = lay_out_files(
            plan,
            others,
            prefix=plan.storage_data.prefix,
            bins=self.thread_count,
            separation_hint=self.separation_hint,
        )
        self._laid_out = (plan, others, files)
        return files


def _close(staging: Staging, process: int) -> None:
    # A fork of the trainer must not take the memory away from it.
    if os.getpid() == process:
        staging.close()


class _Preload:
    """Stages the tensors of a writer; returns the files to write.

    NVRx's persistent queue, and Megatron-Core's, pickle this function to have their worker call it,
    while training waits. The worker does not have the tensors, so they are staged when the function
    is pickled, and the worker is given the files.
    """

    def __init__(self, writer: FileSystemWriterAsync) -> None:
        self._writer = writer

    def __call__(self) -> list[FileWrite]:
        return self._writer.preload_tensors()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # An error here would be lost in a thread of that queue, and training would wait for ever.
        return partial, (HandedOver, self._writer.stage_for_foreign_queue())
