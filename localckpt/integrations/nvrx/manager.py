"""NVRx's local manager: as many checkpoints as it keeps."""

from __future__ import annotations

import os
from typing import Any

from localckpt.managers.local import LocalCheckpointManager as _LocalCheckpointManager
from localckpt.replication.strategies import ReplicationStrategy

__all__ = ["LocalCheckpointManager"]


class LocalCheckpointManager(_LocalCheckpointManager):
    """Keeps the newest complete checkpoint only, as NVRx's manager does.

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
        **options: Any,
    ) -> None:
        super().__init__(
            root_local_ckpt_dir, session_id, repl_strategy, keep_last=keep_last, **options
        )
