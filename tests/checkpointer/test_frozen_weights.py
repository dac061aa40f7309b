"""A state that names the trained weights alone, as docs/training.md does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from localckpt import Checkpointer

_FROZEN_NBYTES = 512 * 512 * 4


def _make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 2))
    model[0].requires_grad_(False)
    return model


def _state(model: torch.nn.Module) -> dict[str, Any]:
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return {"model": (lambda: trained, lambda saved: model.load_state_dict(saved, strict=False))}


def test_frozen_weights_are_left_out_and_trained_ones_come_back(tmp_path: Path) -> None:
    model, other = _make_model(1), _make_model(2)
    frozen = other[0].weight.clone()
    with Checkpointer(_state(model), local=tmp_path) as checkpointer:
        assert checkpointer.resume() == 0
        checkpointer.save(0)

    with Checkpointer(_state(other), local=tmp_path) as checkpointer:
        assert checkpointer.resume() == 1

    (file,) = tmp_path.rglob("*.safetensors")
    assert file.stat().st_size < _FROZEN_NBYTES
    assert torch.equal(other[1].weight, model[1].weight)
    assert torch.equal(other[1].bias, model[1].bias)
    assert torch.equal(other[0].weight, frozen)
    assert not torch.equal(other[0].weight, model[0].weight)
