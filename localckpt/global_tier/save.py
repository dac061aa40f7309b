"""One save of one rank while it is behind training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from localckpt.errors import CheckpointingException
from localckpt.global_tier.root import BegunSave
from localckpt.global_tier.write import FileWrite
from localckpt.threads import Latch, Task

__all__ = ["SaveUnderWay"]


@dataclass(slots=True)
class SaveUnderWay:
    """What is known of it; times are those of ``time.monotonic()``.

    Attributes:
        begun: Which save it is.
        metadata: What it holds; ``None`` but on the first rank.
        on_commit: To be called on the first rank.
        called, planned, staged, written: When that was over.
        writes: This rank's files.
        staging_error: What kept them from being staged.
        committed: The checkpoint is there, as far as the first rank knows.
        error: What it failed with.
        over: Set when it is, well or badly.
        task: The rest of it, in a thread of its own.
        thread: That thread.
    """

    begun: BegunSave
    metadata: Metadata | None
    on_commit: Callable[[], None] | None
    called: float
    planned: float
    staged: float = 0.0
    written: float = 0.0
    writes: list[FileWrite] = field(default_factory=list)
    staging_error: BaseException | None = None
    committed: bool = False
    error: CheckpointingException | None = None
    over: Latch = field(default_factory=Latch)
    task: Task[None] | None = None
    thread: threading.Thread | None = None

    @property
    def iteration(self) -> int:
        return self.begun.folder.iteration

    @property
    def has_begun(self) -> bool:
        """Whether :meth:`start` has come so far that the save will be over."""
        return self.over.is_set() or (self.task is not None and self.task.begins())

    def start(self, work: Callable[[], None], afterwards: Callable[[], None]) -> None:
        """Have the rest of it done by a thread; what ``work`` raises is the save's error.

        ``afterwards`` is called when everybody can know that it is over.
        """

        def run() -> None:
            self.thread = threading.current_thread()
            try:
                work()
            except CheckpointingException as error:
                self.error = error
            except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the outcome
                self.error = CheckpointingException(
                    f"{self.begun.folder.path} was not saved: {error!r}"
                )
                self.error.__cause__ = error
            finally:
                self.over.set()
                afterwards()

        self.task = Task(run)
        try:
            # Not a daemon: the interpreter must not take the memory away that is being written.
            self.task.start("localckpt-global", daemon=False)
        except RuntimeError:
            # No thread can be had: training waits for this save.
            self.task.run()

    def wait(self, timeout_s: float) -> None:
        """Return when it is over, well or badly.

        Raises:
            CheckpointingException: It is not in time.
        """
        if threading.current_thread() is self.thread:
            raise CheckpointingException(
                "on_commit called the manager that waits for it: leave word for the training loop"
            )
        if not self.over.wait(timeout_s):
            raise CheckpointingException(
                f"the save of iteration {self.iteration} is not over after {timeout_s:g} s: is "
                f"{self.begun.folder.root} stuck? Older checkpoints are as they were"
            )

    def tell_written(self) -> str:
        """For the log: what it took this rank to write its part."""
        self.written = time.monotonic()
        nbytes = sum(write.nbytes for write in self.writes) / 1e9
        plan, stage = self.planned - self.called, self.staged - self.planned
        write = self.written - self.staged
        return (
            f"{self.begun.folder.path}: {nbytes:.3f} GB, planned in {plan:.3f} s, staged in "
            f"{stage:.3f} s ({nbytes / max(stage, 1e-9):.2f} GB/s), written in {write:.3f} s "
            f"({nbytes / max(write, 1e-9):.2f} GB/s)"
        )
