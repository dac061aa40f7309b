"""Local manager with NVRx's retention, which also resumes from NVRx's own checkpoints."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localckpt.errors import CheckpointingException
from localckpt.ids import CkptID
from localckpt.integrations.nvrx.changeover import find_nvrx_files, read_nvrx_file
from localckpt.managers.local import LocalCheckpointManager as _LocalCheckpointManager
from localckpt.managers.reports import LoadReport
from localckpt.ranks.failure import Attempt
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.storage.names import local_path

__all__ = ["LocalCheckpointManager"]

logger = logging.getLogger(__name__)


class LocalCheckpointManager(_LocalCheckpointManager):
    """Manager that keeps only the newest complete checkpoint by default, as NVRx's does.

    If the directory has no checkpoint of localckpt, the manager finds and loads NVRx's, provided
    that each rank's file is on the rank's node. NVRx's files are neither changed nor removed.

    Args:
        root_local_ckpt_dir, session_id, repl_strategy, safe_globals, options: As for
            :class:`localckpt.LocalCheckpointManager`.
        keep_last: Number of complete checkpoints to keep.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep_last: int = 1,
        safe_globals: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        self._theirs: dict[int, Path] = {}
        self._root = local_path(root_local_ckpt_dir)
        self._safe_globals = tuple(safe_globals)
        super().__init__(
            root_local_ckpt_dir,
            session_id,
            repl_strategy,
            keep_last=keep_last,
            safe_globals=self._safe_globals,
            **options,
        )

    def find_latest(self) -> int:
        """Return the iteration of the newest checkpoint, or of NVRx's newest if there is none."""
        self._theirs = {}
        if super().find_latest() != -1:
            return self.latest_iteration
        with Attempt() as looking:
            self._theirs = find_nvrx_files(self._root, self.session_id, self.rank)
        common, any_held = self._context.ranks.decide(
            "look for NVRx's files", looking.of(sorted(self._theirs)), _held_by_all
        )
        self._theirs = {i: path for i, path in self._theirs.items() if i in common}
        if not common and any_held:
            logger.warning("NVRx has left files, and no iteration of which every rank has its own")
        return max(common, default=-1)

    def load(self, **options: Any) -> tuple[Any, CkptID]:
        """Load as :class:`localckpt.LocalCheckpointManager` does; NVRx's files take no options.

        Raises:
            CheckpointingException: A file of NVRx's cannot be read on some rank; every rank raises.
        """
        # After a save, _finder.found is None: the base class then looks for checkpoints anew.
        if not self._theirs or self._finder.found is None:
            return super().load(**options)
        called, iteration = time.monotonic(), max(self._theirs)
        path, state = self._theirs[iteration], None
        with Attempt() as loading:
            if options:
                raise CheckpointingException(
                    f"a file of NVRx's is loaded without {', '.join(options)}"
                )
            state = read_nvrx_file(path, self._safe_globals)
            state.restore_tensor_device(non_blocking=False)
        self._context.ranks.decide(f"load NVRx's iteration {iteration}", loading)
        if not self.read_only:
            self.begin(iteration)
        seconds = time.monotonic() - called
        self.last_load = LoadReport(iteration, path.stat().st_size, seconds, "NVRx's file")
        logger.info("loaded %s", self.last_load)
        return state, CkptID(iteration, self.rank, self.session_id)


def _held_by_all(held: list[list[int]]) -> tuple[list[int], bool]:
    """Return the iterations of which every rank has a file, and True if any rank has a file."""
    return sorted(set(held[0]).intersection(*held)), any(held)
