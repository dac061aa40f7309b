"""One checkpoint on shared storage, which a thread of each rank makes behind training.

    begun -> written -> committed | failed

:class:`BackgroundSave` is the life cycle. Its subclasses write a state of which training waits for
the copy, or drain the images that the nodes keep.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.profiler import record_function

from localckpt.availability.divergence import Divergence, compare_replicas
from localckpt.errors import CheckpointingException, PeerLostError
from localckpt.events.stream import EventStream, SaveRecord
from localckpt.global_tier.objects import Retries
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.global_tier.save_plan import MOST_COMPARED, common_digests, folded, judge_differing
from localckpt.global_tier.staging import StagedFiles
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.ranks.values import Message
from localckpt.threads import Latch, Task

logger = logging.getLogger(__name__)


class BackgroundSave(ABC):
    """One save; it is ``committed`` if the checkpoint is there, as far as this rank knows."""

    def __init__(
        self,
        iteration: int,
        begun: BegunSave | None,
        ranks: Ranks,
        root: CheckpointRoot,
        events: EventStream,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.iteration = iteration
        self.committed = False
        self.error: CheckpointingException | None = None
        self.over = Latch()
        self.task: Task[None] = Task(self._run)
        # For an error that is none of ours.
        self._not_done = f"iteration {iteration} was not saved"
        self._begun = begun
        self._ranks, self._root, self._events = ranks, root, events
        self._on_over = on_over
        self._thread: threading.Thread | None = None

    def waits_for(self) -> str:
        """Return in words whom or what it waits for, in any thread."""
        return self._ranks.awaits() or str(self._root.path)

    @abstractmethod
    def _save(self) -> str:
        """Write, decide with the others, and commit; returns what went wrong after the commit."""

    @abstractmethod
    def _note_end(self) -> None:
        """Emit the event of the end."""

    def _is_resumed(self, error: BaseException) -> bool:
        """Return whether another attempt may go on with what this one has written."""
        return False

    def _run(self) -> None:
        self._thread = threading.current_thread()
        try:
            self._carry_out()
        except CheckpointingException as error:
            self.error = error
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the outcome
            self.error = CheckpointingException(f"{self._not_done}: {error!r}")
            self.error.__cause__ = error
        finally:
            self._note_end()
            self.over.set()
            self._on_over()

    def _carry_out(self) -> None:
        is_failed = False
        try:
            problem = self._save()
        except BaseException as error:
            is_failed = not (self.committed or self._is_resumed(error))
            raise
        finally:
            if self._ranks.is_root and self._begun is not None:
                self._root.end(self._begun, is_failed=is_failed)
        if self._ranks.is_root and self._begun is not None:
            began = time.monotonic()
            if removed := self._root.prune(self._begun):
                details = {"removed": removed}
                self._events.emit(
                    "pruned", began=began, step=self.iteration, tier="shared", details=details
                )
        if problem:
            raise CheckpointingException(problem)

    def _commit_files(
        self, metadata: bytes, files: dict[str, int], unequal: Sequence[str] = ()
    ) -> None:
        """On the first rank: make a checkpoint of what all have written."""
        assert self._begun is not None, "it is planned"
        self._root.commit(self._begun, metadata, files, self._ranks.world_size, unequal)
        self.committed = True


class SharedSave(BackgroundSave):
    """Save of a state, which all ranks have planned.

    Training asked for it when it ``began``, and the save before was over when it was ``called``.
    """

    _begun: BegunSave

    def __init__(
        self,
        begun: BegunSave,
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
        self._not_done = f"{begun.folder.finished.path} was not saved"
        self.record = SaveRecord(events, self.iteration, began, "shared")
        self.record.waited_s = called - began
        self._number = number
        self._writer = writer
        self._on_commit = on_commit
        # Of values that other ranks save, too.
        self._digests: dict[int, dict[str, str]] = {}
        self._staged: StagedFiles | None = None
        self._staging_error: Exception | None = None
        self._is_left = False
        self._called, self._planned_at, self._staged_at = called, time.monotonic(), 0.0

    def begin(self, planner: DefaultSavePlanner) -> None:
        """Copy this rank's tensors, and have a thread do the rest."""
        writer = self._writer
        try:
            with record_function("localckpt.global.stage"):
                writer.reset(self._begun.folder.path)
                writer.save_id = self._begun.save_id
                writer.prepare_write_data(planner.finish_plan(writer.plans.plan), planner)
                self._digests = common_digests(
                    *(writer.plans.local, writer.plans.common, self._ranks.global_ranks, planner)
                )
                self._staged = writer.preload_tensors()
        except Exception as error:  # noqa: BLE001 - raised on all ranks, by the thread
            self._staging_error = error
        self._start()

    def begin_if_interrupted(self) -> None:
        """Have a save that an interrupt kept from beginning be given up on all ranks."""
        if self.task.call_off() and not self.over.is_set():
            self._staging_error = CheckpointingException("it was interrupted")
            self.task = Task(self._run)
            self._start()

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

    def leave(self) -> None:
        """Try nothing again from now on that the storage refuses."""
        self._is_left = True

    def _start(self) -> None:
        self._staged_at = self.record.went_on = time.monotonic()
        self.record.copied = self._planned_at, self._staged_at
        self.record.nbytes = 0 if self._staged is None else self._staged.nbytes
        if self._staging_error is not None:
            self._writer.give_up(self._staging_error)
        try:
            # Not a daemon: the interpreter must not take the memory away that is being written.
            self.task.start("localckpt-global", daemon=False)
        except RuntimeError:
            # No thread can be had: training waits for this save.
            self.task.run()

    def _note_end(self) -> None:
        # Another rank may know more than one that has lost it.
        is_unknown = not self.committed and isinstance(self.error, PeerLostError)
        self.record.note_end(
            durable=time.monotonic() if self.committed else None,
            tier="shared",
            outcome="unknown" if is_unknown else None,
            error=None if self.committed else self.error,
        )

    def _save(self) -> str:
        self._ranks.rounds = self._number
        with self._writer.plans.kept_if_all_is_well():
            problem, differing = self._ranks.commit(
                f"save iteration {self.iteration}",
                *(self._write, self._commit),
                read=shaped((str, list | None)),
            )
            if differing is not None:
                divergence, rank = Divergence.from_json(differing), self._ranks.rank
                asked = [of.set_id for of in divergence.sets if rank in of.asked]
                self._ranks.decide(
                    f"name what differs in iteration {self.iteration}",
                    lambda: ["", {str(set_id): self._digests[set_id] for set_id in asked}],
                    partial(judge_differing, self.iteration, divergence),
                )
        self.committed = True
        return str(problem)

    def _write(self) -> Message:
        if self._staging_error is not None:
            raise self._staging_error
        if self._ranks.is_root:
            self._root.sweep(self._begun)
        if self._staged is not None:
            with record_function("localckpt.global.write"):
                self._staged.write(Retries(Deadline.after(self._ranks.timeout_s).at, self._check))
        self._log_written()
        results = [] if self._staged is None else self._staged.results()
        return self._writer.plans.report_written(results, folded(self._digests))

    def _check(self) -> None:
        if self._is_left or self._ranks.is_aborted:
            raise PeerLostError(f"{self._not_done}: its manager was closed")

    def _commit(self, reports: list[Message]) -> tuple[str, list[Any] | None]:
        """On the first rank: commit, unless values under one name differ; say on which ranks."""
        divergence = compare_replicas(
            [message.record for message in reports], MOST_COMPARED, MOST_COMPARED
        )
        if divergence is not None:
            return "", divergence.to_json()
        self._commit_files(*self._writer.plans.pickled(reports))
        try:
            if self._on_commit is not None:
                self._on_commit()
        except Exception as error:  # noqa: BLE001 - raised on every rank
            return f"iteration {self.iteration} is committed, but on_commit failed: {error!r}", None
        return "", None

    def _log_written(self) -> None:
        nbytes = self.record.nbytes / 1e9
        plan, stage = self._planned_at - self._called, self._staged_at - self._planned_at
        write = time.monotonic() - self._staged_at
        logger.info(
            "wrote %s: %.3f GB, planned in %.3f s, staged in %.3f s (%.2f GB/s), written in %.3f s "
            "(%.2f GB/s)",
            *(self._begun.folder.finished.path, nbytes, plan, stage, nbytes / max(stage, 1e-9)),
            *(write, nbytes / max(write, 1e-9)),
        )
