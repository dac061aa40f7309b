"""Tensors come back with the strides that they had, and are filled whatever strides they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from localckpt.state_dict.image import pack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import find_targets
from tests.state_dict.states import IDENTITY, assert_same, round_trip

_CHANNELS_LAST = torch.channels_last
_ONE = torch.zeros(1)
_IMAGES = torch.arange(120.0).view(2, 3, 4, 5)


def _load_into(saved: Any, given: Any) -> Any:
    return ImageReader(pack(saved, IDENTITY), SafeGlobals()).restore(find_targets(given))


@pytest.mark.parametrize(
    "tensor",
    [
        _IMAGES.to(memory_format=_CHANNELS_LAST),
        torch.rand(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        # All of its strides but two mean nothing, and tell a convolution its layout.
        torch.rand(8, 3, 1, 1).to(memory_format=_CHANNELS_LAST),
        torch.rand(8, 1, 1, 1).to(memory_format=_CHANNELS_LAST),
        torch.rand(3, 4, dtype=torch.complex64).t().conj(),
        torch.rand(4, 3).t(),
        torch.rand(3, 1).expand(3, 4),
        torch.empty(10**6, 10**6, device="meta").t(),
    ],
    ids=lambda tensor: str(tuple(tensor.stride())),
)
def test_the_strides_of_a_dense_tensor_come_back(tensor: torch.Tensor) -> None:
    loaded = round_trip({"parameter": torch.nn.Parameter(tensor), "again": tensor})

    assert_same(loaded["again"], tensor)
    assert loaded["again"].stride() == tensor.stride()
    assert loaded["parameter"].stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:.*channels_last:UserWarning")
def test_a_fused_optimizer_goes_on_bit_for_bit_in_channels_last() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1))
    model = model.to(memory_format=_CHANNELS_LAST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        images = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        model(images.to(memory_format=_CHANNELS_LAST)).square().sum().backward()
        optimizer.step()

    step(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    loaded = round_trip(state)
    step(model, optimizer, 2)

    again = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1))
    # The tensors themselves, as a model that is made on the meta device takes them.
    again.load_state_dict(loaded["model"], assign=True)
    resumed = torch.optim.AdamW(again.parameters(), lr=0.1, fused=True)
    resumed.load_state_dict(loaded["optimizer"])
    step(again, resumed, 2)

    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(resumed.state_dict(), optimizer.state_dict())


_LAYOUTS = {
    "contiguous": lambda: torch.zeros(2, 3, 4, 5),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=_CHANNELS_LAST),
    "transposed": lambda: torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0),
    "with gaps": lambda: torch.zeros(2, 3, 4, 10)[..., ::2],
}


@pytest.mark.parametrize("saved", _LAYOUTS)
@pytest.mark.parametrize("given", _LAYOUTS)
def test_targets_may_have_other_strides_than_what_was_saved(saved: str, given: str) -> None:
    values, target = _LAYOUTS[saved]().copy_(_IMAGES), _LAYOUTS[given]()
    strides = target.stride()

    loaded = _load_into({"images": values, "one": torch.ones(1)}, {"images": target, "one": _ONE})

    assert loaded["images"] is target
    assert target.stride() == strides
    assert torch.equal(target, _IMAGES)


_COMPLEX = torch.view_as_complex(torch.arange(24.0).view(3, 4, 2))


@pytest.mark.parametrize(
    "tensor",
    [
        _COMPLEX[0].conj().expand(5, 4),
        _COMPLEX.conj()[:, :1].expand(3, 4),
        _COMPLEX.conj().imag.expand(2, 3, 4),
        _COMPLEX.conj().imag,
        _COMPLEX.flatten().conj().unfold(0, 4, 2),
        _COMPLEX[0, 0].conj().expand(3),
        _COMPLEX.conj().expand(0, 3, 4),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tuple(tensor.stride())}",
)
def test_expanded_tensors_that_are_conjugated_or_negated_come_back(tensor: torch.Tensor) -> None:
    state = {"alone": tensor, "base": _COMPLEX}

    loaded = round_trip(state)
    into = {"alone": torch.empty_like(tensor), "base": torch.zeros_like(_COMPLEX)}
    repeats = any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))

    assert_same(loaded, state)
    if tensor.numel():
        expanded = [stride == 0 for stride in tensor.stride()]
        assert [stride == 0 for stride in loaded["alone"].stride()] == expanded
    if not repeats:
        assert_same(_load_into(state, into), state)


def test_another_reader_sees_a_dense_tensor_in_the_order_of_its_memory(tmp_path: Path) -> None:
    images = _IMAGES.to(memory_format=_CHANNELS_LAST)
    path = tmp_path / "shard"
    path.write_bytes(pack({"images": images}, IDENTITY).view)

    with safe_open(path, "pt") as shard:
        assert torch.equal(shard.get_tensor("images"), images.permute(0, 2, 3, 1))
