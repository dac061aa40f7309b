"""Managers as a user would write them: the five hooks, and a place of their own to keep shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from localckpt import BaseCheckpointManager, CkptID, TensorAwareStateDict

__all__ = ["DictManager", "FileManager"]


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


class FileManager(BaseCheckpointManager):
    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder / f"rank{self.rank}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, ckpt_id: CkptID) -> Path:
        return self.folder / f"{ckpt_id.iteration}_{ckpt_id.rank}_{ckpt_id.session_id}.pt"

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        for path in self.folder.glob("*.pt"):
            iteration, rank, session_id = path.stem.split("_")
            yield CkptID(int(iteration), int(rank), session_id)

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        state: TensorAwareStateDict = torch.load(self._path(ckpt_id), weights_only=False)
        return state

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        torch.save(state_dict, self._path(ckpt_id))

    def _cleanup(self, iteration: int) -> None:
        for ckpt_id in list(self._my_ckpt_ids()):
            if ckpt_id.iteration < iteration:
                self._path(ckpt_id).unlink()

    def _cleanup_failed_save(self, iteration: int) -> None:
        for ckpt_id in list(self._my_ckpt_ids()):
            if ckpt_id.iteration == iteration:
                self._path(ckpt_id).unlink()
