"""Record of one rank's run of a training loop, in the stream that its managers share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import localckpt
from localckpt.checkpointer.cadence import Costs
from localckpt.events.event import Outcome, Tier
from localckpt.events.jsonl import JsonLines
from localckpt.events.stream import EventStream, Sink
from localckpt.storage.names import session_name
from localckpt.storage.owner import Owner

__all__ = ["ELSEWHERE_SOURCE", "SHARED_SOURCE", "RunRecord", "default_sinks"]

SHARED_SOURCE = "shared storage"
ELSEWHERE_SOURCE = "elsewhere"
"""Source of what no node has given, beside those of :class:`LoadReport`."""
_PARTS = ("start", "meet", "find", "fetch", "read")


def default_sinks(root: Path, session_id: str) -> list[Sink]:
    """The record that is kept unless others are asked for: beside the checkpoints of a node."""
    return [JsonLines(root / "events", below=session_name(session_id))]


class RunRecord:
    """Record of one rank, from the beginning of its run to the end.

    Args:
        sinks: They belong to the record.
        rank: Rank of this process in the job.

    Attributes:
        stream: For the managers; it is not theirs to close.
    """

    def __init__(self, sinks: Iterable[Sink], rank: int) -> None:
        # Held back, since nothing is to be made before the managers have claimed their places.
        self.stream = EventStream(sinks, rank=rank, is_held=True)
        now = time.monotonic()
        self._began: float | None = now - _process_age_s()
        details = {"pid": os.getpid(), "process_start": self.stream.clock_time(self._began)}
        self._process = details
        self._made = now

    def begin(self, world_size: int, session_id: str, **places: str | None) -> None:
        """Note what run this is, before anything else is noted."""
        details = {
            "session": session_id,
            "world_size": world_size,
            **self._process,
            "version": localckpt.__version__,
            **places,
        }
        self.stream.emit("run_began", began=self._made, ended=self._made, details=details)
        assert self._began is not None, "nothing was resumed before"
        self.stream.add("start", self._began, self._made)

    def resumed(
        self,
        called: float,
        step: int | None,
        source: str,
        job_run: str,
        error: BaseException | None = None,
    ) -> None:
        """Note that training goes on, or that it cannot.

        Args:
            called: When that began, by ``time.monotonic()``. The first time it is when the process
                started.
            step: The step that was loaded, -1 for none; ``None`` after an error.
            source: Where this rank's part came from.
            job_run: Name of the run that all ranks share.
            error: Why it cannot.
        """
        seconds, began = self.stream.seconds, called if self._began is None else self._began
        details = {f"{part}_s": seconds.get(part, 0.0) for part in _PARTS}
        seconds.clear()
        self._began = None
        self.stream.emit(
            "resume",
            began=began,
            step=step,
            tier=_tier(source),
            error=error,
            details={"job_run": job_run, "source": source, **details},
        )

    def steps(self, step: int, costs: Costs) -> None:
        """Note how far training is."""
        self.stream.emit("steps", step=step, details=asdict(costs))

    def preempted(self, step: int, reason: str | None) -> None:
        """Note that the job is to stop."""
        self.stream.emit("preempted", step=step, details={"reason": reason})

    def end(self, step: int | None, outcome: Outcome | None, error: BaseException | None) -> None:
        """Note the end, and close the sinks."""
        self.stream.emit("run_ended", step=step, outcome=outcome, error=error)
        self.stream.close()


def _tier(source: str) -> Tier | None:
    if source in ("", ELSEWHERE_SOURCE, SHARED_SOURCE):
        return "shared" if source == SHARED_SOURCE else None
    return "local" if source == "own node" else "replicated"


def _process_age_s() -> float:
    """Time since this process began, by the clock that counts from the machine's boot."""
    started_s = Owner.me().started / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
