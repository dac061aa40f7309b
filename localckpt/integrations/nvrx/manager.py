"""NVRx's local manager: it keeps as many checkpoints, and goes on from those of NVRx."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from localckpt.errors import CheckpointingException
from localckpt.ids import CkptID
from localckpt.integrations.nvrx.changeover import find_nvrx_files, read_nvrx_file
from localckpt.managers.local import LocalCheckpointManager as _LocalCheckpointManager
from localckpt.managers.reports import LoadReport
from localckpt.replication.strategies import ReplicationStrategy

__all__ = ["LocalCheckpointManager"]

logger = logging.getLogger(__name__)


class LocalCheckpointManager(_LocalCheckpointManager):
    """Keeps the newest complete checkpoint only, as NVRx's manager does.

    While there is none of its own, it finds and loads what NVRx's manager has left in the
    directory, if each rank's file is on the rank's node. Those files are read only, and stay.

    Args:
        root_local_ckpt_dir, session_id, repl_strategy: As for
            :class:`localckpt.LocalCheckpointManager`, as are all other options.
        keep_last: How many complete checkpoints to keep.
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
        self._nvrx_iteration = -1
        self._root = root_local_ckpt_dir
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
        """As of :class:`localckpt.LocalCheckpointManager`; else the newest that NVRx has left."""
        self._nvrx_iteration = -1
        if super().find_latest() == -1:
            mine = find_nvrx_files(self._root, self.session_id, self.rank)
            held = self._coordinator.all_gather("look for files of NVRx", sorted(mine))
            common = set(held[0]).intersection(*held)
            self._nvrx_iteration = max(common, default=-1)
            if self._nvrx_iteration == -1 and any(held):
                logger.warning("NVRx has left files here, but no iteration of every rank")
        return max(self.latest_iteration, self._nvrx_iteration)

    def load(self, **options: Any) -> tuple[Any, CkptID]:
        """As of :class:`localckpt.LocalCheckpointManager`.

        Raises:
            CheckpointingException: A file of NVRx's cannot be read on some rank; on all ranks.
        """
        if self._nvrx_iteration == -1:
            return super().load(**options)
        if options:
            raise CheckpointingException(
                f"iteration {self._nvrx_iteration} was saved by NVRx and is loaded without "
                f"{', '.join(options)}"
            )
        called, iteration = time.monotonic(), self._nvrx_iteration
        path = find_nvrx_files(self._root, self.session_id, self.rank)[iteration]
        told, state = "", None
        try:
            state = read_nvrx_file(path, self._safe_globals)
            state.restore_tensor_device(non_blocking=False)
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            told = f"{type(error).__name__}: {error}"
        said = self._coordinator.all_gather(f"load iteration {iteration} of NVRx", told)
        if any(said):
            wrong = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
            raise CheckpointingException(f"iteration {iteration} of NVRx cannot be loaded: {wrong}")
        self._newest_iteration = iteration
        seconds = time.monotonic() - called
        self.last_load = LoadReport(iteration, path.stat().st_size, seconds, "NVRx's file")
        logger.info("loaded %s", self.last_load)
        return state, CkptID(iteration, self.rank, self.session_id)
