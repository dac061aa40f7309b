"""A manager as a user would write it: the five hooks, and a place of its own to keep shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from localckpt import BaseCheckpointManager, CkptID, TensorAwareStateDict


class DictManager(BaseCheckpointManager):
    """Keeps the last two checkpoints in a dict, which outlives the manager."""

    def __init__(self, kept: dict[CkptID, TensorAwareStateDict], **options: Any) -> None:
        super().__init__(**options)
        self.kept = kept

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        return list(self.kept)

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        # Whoever loads it may train on with it.
        return copy.deepcopy(self.kept[ckpt_id])

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        self.kept[ckpt_id] = state_dict

    def _cleanup(self, iteration: int) -> None:
        keep = sorted({ckpt_id.iteration for ckpt_id in self.kept})[-2:]
        for ckpt_id in [i for i in self.kept if i.iteration not in keep]:
            del self.kept[ckpt_id]

    def _cleanup_failed_save(self, iteration: int) -> None:
        for ckpt_id in [i for i in self.kept if i.iteration == iteration]:
            del self.kept[ckpt_id]
