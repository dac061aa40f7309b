"""Checkpoints on shared storage that outlive the job, committed behind training.

All ranks plan a save together and copy their tensors; then training goes on. What follows is done
by a thread of each rank: it writes, and meets the others in the job's store. The first rank makes
the directory a checkpoint when all have written, or all learn at once what went wrong.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.profiler import record_function

from localckpt.errors import CheckpointingException, CorruptShardError, StorageError
from localckpt.global_tier.folders import (
    RECORD_NAME,
    CommitRecord,
    Folder,
    folders_in,
    remove,
    session_root,
)
from localckpt.global_tier.load_planner import ReshardingLoadPlanner
from localckpt.global_tier.planning import (
    PlanCache,
    Written,
    plain_state_dict,
    plan_save,
    require_same,
)
from localckpt.global_tier.reader import CachedMetadataFileSystemReader
from localckpt.global_tier.root_lock import RootLock
from localckpt.global_tier.rounds import Meeting
from localckpt.global_tier.torch_dcp import METADATA_NAME
from localckpt.global_tier.write import FileWrite, write_files
from localckpt.global_tier.writer import FileSystemWriterAsync, write_durably
from localckpt.storage.failures import storage_errors
from localckpt.storage.write import sync_folder

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
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise CheckpointingException(f"keep_last is {keep_last}; it must be above 0, or None")
        if timeout <= 0:
            raise CheckpointingException(f"timeout is {timeout} s; it must be above 0")
        if concurrent_bytes < 1:
            raise CheckpointingException(
                f"concurrent_bytes is {concurrent_bytes}; it must be above 0"
            )
        self.root = session_root(Path(root), session_id)
        self.session_id = session_id
        self.timeout = timeout
        self._keep_last = keep_last
        self._concurrent_bytes = concurrent_bytes
        self._process_group = process_group
        self._atomic_rename = atomic_rename
        self._safe_globals = tuple(safe_globals)
        self._meeting = Meeting("global manager", process_group, timeout_s=timeout)
        self._writer = FileSystemWriterAsync(
            self.root,
            thread_count=thread_count,
            separation_hint=separation_hint,
            writer="thread",
            staging_threads=staging_threads,
            timeout_s=timeout,
            safe_globals=self._safe_globals,
        )
        self._lock = RootLock(self.root)
        self._epoch: int | None = None
        self._newest_iteration = -1
        self._save: _Save | None = None
        self._pickled: tuple[Metadata, bytes] | None = None
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
    def plans(self) -> PlanCache:
        """What was planned before; its counters tell what saves cost."""
        return self._writer.plans

    # Saving.

    def save(
        self,
        state_dict: dict[str, Any],
        iteration: int,
        is_async: bool = True,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        """Save the state of all ranks; all ranks call it.

        What is saved is the value that the state has at the call. A save that comes while the one
        before is being written waits for it.

        Args:
            state_dict: This rank's part: DTensors, ShardedTensors, tensors that are the same on all
                ranks, objects, and ``Stateful`` values.
            iteration: Its number, above that of the save before.
            is_async: Return as soon as the tensors are copied; else when it is committed.
            on_commit: Called on the first rank, in another thread, when the checkpoint is there.

        Raises:
            CheckpointingException: The save before failed, and nobody has asked yet; nothing was
                begun. Or this one did: the same on every rank, older checkpoints are as they were,
                and training may go on and save again.
            PeerLostError: Some rank did not come in time.
        """
        self._check_usable()
        if iteration < 0:
            raise CheckpointingException(f"iteration is {iteration}; it must not be negative")
        self.wait_until_finished()
        if iteration <= self._newest_iteration:
            raise CheckpointingException(
                f"iteration {iteration} cannot be saved after {self._newest_iteration}: numbers "
                f"must grow. To go back, load() the checkpoint to go on from"
            )
        called = time.monotonic()
        planner = DefaultSavePlanner()
        with record_function("localckpt.global.plan"):
            planned = plan_save(
                self._meeting,
                plain_state_dict(state_dict),
                planner,
                self._writer,
                tag=[self.session_id, iteration],
                word=lambda: self._begin(iteration),
            )
        epoch, save_id = planned.word
        self._epoch = epoch
        folder = Folder(self.root, iteration, epoch)
        path = folder.partial(save_id) if self._atomic_rename else folder.path
        self._writer.reset(path)
        self._writer.save_id = save_id
        save = self._save = _Save(folder, path, save_id, planned.metadata, on_commit, called)
        save.planned = time.monotonic()
        try:
            with record_function("localckpt.global.stage"):
                self._writer.prepare_write_data(planned.plan, planner)
                save.writes = self._writer.preload_tensors()
        except Exception as error:  # noqa: BLE001 - told to all ranks when they meet
            save.staging_error = error
        save.staged = time.monotonic()
        save.start(lambda: self._write_and_commit(save))
        if not is_async:
            self.wait_until_finished()

    def check_for_errors(self) -> None:
        """Raise what the last save failed with, once; waits for nothing.

        Every rank is told, though not all at the same step.
        """
        save = self._save
        if save is not None and save.over.is_set():
            self._take_error(save)

    def wait_until_finished(self) -> None:
        """Return when the last save is committed on all ranks, or raise what it failed with."""
        save = self._save
        if save is not None:
            self._await(save)
            self._take_error(save)

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

    def load(
        self,
        state_dict: dict[str, Any],
        iteration: int | None = None,
        *,
        allow_partial_load: bool = False,
    ) -> int:
        """Fill a state in place, with whatever sharding it has; all ranks call it.

        Every block is verified as it is read. If the newest checkpoint turns out damaged, all ranks
        take the one before.

        Args:
            state_dict: The state to fill. Tensors on the meta device are made; objects are
                replaced.
            iteration: The checkpoint; the newest by default.
            allow_partial_load: Leave values that the checkpoint has not as they are.

        Returns:
            The iteration that was loaded.

        Raises:
            CheckpointingException: There is no such checkpoint.
            MismatchError: The state does not fit.
            CorruptShardError, StorageError: It is damaged, or cannot be read. As every error it is
                raised on every rank, and the state may be partly filled.
        """
        self._check_usable()
        self._settle()
        older_than: tuple[int, int] | None = None
        while True:
            found = self._look(iteration, older_than)
            if found is None:
                raise CheckpointingException(self._why_none(iteration, older_than))
            older_than = found.folder.version
            try:
                self._load(found, state_dict, allow_partial_load)
            except (CorruptShardError, StorageError) as error:
                if iteration is not None:
                    raise
                logger.error(
                    "iteration %d cannot be loaded, trying an older one: %s",
                    found.folder.iteration,
                    error,
                )
                continue
            # What is saved from here on is a new attempt, and newer than all there is.
            self._epoch, self._newest_iteration = None, found.folder.iteration
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

    def __enter__(self) -> GlobalCheckpointManager:
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
            # The others may never come; a save under way goes on, and ends with the process.
            self._closed = True
            if self._save is None or self._save.over.is_set():
                self._free()

    # On the first rank.

    def _begin(self, iteration: int) -> list[Any]:
        """Make the directory of a save. All ranks are done with those before."""
        self._lock.take(self.timeout)
        with storage_errors("make", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        if self._epoch is None:
            folders, leftovers = folders_in(self.root)
            known = [f.epoch for f in (*folders, *(leftover.folder for leftover in leftovers))]
            self._epoch = 1 + max(known, default=0)
        folder, save_id = Folder(self.root, iteration, self._epoch), uuid.uuid4().hex
        path = folder.partial(save_id) if self._atomic_rename else folder.path
        with storage_errors("make", path):
            path.mkdir()
            sync_folder(self.root)
        return [self._epoch, save_id]

    def _commit(self, save: _Save, said: list[bytes]) -> list[bytes]:
        """Make a checkpoint of what all ranks have written."""
        written, as_before = self.plans.hear_written(said)
        metadata = self._metadata(save, written, as_before)
        record = CommitRecord(
            self.session_id,
            save.folder.iteration,
            save.folder.epoch,
            save.save_id,
            self.world_size,
            {name: nbytes for part in written for name, nbytes in part.files.items()},
            xxhash.xxh3_64_intdigest(metadata),
        )
        write_durably(save.path / METADATA_NAME, metadata)
        write_durably(save.path / RECORD_NAME, record.to_bytes())
        if self._atomic_rename:
            with storage_errors("commit", save.folder.path):
                save.path.rename(save.folder.path)
                sync_folder(self.root)
        save.committed = True
        logger.info("committed %s: %.3f GB of %d ranks", *save.told(record.nbytes, self.world_size))
        if save.on_commit is not None:
            try:
                save.on_commit()
            except Exception as error:
                raise CheckpointingException(
                    f"iteration {save.folder.iteration} is committed, but on_commit failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return [b""]

    def _metadata(self, save: _Save, written: list[Written], as_before: bool) -> bytes:
        assert save.metadata is not None, "the first rank has planned"
        if not (as_before and self._pickled and self._pickled[0] is save.metadata):
            save.metadata.version = CURRENT_DCP_VERSION
            save.metadata.storage_data = {
                result.index: result.storage_data for part in written for result in part.results
            }
            self._pickled = (save.metadata, pickle.dumps(save.metadata))
        return self._pickled[1]

    def _sweep(self, keep: Path) -> None:
        """Remove what saves that were never committed have left; the root is this job's."""
        folders, leftovers = folders_in(self.root)
        paths = [leftover.path for leftover in leftovers]
        if not self._atomic_rename:
            paths += [f.path for f in folders if not (f.path / RECORD_NAME).exists()]
        for path in paths:
            if path != keep:
                logger.info("removing %s, which was never committed", path)
                _remove_tree(path)

    def _retire(self) -> None:
        """Let older checkpoints go."""
        if self._keep_last is None:
            return
        folders, _ = folders_in(self.root)
        complete = [folder for folder in folders if (folder.path / RECORD_NAME).exists()]
        for folder in complete[self._keep_last :]:
            try:
                remove(folder, by_rename=self._atomic_rename)
            except StorageError as error:
                logger.warning("%s", error)

    def _find(self, iteration: int | None, older_than: tuple[int, int] | None) -> _Found | None:
        folders, _ = folders_in(self.root)
        for folder in folders:
            if iteration not in (None, folder.iteration):
                continue
            if older_than is not None and folder.version >= older_than:
                continue
            try:
                record = CommitRecord.read(folder.path)
            except CorruptShardError as error:
                logger.error("%s is not counted: %s", folder.path, error)
                continue
            if record is not None:
                return _Found(folder, record.save_id, record.metadata_digest)
        return None

    # On every rank.

    def _look(self, iteration: int | None, older_than: tuple[int, int] | None) -> _Found | None:
        """The newest checkpoint, as the first rank sees it."""

        def answer(said: list[bytes]) -> list[bytes]:
            require_same(said, self._meeting.global_ranks)
            return [_Found.tell(self._find(iteration, older_than))]

        tag = json.dumps([self.session_id, iteration]).encode()
        return _Found.hear(self.root, self._meeting.hold("find a checkpoint", lambda: tag, answer))

    def _load(self, found: _Found, state_dict: dict[str, Any], partial: bool) -> None:
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

        def read() -> bytes:
            planner = ReshardingLoadPlanner(
                allow_partial_load=partial, safe_globals=self._safe_globals
            )
            with warnings.catch_warnings(), record_function("localckpt.global.load"):
                # The ranks agree here, not there.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load_into(state_dict, storage_reader=reader, planner=planner, no_dist=True)
            return b""

        # While all are here, since they share it.
        reader.read_metadata()
        self._meeting.hold(f"load iteration {found.folder.iteration}", read, lambda _: [b""])
        seconds = time.monotonic() - began
        logger.info(
            "loaded %s: read %.3f GB in %.2f s (%.2f GB/s)",
            found.folder.path,
            reader.nbytes_read / 1e9,
            seconds,
            reader.nbytes_read / 1e9 / seconds,
        )

    def _write_and_commit(self, save: _Save) -> None:
        """Behind training: write, meet the others, and commit or give up together."""
        name = f"{self.session_id}/{save.folder.iteration}/{save.save_id}"
        try:
            with self.plans.kept_if_all_is_well():
                self._meeting.hold(
                    f"save iteration {save.folder.iteration}",
                    lambda: self._write(save),
                    lambda said: self._commit(save, said),
                    name=name,
                )
        except CheckpointingException as error:
            save.error = error
            if self._meeting.is_coordinator and not save.committed:
                _remove_tree(save.path)
        else:
            if self._meeting.is_coordinator:
                self._retire()

    def _write(self, save: _Save) -> bytes:
        if save.staging_error is not None:
            raise save.staging_error
        if self._meeting.is_coordinator:
            self._sweep(keep=save.path)
        with record_function("localckpt.global.write"):
            streams = write_files(save.writes)
        save.written = time.monotonic()
        files = {write.path.name: write.nbytes for write in save.writes}
        logger.info("wrote %s", save.describe(sum(files.values())))
        return self.plans.say_written(Written(self._writer.results(streams), files))

    def _await(self, save: _Save) -> None:
        # Writing has no deadline of its own, and the round has one for each of its two waits.
        if not save.over.wait(4 * self.timeout):
            raise CheckpointingException(
                f"the save of iteration {save.folder.iteration} is not over after "
                f"{4 * self.timeout:g} s: is {self.root} stuck? Older checkpoints are as they were"
            )

    def _settle(self) -> None:
        """Wait for the last save, and leave its error to whoever asks for it."""
        if self._save is not None:
            self._await(self._save)

    def _take_error(self, save: _Save) -> None:
        self._save = None
        if save.error is not None:
            raise save.error
        self._newest_iteration = save.folder.iteration

    def _why_none(self, iteration: int | None, older_than: tuple[int, int] | None) -> str:
        if older_than is not None:
            return f"no checkpoint under {self.root} can be loaded; see the errors above"
        if iteration is not None:
            return f"there is no checkpoint of iteration {iteration} under {self.root}"
        return f"there is no checkpoint under {self.root}: load() only if find_latest() is not -1"

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise CheckpointingException(
                f"this manager belongs to process {self._process}, of which this one is a fork; "
                f"make one here"
            )
        if self._closed:
            raise CheckpointingException("this manager is closed; make another")

    def _free(self) -> None:
        self._writer.close()
        self._lock.release()


@dataclass(slots=True)
class _Save:
    """One save on this rank, from its plan to its end."""

    folder: Folder
    path: Path
    save_id: str
    metadata: Metadata | None
    on_commit: Callable[[], None] | None
    called: float
    planned: float = 0.0
    staged: float = 0.0
    written: float = 0.0
    writes: list[FileWrite] = field(default_factory=list)
    staging_error: Exception | None = None
    committed: bool = False
    error: CheckpointingException | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the outcome
                failed = CheckpointingException(f"{self.folder.path} was not saved: {error!r}")
                failed.__cause__ = error
                self.error = failed
            finally:
                self.over.set()

        # Not a daemon: the interpreter must not take the memory away that is being written.
        thread = threading.Thread(target=run, name="localckpt-global", daemon=False)
        try:
            thread.start()
        except RuntimeError:
            # No thread can be had: training waits for this save.
            run()

    def describe(self, nbytes: int) -> str:
        plan, stage = self.planned - self.called, self.staged - self.planned
        write = self.written - self.staged
        return (
            f"{self.path}: {nbytes / 1e9:.3f} GB; planned in {plan:.3f} s, staged in {stage:.3f} s "
            f"({nbytes / 1e9 / max(stage, 1e-9):.2f} GB/s), written in {write:.3f} s "
            f"({nbytes / 1e9 / max(write, 1e-9):.2f} GB/s)"
        )

    def told(self, nbytes: int, ranks: int) -> tuple[Path, float, int]:
        return self.folder.path, nbytes / 1e9, ranks


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that can be loaded."""

    folder: Folder
    save_id: str
    metadata_digest: int

    @staticmethod
    def tell(found: _Found | None) -> bytes:
        if found is None:
            return b"null"
        folder = found.folder
        text = [folder.iteration, folder.epoch, found.save_id, found.metadata_digest]
        return json.dumps(text).encode()

    @classmethod
    def hear(cls, root: Path, told: bytes) -> _Found | None:
        values = json.loads(told)
        if values is None:
            return None
        iteration, epoch, save_id, digest = values
        return cls(Folder(root, iteration, epoch), save_id, digest)


def _remove_tree(path: Path) -> None:
    """Remove what is no checkpoint; what cannot go now goes at a later save."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be removed, and will be at a later save: %s", path, error)
