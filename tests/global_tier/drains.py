"""What tests of drains share: managers of both tiers, small files, and waiting for files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from localckpt import AsyncCallsQueue, GlobalCheckpointManager
from localckpt.global_tier import staging
from localckpt.waiting import wait_until
from tests.global_tier.models import manager_on
from tests.managers.jobs import make_manager

__all__ = ["WAIT_S", "Job", "await_files", "small_files"]

WAIT_S = 60.0
"""Far longer than any drain of the tests takes."""


class Job:
    """Managers of both tiers, and a queue for promotions, of one rank."""

    def __init__(
        self,
        root: Path,
        on_shared: dict[str, Any] | None = None,
        node: Path | None = None,
        **options: Any,
    ) -> None:
        self._open = ExitStack()
        if "repl_strategy" in options:
            self._open.enter_context(options["repl_strategy"])
        rank = dist.get_rank() if dist.is_initialized() else 0
        node = node or root / f"node{rank}"
        self.nodes = self._open.enter_context(make_manager("disk", node, **options))
        usual = {"root": root / "shared", "events": options.get("events"), "local": self.nodes}
        self.shared: GlobalCheckpointManager = self._open.enter_context(
            manager_on(**(usual | (on_shared or {})))
        )
        self.queue = self._open.enter_context(AsyncCallsQueue(timeout_s=WAIT_S))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def begin(self, iteration: int, **options: Any) -> None:
        self.queue.schedule_async_request(self.nodes.promote(iteration, to=self.shared, **options))

    def promote(self, iteration: int, **options: Any) -> None:
        self.begin(iteration, **options)
        self.queue.wait_until_finished()


@contextmanager
def small_files() -> Iterator[None]:
    """Drains write files of 1 MiB."""
    before = staging.FILE_NBYTES
    staging.FILE_NBYTES = 1 << 20  # type: ignore[misc]
    try:
        yield
    finally:
        staging.FILE_NBYTES = before  # type: ignore[misc]


def await_files(root: Path, count: int, of_rank: str = "") -> None:
    """Wait until a drain has begun so many data files, of one rank or of all."""
    pattern = f".iteration*/__{of_rank}*.distcp"
    assert wait_until(lambda: len(list(root.glob(pattern))) >= count, WAIT_S)
