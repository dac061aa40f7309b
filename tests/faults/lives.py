"""The lives of one job: the same processes, on nodes that are set up anew for each of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.managers.jobs import cliques, make_manager

__all__ = ["Lives"]


class Lives:
    """Seen by one rank, which is alone on its node; ``params`` are jump and factor of replicas."""

    def __init__(
        self, kind: str, base: Path, rank: int, params: Sequence[int] | None, strategy: Any = None
    ) -> None:
        self.root = base / "lives" / f"node{rank}"
        self._kind, self._base, self._rank = kind, base, rank
        self._repl = cliques(*params) if params else strategy

    @contextmanager
    def life(
        self, kept: str | None, change: Callable[[Path], None] | None = None, **options: Any
    ) -> Iterator[Any]:
        """A manager on a node that is as it was kept, and then changed; else on an empty one."""
        shutil.rmtree(self.root, ignore_errors=True)
        if kept is None:
            self.root.mkdir(parents=True)
        else:
            shutil.copytree(self._kept(kept), self.root)
        if change is not None:
            change(self.root)
        # Nobody begins while another node is still what it was in the last life.
        dist.barrier()
        with make_manager(self._kind, self.root, "job", self._repl, **options) as manager:
            yield manager
        dist.barrier()

    def keep(self, name: str) -> None:
        """Keep the node as it is now, for later lives."""
        shutil.copytree(self.root, self._kept(name))

    def close(self) -> None:
        if self._repl is not None:
            self._repl.close()

    def _kept(self, name: str) -> Path:
        return self._base / f"kept {name}" / f"node{self._rank}"
