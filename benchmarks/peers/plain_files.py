"""The plain ways: one file, written in the foreground."""

from __future__ import annotations

import safetensors.torch
import torch

from benchmarks.peers.base import Peer
from benchmarks.state import flat_tensors, state_tensors

__all__ = ["SafetensorsFile", "TorchSave"]


class TorchSave(Peer):
    """``torch.save`` and ``torch.load``."""

    note = "new tensors, then copied; fsync by the harness"

    def start(self) -> None:
        target = self.next_target()
        target.mkdir()
        torch.save(self.state, target / "state.pt")

    def load(self) -> None:
        loaded = torch.load(self.target / "state.pt", weights_only=True)
        for target, source in zip(state_tensors(self.state), state_tensors(loaded), strict=True):
            target.copy_(source)


class SafetensorsFile(Peer):
    """``save_file`` and ``load_file`` of the tensors alone."""

    note = "tensors only; mapped, then copied; fsync by the harness"

    def start(self) -> None:
        target = self.next_target()
        target.mkdir()
        safetensors.torch.save_file(flat_tensors(self.state), target / "state.safetensors")

    def load(self) -> None:
        targets = flat_tensors(self.state)
        for name, source in safetensors.torch.load_file(self.target / "state.safetensors").items():
            targets[name].copy_(source)
