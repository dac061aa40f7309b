"""Files of DeepSpeed's that are values in memory, for one save or one load."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from localckpt.errors import CheckpointingException

MP_RANK = re.compile(r"mp_rank_\d+")
"""Part of a file's name that tells the tensor-parallel rank."""


class MemoryFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine whose files are values in memory, this rank's own.

    ``files`` has the values to load by name of file.

    Attributes:
        files: Values by name of file.
    """

    def __init__(self, files: Mapping[str, Any] | None = None) -> None:
        super().__init__(None)
        self.name = type(self).__name__
        self.files = dict(files or {})

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        self.files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make no directory: there are no files."""

    def save(self, state_dict: Any, path: str) -> None:
        """Take the value of a file. Its tensors may change once the checkpoint is committed."""
        self.files[os.path.basename(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the value of a file, with the tensors where they are."""
        name = os.path.basename(path)
        # DeepSpeed looks into the first file of all tensor-parallel ranks, to count them.
        alike = {MP_RANK.sub("", own): own for own in self.files if "model_states" in own}
        name = name if name in self.files else alike.get(MP_RANK.sub("", name), name)
        if name not in self.files:
            raise CheckpointingException(
                f"DeepSpeed asks for {name}, and this rank has saved {', '.join(self.files)}: make "
                f"the engine with the configuration that it was saved with"
            )
        return self.files[name]

    def commit(self, info: Any) -> bool:
        """Say that all files are there."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return ``True``: a rank finds all that it loads in its own shard."""
        return True

    def is_decoupled(self) -> bool:
        """Return ``True``: no file says which checkpoint is the latest."""
        return True

    def set_commit_info(self, info: Any) -> None:
        """Note nothing: there is no checkpoint to commit later."""

    def get_commit_info(self) -> None:
        """Return ``None``, for DeepSpeed to commit none before its next step."""

    def preserves_storage_sharing(self) -> bool:
        """Return ``False``: of a view its own bytes are saved, so DeepSpeed need not copy it."""
        return False

    def cleanup(self) -> None:
        """Let go of the values."""
        self.files = {}
