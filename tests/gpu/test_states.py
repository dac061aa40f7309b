"""States on a GPU come back there, bit for bit, whatever their dtypes, strides and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import localckpt
from tests.managers.jobs import KINDS, MAX_S, assert_same, make_manager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def _bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor on the GPU of random bits, NaNs among them."""
    if dtype == torch.bool:
        return torch.rand(shape, device="cuda") < 0.5
    numel = torch.Size(shape).numel() * dtype.itemsize
    flat = torch.randint(0, 256, (numel,), dtype=torch.uint8, device="cuda")
    return flat.view(dtype).view(shape)


def _state() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.rand(300, 200, device="cuda"))
    large = torch.rand(3_000_000, device="cuda")
    values = torch.rand(64, device="cuda", dtype=torch.complex64)
    return {
        "dtypes": {str(dtype): _bits(dtype, 31, 7) for dtype in _DTYPES},
        "turned": [_bits(dtype, 30, 20).t() for dtype in _DTYPES],
        "every third": [_bits(dtype, 90)[::3] for dtype in _DTYPES],
        "large": large,
        "its middle": large[1000:2000],
        "tied": [weight, weight],
        "expanded": torch.rand(1, 5, device="cuda").expand(40, 5),
        "conjugated": values.conj(),
        "negated": values.conj().imag,
        "single": torch.tensor(1.5, device="cuda"),
        "empty": torch.zeros(0, 3, device="cuda"),
        "channels last": torch.rand(2, 3, 4, 5, device="cuda").to(
            memory_format=torch.channels_last
        ),
        "coo": torch.rand(6, 6, device="cuda").relu().sub(0.5).relu().to_sparse(),
        "csr": torch.eye(6, device="cuda").to_sparse_csr(),
        "host": torch.rand(100_000),
        "pinned": torch.rand(1000).pin_memory(),
        "random": torch.cuda.get_rng_state(),
        "step": 3,
    }


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor) and expected.layout != torch.strided:
        assert found.layout == expected.layout
        assert found.device == expected.device
        assert torch.equal(found.to_dense(), expected.to_dense())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            _assert_same(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        resolved = [tensor.detach().resolve_conj().resolve_neg() for tensor in (found, expected)]
        assert_same(*resolved)
    else:
        assert found == expected


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize("kind", [*KINDS, "pieces"])
def test_tensors_of_all_kinds_come_back_on_the_gpu(
    kind: str, is_async: bool, node_dirs: Any, shm_roots: Any
) -> None:
    root = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    state = _state()
    expected = tree_map(_cloned, state)
    with (
        make_manager(kind, root) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        request = manager.save(state, 1, is_async=is_async)
        state["large"].zero_()
        for tensor in state["dtypes"].values():
            tensor.zero_()
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)

    with make_manager(kind, root) as manager:
        assert manager.find_latest() == 1
        found, _ = manager.load()

    _assert_same(found, expected)
    assert found["tied"][0] is found["tied"][1]
    assert found["its middle"].data_ptr() == found["large"].data_ptr() + 4000


def test_a_state_of_a_gpu_is_loaded_into_host_memory_and_back(tmp_path: Path) -> None:
    on_gpu = {"weight": torch.rand(1000, 300, device="cuda"), "bias": torch.rand(7, device="cuda")}
    on_host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in on_gpu.items()}
    with make_manager("disk", tmp_path) as manager:
        manager.save(on_gpu, 1)
        manager.load(into=on_host)
        manager.save(on_host, 2)
        expected = {name: tensor.clone() for name, tensor in on_gpu.items()}
        for tensor in on_gpu.values():
            tensor.zero_()
        manager.load(into=on_gpu)

    for name, tensor in expected.items():
        assert torch.equal(on_host[name], tensor.cpu())
        assert torch.equal(on_gpu[name], tensor)


def test_a_shared_checkpoint_of_a_gpu_is_read_there_and_by_torch(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.rand(1000, 300, device="cuda"), "step": 5}
    expected = state["weight"].clone()  # type: ignore[attr-defined]
    with localckpt.GlobalCheckpointManager(tmp_path / "shared", timeout=MAX_S) as manager:
        manager.save(state, 1)
        state["weight"].zero_()  # type: ignore[attr-defined]
        manager.wait_until_finished()
        manager.load(into=state)
        (folder,) = [path.parent for path in tmp_path.rglob(".metadata")]

    assert torch.equal(state["weight"], expected)  # type: ignore[arg-type]
    plain = {"weight": torch.zeros(1000, 300)}
    dcp.load(plain, checkpoint_id=folder, no_dist=True)
    assert torch.equal(plain["weight"], expected.cpu())
