"""One checkpoint on shared storage, which a thread of each rank makes behind training.

    begun -> written -> committed | failed

A subclass is a source of what is written: a state that is staged, or images that the nodes keep.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic

from localckpt.errors import CheckpointingException
from localckpt.events.stream import EventStream
from localckpt.global_tier.root import BegunSave, CheckpointRoot
from localckpt.ranks.ranks import Ranks
from localckpt.threads import Latch, Task


class BackgroundSave(ABC):
    """One save.

    Attributes:
        committed: The checkpoint is there, as far as this rank knows.
        error: What it failed with, once it is over.
        over: Set once it is over, well or badly.
        task: The work, for the thread that carries it out.
    """

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
        self._begun = begun
        self._ranks, self._root, self._events = ranks, root, events
        self._on_over = on_over
        self._thread: threading.Thread | None = None

    def waits_for(self) -> str:
        """Return in words whom or what it waits for, in any thread."""
        return self._ranks.awaits() or str(self._root.path)

    @property
    @abstractmethod
    def _not_done(self) -> str:
        """Sentence that it was not saved, for an error that is none of ours."""

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
        is_failed = True
        try:
            problem = self._save()
            is_failed = False
        except BaseException as error:
            is_failed = not self._is_resumed(error)
            raise
        finally:
            if self._ranks.is_root and self._begun is not None:
                if is_failed and not self.committed:
                    self._root.roll_back(self._begun)
                self._root.end(self._begun)
        if self._ranks.is_root and self._begun is not None:
            began = monotonic()
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
