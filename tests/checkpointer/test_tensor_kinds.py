"""Every kind of tensor comes back equal from each tier, or is refused by name at the first save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import CheckpointingException
from tests.checkpointer.loops import resume_once, save_once
from tests.global_tier.states import DTYPES, tensor_of
from tests.ranks import node_store, on_ranks

_S = 60.0
_REFUSED = ("nested", "quantized")


class Pair(torch.Tensor):
    """A tensor without memory of its own, made of two others, as quantised weights are."""

    raw: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, scale: torch.Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.raw, made.scale = raw, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Pair:
        return cls(inner["raw"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = [(arg.raw, arg.scale) for arg in args if isinstance(arg, Pair)]
        if func is torch.ops.aten.copy_.default:
            for target, source in zip(*parts, strict=True):
                target.copy_(source)
            return args[0]
        ((raw, scale),) = parts
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
        return cls(func(raw, *args[1:], **kwargs), func(scale, *args[1:], **kwargs))


class Named(torch.Tensor):
    """A plain subclass."""


def _floats(seed: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) + 10 * seed


def _complex(seed: int) -> torch.Tensor:
    return torch.complex(_floats(seed), _floats(seed) + 1)


def _inference(seed: int) -> torch.Tensor:
    with torch.inference_mode():
        return _floats(seed).clone()


def _sparse(layout: Any) -> Callable[[int], torch.Tensor]:
    def make(seed: int) -> torch.Tensor:
        dense = torch.eye(4) * (seed + 1)
        if layout is torch.sparse_coo:
            return dense.to_sparse()
        blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        return dense.to_sparse(layout=layout, blocksize=blocks)

    return make


_KINDS: dict[str, Callable[[int], Any]] = {
    **{
        str(d).removeprefix("torch."): (lambda seed, d=d: tensor_of(d, (6,), seed))  # type: ignore[misc]
        for d in DTYPES
    },
    "no items": lambda _: torch.empty(0, 3),
    "one item": lambda seed: torch.tensor(seed + 0.5),
    "strided": lambda seed: _floats(seed)[:, ::2],
    "transposed": lambda seed: _floats(seed).t(),
    "expanded": lambda seed: _floats(seed)[:, :1].expand(2, 3),
    "conj": lambda seed: _complex(seed).conj(),
    "conj of a transposed": lambda seed: _complex(seed).t().conj(),
    "neg": lambda seed: torch._neg_view(_floats(seed)),
    "imaginary part of conj": lambda seed: _complex(seed).conj().imag,
    "inference mode": _inference,
    "sparse COO": _sparse(torch.sparse_coo),
    "sparse CSR": _sparse(torch.sparse_csr),
    "sparse CSC": _sparse(torch.sparse_csc),
    "sparse BSR": _sparse(torch.sparse_bsr),
    "meta": lambda _: torch.empty(2, 3, device="meta"),
    "subclass": lambda seed: _floats(seed).as_subclass(Named),
    "wrapper": lambda seed: Pair(
        torch.arange(4, dtype=torch.int8) + seed, torch.tensor(seed + 1.0)
    ),
    "nested": lambda seed: torch.nested.nested_tensor([_floats(seed)[0], _floats(seed)[1, :2]]),
    "quantized": lambda seed: torch.quantize_per_tensor(_floats(seed), 0.5, 0, torch.qint8),
}


def _image(tensor: Any) -> Any:
    """What must be equal of a tensor."""
    about = type(tensor).__name__, tensor.dtype, tensor.layout
    if isinstance(tensor, Pair):
        return about, _image(tensor.raw), _image(tensor.scale)
    about = (*about, tuple(tensor.shape))
    if tensor.is_meta:
        return about
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    values = tensor.resolve_conj().resolve_neg().contiguous()
    return about, values.reshape(-1).view(torch.uint8).tolist()


def _job(kinds: Iterable[str], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module with buffers of some kinds, filled in place, and values of them, made anew."""
    module, values = torch.nn.Module(), {kind: _KINDS[kind](seed) for kind in kinds}
    for kind in kinds:
        module.register_buffer(f"held {kind}", _KINDS[kind](seed))
    return {"module": module, "values": (lambda: values, values.update)}, values


def _options(local: Path, shared: Path | None) -> dict[str, Any]:
    safe = {"safe_globals": (Pair, Named), "timeout_s": _S}
    return {"local": local, "shared": shared, "every": 100, "on_resize": "drop", **safe}


_KEPT = [kind for kind in _KINDS if kind not in _REFUSED]


def _save(rank: int, world_size: int) -> None:
    save_once(_job(_KEPT, 1)[0], **_options(node_store() / "nodes", node_store() / "shared"))


@pytest.mark.parametrize("world_size", [2, 1])
@on_ranks(nodes=1, after=(_save, 2), timeout_s=_S)
def test_every_kind_of_tensor_comes_back_equal_from_both_tiers(rank: int, world_size: int) -> None:
    for local, shared in (("nodes", None), ("none", node_store() / "shared")):
        state, values = _job(_KEPT, 0)
        held = dict(state["module"].named_buffers())
        assert resume_once(state, **_options(node_store() / local, shared)) == 1

        for kind in _KEPT:
            name = f"held {kind}"
            assert state["module"].get_buffer(name) is held[name], kind
            for found in (held[name], values[kind]):
                assert _image(found) == _image(_KINDS[kind](1)), kind


@pytest.mark.parametrize("kind", _REFUSED)
def test_other_kinds_are_refused_by_name_at_the_first_save(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=f"held {kind}"):
        save_once(_job([kind], 1)[0], **_options(tmp_path / "nodes", tmp_path / "shared"))
