"""Every kind of tensor comes back equal from each tier, or is refused by name at the first save."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException, Every
from tests.ranks import run_ranks

Tier = Literal["nodes", "shared"]
_S = 60.0

_REFUSED = {"nested", "quantized"}
_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
_DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - _QUANTIZED, key=str
)


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


def _bits(dtype: torch.dtype, seed: int, count: int = 6) -> torch.Tensor:
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


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
        str(d).removeprefix("torch."): (lambda seed, d=d: _bits(d, seed))  # type: ignore[misc]
        for d in _DTYPES
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


class _Job:
    """A module with buffers of some kinds, filled in place, and values of them, made anew."""

    def __init__(self, kinds: Iterable[str], seed: int, *, with_values: bool) -> None:
        self.module = torch.nn.Module()
        for kind in kinds:
            self.module.register_buffer(f"held {kind}", _KINDS[kind](seed))
        self.values = {kind: _KINDS[kind](seed) for kind in kinds} if with_values else None

    def _set(self, values: Any) -> None:
        self.values = values

    def checkpointer(self, tier: Tier, root: Path) -> Checkpointer:
        return Checkpointer(
            {"module": self.module, "values": (lambda: self.values, self._set)},
            local=root / "nodes",
            shared=None if tier == "nodes" else root / "shared",
            every=Every(steps=100),
            on_resize="drop",
            safe_globals=(Pair, Named),
            timeout_s=_S,
        )


def _save(rank: int, world_size: int, tier: Tier, root: Path, kinds: Sequence[str]) -> None:
    with _Job(kinds, 1, with_values=True).checkpointer(tier, root) as checkpointer:
        checkpointer.resume()
        checkpointer.step(0)
        checkpointer.save(0, shared=tier != "nodes")


def _load(rank: int, world_size: int, tier: Tier, root: Path, kinds: Sequence[str]) -> None:
    job = _Job(kinds, 0, with_values=False)
    held = dict(job.module.named_buffers())
    with job.checkpointer(tier, root) as checkpointer:
        assert checkpointer.resume() == 1

    for kind in kinds:
        name = f"held {kind}"
        assert job.module.get_buffer(name) is held[name], kind
        assert job.values is not None
        for found in (held[name], job.values[kind]):
            assert _image(found) == _image(_KINDS[kind](1)), kind


@pytest.mark.parametrize("tier", ["nodes", "shared"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 1)])
def test_every_kind_of_tensor_comes_back_equal(
    tier: Tier, saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    kinds = [kind for kind in _KINDS if kind not in _REFUSED]
    run_ranks(_save, saved_by, tier, tmp_path, kinds, timeout_s=_S)
    if tier != "nodes":
        shutil.rmtree(tmp_path / "nodes")

    run_ranks(_load, loaded_by, tier, tmp_path, kinds, timeout_s=_S)


@pytest.mark.parametrize("tier", ["nodes", "shared"])
@pytest.mark.parametrize("kind", sorted(_REFUSED))
def test_other_kinds_are_refused_by_name_at_the_first_save(
    kind: str, tier: Tier, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointingException, match=f"held {kind}"):
        _save(0, 1, tier, tmp_path, [kind])
