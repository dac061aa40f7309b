"""Checkpoints on shared storage that outlive the job, committed behind training.

All ranks plan a save together and copy their tensors; then training goes on. What follows is done
by a thread of each rank: it writes, and meets the others in the job's store. The first rank makes
the directory a checkpoint when all have written, or all learn at once what went wrong.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, overload

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.profiler import record_function

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.global_tier.committing import Committing
from localckpt.global_tier.folders import Folder
from localckpt.global_tier.load_planner import ReshardingLoadPlanner, give, read_here
from localckpt.global_tier.planning import (
    PlanCache,
    PlannedSave,
    plan_save,
    require_same,
)
from localckpt.global_tier.reader import CachedMetadataFileSystemReader
from localckpt.global_tier.root import CheckpointRoot, Found
from localckpt.global_tier.rounds import Meeting
from localckpt.global_tier.save import SaveUnderWay
from localckpt.global_tier.writer import FileSystemWriterAsync
from localckpt.ids import CkptID
from localckpt.lineage import EpochId, Lineage, LineageKeeper, Origin, Resumed, begin_lineage
from localckpt.storage.names import local_path

__all__ = ["GlobalCheckpointManager"]

logger = logging.getLogger(__name__)


class GlobalCheckpointManager:
    """Saves and loads a state of all ranks together, in torch.distributed.checkpoint's format.

    Every rank makes its manager and calls its methods in the same order as the others. A checkpoint
    can be loaded by any number of ranks with any sharding, and by ``dcp.load``.

    Args:
        root: A directory that all ranks share.
        session_id: A name for the training run; runs with different ones may share a root.
        keep_last: How many checkpoints to keep; ``None`` for all.
        timeout: Deadline of every wait, in seconds: how much longer than the fastest rank the
            slowest one may take to write.
        concurrent_bytes: How many bytes a rank that loads reads at once at most, beside its
            tensors.
        process_group: The ranks of the job; ``None`` for all.
        thread_count: Into how many files, written side by side, a rank's items are divided.
        separation_hint: Items whose names begin with it go to files of their own.
        staging_threads: Threads that copy tensors; by default this rank's share of the cores.
        atomic_rename: Whether a directory on this storage is renamed at once or not at all. Else
            saves are written where they stay, and only their record makes them checkpoints.
        safe_globals: Classes and functions that objects in a state may name, beyond torch's own.
        read_only: Only load; another job may save in this session.
        local: The manager of the same job's checkpoints on the nodes, if it has one. Then both are
            one lineage: what is saved here records what the job resumed from on the nodes, and what
            :meth:`load` gives is what the nodes' next checkpoints descend from.

    Attributes:
        plans: What was planned before; its counters tell what saves cost.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str = "",
        *,
        keep_last: int | None = None,
        timeout: float = 1800.0,
        concurrent_bytes: int = 32_000_000_000,
        process_group: dist.ProcessGroup | None = None,
        thread_count: int = 2,
        separation_hint: str | None = None,
        staging_threads: int | None = None,
        atomic_rename: bool = True,
        safe_globals: Iterable[Any] = (),
        local: LineageKeeper | None = None,
        read_only: bool = False,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise CheckpointingException(f"keep_last is {keep_last}; it must be above 0, or None")
        if timeout <= 0:
            raise CheckpointingException(f"timeout is {timeout} s; it must be above 0")
        if concurrent_bytes < 1:
            raise CheckpointingException(
                f"concurrent_bytes is {concurrent_bytes}; it must be above 0"
            )
        self.session_id = session_id
        self.timeout = timeout
        self._root = CheckpointRoot(
            local_path(root),
            session_id,
            keep_last=keep_last,
            atomic_rename=atomic_rename,
            timeout_s=timeout,
        )
        self._concurrent_bytes = concurrent_bytes
        self._process_group = process_group
        self._safe_globals = tuple(safe_globals)
        self._meeting = Meeting("global manager", process_group, timeout_s=timeout)
        self._writer = FileSystemWriterAsync(
            self._root.path,
            thread_count=thread_count,
            separation_hint=separation_hint,
            writer="thread",
            staging_threads=staging_threads,
            timeout_s=timeout,
            safe_globals=self._safe_globals,
            _own_folders=True,
        )
        self._local = local
        self.read_only = read_only
        self._resumed = Resumed()
        self._lineage: Lineage | None = None
        self._epoch: int | None = None
        self._newest_iteration = -1
        self._save: SaveUnderWay | None = None
        self._committing = Committing(self._root, self._meeting, self._writer, session_id)
        self._process = os.getpid()
        self._closed = False

    @property
    def rank(self) -> int:
        """This process's rank among those of the job."""
        return self._meeting.rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self._meeting.world_size

    @property
    def root(self) -> Path:
        """Where the checkpoints of this session are."""
        return self._root.path

    @property
    def plans(self) -> PlanCache:
        """What was planned before; its counters tell what saves cost."""
        return self._writer.plans

    # Saving.

    def warm_up(self, state_dict: dict[str, Any]) -> None:
        """Make ready for saves of such a state; all ranks call it.

        Plans them, and makes the staging buffer in the background, which the first save would have
        to wait for. Tensors are not looked at.

        Raises:
            CheckpointingException: The ranks cannot agree on a plan; the same on every rank.
            PeerLostError: Some rank did not come in time.
        """
        self._check_usable()
        self._require_writable()
        self._settle()
        planner, planned = self._plan(state_dict, "warm up", lambda: None)
        try:
            self._writer.warm_up(planner.finish_plan(planned.plan), planner)
        except Exception as error:  # noqa: BLE001 - on this rank alone; the save itself tells all
            logger.warning("such a state cannot be saved: %s", error)

    def save(
        self,
        state_dict: dict[str, Any],
        iteration: SupportsIndex,
        is_async: bool = False,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        """Save the state of all ranks; all ranks call it.

        What is saved is the value that the state has at the call. A save that comes while the one
        before is being written waits for it.

        Args:
            state_dict: This rank's part: DTensors, ShardedTensors, tensors that are the same on all
                ranks, objects, and ``Stateful`` values.
            iteration: Its number, above that of the save before.
            is_async: Return as soon as the tensors are copied; else when it is committed. What goes
                wrong from there on is raised by :meth:`check_for_errors`,
                :meth:`wait_until_finished`, the next save, or :meth:`close`.
            on_commit: Called on the first rank, in another thread, when the checkpoint is there.

        Raises:
            CheckpointingException: The save before failed, and some rank has not been told yet;
                nothing was begun. Or this one did. The same on every rank; older checkpoints are as
                they were, and training may go on and save again.
            PeerLostError: Some rank did not come in time.
        """
        self._check_usable()
        self._require_writable()
        iteration = operator.index(iteration)
        if iteration < 0:
            raise CheckpointingException(f"iteration is {iteration}; it must not be negative")
        self._settle()
        called = time.monotonic()
        if self._local is not None:
            self._lineage = self._local.lineage_of_save(iteration)
        planner, planned = self._plan(state_dict, iteration, lambda: self._begin(iteration))
        epoch, save_id = planned.word
        begun = replace(self._root.begun(iteration, epoch, save_id), lineage=self._lineage)
        self._epoch = epoch
        save = self._save = SaveUnderWay(
            begun, planned.metadata, on_commit, called, time.monotonic()
        )
        try:
            with record_function("localckpt.global.stage"):
                self._writer.reset(begun.path)
                self._writer.save_id = save_id
                self._writer.prepare_write_data(planner.finish_plan(planned.plan), planner)
                save.writes = self._writer.preload_tensors()
        except BaseException as error:
            if os.getpid() != self._process:
                # A fork that ends here: the save goes on in the process that was forked.
                raise
            save.staging_error = error
        self._carry_out(save)
        if not isinstance(save.staging_error, Exception | None):
            raise save.staging_error
        if not is_async:
            self.wait_until_finished()

    def _carry_out(self, save: SaveUnderWay) -> None:
        """Have the rest of a save done by a thread, also if it could not be staged."""
        save.staged = time.monotonic()
        if save.staging_error is not None:
            self._writer.give_up(save.staging_error)
        save.start(lambda: self._committing.carry_out(save), self._free_if_left)

    def check_for_errors(self) -> None:
        """Raise what the last save failed with, once; waits for nothing.

        Every rank is told, though not all at the same step.
        """
        if self._save is not None and self._save.over.is_set():
            self._take_error()

    def wait_until_finished(self) -> None:
        """Return when the last save is committed on all ranks, or raise what it failed with."""
        self._settle()
        self._take_error()

    # Loading.

    def find_latest(self) -> int:
        """Iteration of the newest checkpoint, or ``-1``; all ranks call it.

        Raises:
            StorageError: The root cannot be read; the same on every rank.
            PeerLostError: A rank did not come in time.
        """
        self._check_usable()
        self._settle()
        found = self._look(None, None)
        return -1 if found is None else found.folder.iteration

    def all_iterations(self) -> list[int]:
        """Iterations that :meth:`load` can give, in the order in which a restart tries them.

        All ranks call it, and get the same.

        Raises:
            StorageError: The root cannot be read; the same on every rank.
            PeerLostError: A rank did not come in time.
        """
        self._check_usable()
        self._settle()

        def answer(said: list[bytes]) -> list[bytes]:
            require_same(said, self._meeting.global_ranks)
            return [json.dumps(self._root.iterations()).encode()]

        tag = json.dumps([self.session_id, "all"]).encode()
        told = self._meeting.hold("find all checkpoints", lambda: tag, answer)
        iterations: list[int] = json.loads(told)
        return iterations

    @overload
    def load(
        self,
        *,
        into: dict[str, Any],
        iteration: int | None = None,
        allow_partial_load: bool = False,
    ) -> tuple[dict[str, Any], CkptID]: ...

    @overload
    def load(
        self,
        state_dict: dict[str, Any],
        iteration: int | None = None,
        *,
        allow_partial_load: bool = False,
    ) -> int: ...

    def load(
        self,
        state_dict: dict[str, Any] | None = None,
        iteration: int | None = None,
        *,
        into: dict[str, Any] | None = None,
        allow_partial_load: bool = False,
    ) -> tuple[dict[str, Any], CkptID] | int:
        """Fill a state in place, with whatever sharding it has; all ranks call it.

        Every block is verified as it is read. If the newest checkpoint turns out damaged, all ranks
        take the one before; not with ``allow_partial_load``, where values of both would be left.

        Args:
            into: The state to fill. Tensors on the meta device are made; objects are replaced.
            iteration: The checkpoint; ``None`` for the newest.
            allow_partial_load: Leave values that the checkpoint has not as they are.
            state_dict: Older name of ``into``, with which only the iteration is returned.

        Returns:
            The state, and its ID, which says which iteration it is, as the managers of the nodes
            return them.

        Raises:
            NoReplicasAvailableError: There is no such checkpoint.
            CheckpointingException: There is no state to fill.
            MismatchError: The state does not fit.
            CorruptShardError, StorageError: It is damaged, or cannot be read. As every error it is
                raised on every rank, and the state may be partly filled.
        """
        given = state_dict if into is None else into
        if given is None or (state_dict is not None and into is not None):
            raise CheckpointingException("load() needs the state to fill, once: load(into=state)")
        loaded = self._load_newest(given, iteration, allow_partial_load)
        if into is None:
            return loaded
        return into, CkptID(loaded, self.rank, self.session_id)

    def _load_newest(
        self, state_dict: dict[str, Any], iteration: int | None, allow_partial_load: bool
    ) -> int:
        self._check_usable()
        self._settle()
        try:
            self._take_error()
        except CheckpointingException as error:
            logger.error("the last save had failed: %s", error)
        older_than: tuple[int, int] | None = None
        while True:
            found = self._look(iteration, older_than)
            if found is None:
                raise NoReplicasAvailableError(self._why_none(iteration, older_than))
            older_than = found.folder.version
            try:
                self._load(found, state_dict, allow_partial_load)
            except (CorruptShardError, StorageError) as error:
                if iteration is not None or allow_partial_load:
                    raise
                logger.error(
                    "iteration %d cannot be loaded, trying an older one: %s",
                    found.folder.iteration,
                    error,
                )
                continue
            # What is saved from here on is a new attempt, and newer than all there is.
            self._epoch, self._newest_iteration = None, found.folder.iteration
            self._root.went_on_from(found)
            origin: Origin = "elsewhere" if found.lineage is None else "shared"
            self._resumed = Resumed(origin, found.folder.iteration, found.lineage)
            self._lineage = None
            if self._local is not None:
                self._local.begin(found.folder.iteration, lineage=found.lineage)
            return found.folder.iteration

    def close(self) -> None:
        """Wait for the last save, then free everything. May be called twice.

        Raises:
            CheckpointingException: What the last save failed with; everything is freed.
        """
        if self._closed or os.getpid() != self._process:
            return
        try:
            self.wait_until_finished()
        finally:
            self._closed = True
            self._free()
            self._meeting.leave()

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
        elif not self._closed and os.getpid() == self._process:
            # The others may never come: a save under way goes on, and frees everything at its end.
            self._closed = True
            if self._save is None or self._save.over.is_set():
                self._free()

    def _free_if_left(self) -> None:
        if self._closed:
            self._free()

    # On every rank.

    def _plan(
        self, state_dict: dict[str, Any], what: int | str, word: Callable[[], Any]
    ) -> tuple[SavePlanner, PlannedSave]:
        planner = DefaultSavePlanner()

        def check() -> None:
            # Here, where all ranks learn of it: each may have been told of the last save, or not.
            self._take_error()
            if isinstance(what, int) and what <= self._newest_iteration:
                raise CheckpointingException(
                    f"iteration {what} cannot be saved after {self._newest_iteration}: numbers "
                    f"must grow. To go back, load() the checkpoint to go on from"
                )

        with record_function("localckpt.global.plan"):
            planned = plan_save(
                self._meeting,
                state_dict,
                planner,
                self._writer,
                tag=[self.session_id, what],
                check=check,
                word=word,
            )
        return planner, planned

    def _look(self, iteration: int | None, older_than: tuple[int, int] | None) -> Found | None:
        """The newest checkpoint, as the first rank sees it."""

        def answer(said: list[bytes]) -> list[bytes]:
            require_same(said, self._meeting.global_ranks)
            found = self._root.find(iteration, older_than)
            if found is None:
                return [b"null"]
            folder = found.folder
            told = [folder.iteration, folder.epoch, found.save_id, found.metadata_digest]
            told.append(None if found.lineage is None else found.lineage.to_json())
            return [json.dumps(told).encode()]

        tag = json.dumps([self.session_id, iteration]).encode()
        told = json.loads(self._meeting.hold("find a checkpoint", lambda: tag, answer))
        if told is None:
            return None
        number, epoch, save_id, digest, lineage = told
        return Found(
            Folder(self.root, number, epoch),
            save_id,
            digest,
            None if lineage is None else Lineage.from_json(lineage),
        )

    def _load(self, found: Found, state_dict: dict[str, Any], partial: bool) -> None:
        began = time.monotonic()
        reader = CachedMetadataFileSystemReader(
            found.folder.path,
            concurrent_bytes=self._concurrent_bytes,
            process_group=self._process_group,
            safe_globals=self._safe_globals,
            save_id=found.save_id,
            metadata_digest=found.metadata_digest,
            timeout_s=self.timeout,
        )

        planner = ReshardingLoadPlanner(allow_partial_load=partial, safe_globals=self._safe_globals)

        loaded: dict[str, Any] = {}

        def read() -> bytes:
            with record_function("localckpt.global.load"):
                loaded.update(read_here(state_dict, reader, planner))
            return b""

        # While all are here, since they share it.
        reader.read_metadata()
        self._meeting.hold(f"load iteration {found.folder.iteration}", read, lambda _: [b""])
        give(state_dict, loaded)
        seconds = time.monotonic() - began
        logger.info(
            "loaded %s: read %.3f GB in %.2f s (%.2f GB/s)",
            found.folder.path,
            reader.nbytes_read / 1e9,
            seconds,
            reader.nbytes_read / 1e9 / seconds,
        )

    def _begin(self, iteration: int) -> list[Any]:
        begun = self._root.begin(iteration, self._epoch)
        if self._lineage is None:
            epoch = EpochId(begun.folder.epoch, secrets.randbelow(2**32))
            self._lineage = begin_lineage(epoch, self._resumed, [], {})
        return [begun.folder.epoch, begun.save_id]

    def _settle(self) -> None:
        """Wait for the last save, and leave its error to whoever asks for it."""
        self._check_fork()
        if self._save is not None:
            if not self._save.has_begun:
                # An interrupt came first: the other ranks wait to be told.
                self._save.staging_error = CheckpointingException("it was interrupted")
                self._carry_out(self._save)
            # Writing has no deadline of its own, and the meeting one for each of its two waits.
            self._save.wait(4 * self.timeout)

    def _take_error(self) -> None:
        save, self._save = self._save, None
        if save is not None:
            if save.committed:
                self._newest_iteration = save.iteration
            if save.error is not None:
                raise save.error

    def _why_none(self, iteration: int | None, older_than: tuple[int, int] | None) -> str:
        if older_than is not None:
            return f"no checkpoint under {self.root} can be loaded; see the errors above"
        if iteration is not None:
            return f"there is no checkpoint of iteration {iteration} under {self.root}"
        return f"there is no checkpoint under {self.root}: load() only if find_latest() is not -1"

    def _check_fork(self) -> None:
        if os.getpid() != self._process:
            raise CheckpointingException(
                f"this manager belongs to process {self._process}, of which this one is a fork; "
                f"make one here"
            )

    def _check_usable(self) -> None:
        self._check_fork()
        if self._closed:
            raise CheckpointingException("this manager is closed; make another")

    def _require_writable(self) -> None:
        if self.read_only:
            raise CheckpointingException(
                "this manager was made with read_only=True: it loads, and saves nothing"
            )

    def _free(self) -> None:
        self._writer.close()
        self._root.close()
