"""Loading into tensors that are there: in place, all or a clear error, without a second copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt.errors import MismatchError
from localckpt.state_dict.containers import named_tensors
from localckpt.state_dict.image import pack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import find_targets
from localckpt.storage.files import FileSource
from tests.faults.small_store import Growth
from tests.ranks import run_ranks
from tests.state_dict.states import IDENTITY, assert_same, bits
from tests.storage.test_files import make_cold


def load_into(saved: Any, given: Any) -> Any:
    target = find_targets(given)
    return ImageReader(pack(saved, IDENTITY), SafeGlobals()).restore(target)


def state(fill: float) -> dict[str, Any]:
    base = torch.full((6, 4), fill)
    return {
        "weight": torch.nn.Parameter(torch.full((3, 5), fill)),
        "half": torch.full((7,), fill, dtype=torch.bfloat16),
        "scalar": torch.tensor(fill),
        "empty": torch.ones(0, 3),
        "base": base,
        "row": base[2],
        "nested": [torch.full((2,), fill, dtype=torch.complex128), (torch.full((1,), fill),)],
        "step": int(fill),
    }


def test_the_tensors_that_were_given_hold_the_saved_values() -> None:
    saved, given = state(5.0), state(0.0)
    tensors = dict(named_tensors(given))
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    loaded = load_into(saved, given)

    assert_same(loaded, saved)
    for name, tensor in named_tensors(loaded):
        assert tensor is tensors[name], name
        assert tensor.data_ptr() == addresses[name], name
    assert_same(given["weight"], saved["weight"])
    assert given["step"] == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int16, torch.float8_e5m2fnuz, torch.complex128, torch.uint4]
)
def test_targets_may_have_other_strides_than_what_was_saved(dtype: torch.dtype) -> None:
    raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8)
    values = raw.view(dtype).view(3, 4)
    columns = torch.zeros(12 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(4, 3).t()
    gaps = torch.zeros(24 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(3, 8)[:, ::2]

    load_into([values, raw.clone().view(dtype).view(3, 4)], [columns, gaps])

    assert bits(columns) == bits(values)
    assert bits(gaps) == bits(values)


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"weight": torch.zeros(5, 3)}, r"weight: saved as float32 \[3, 5\].*\[5, 3\]"),
    "dtype": ({"half": torch.zeros(7)}, "half: saved as bfloat16 .* given as float32"),
    "not given": ({"half": None}, "half: saved, not given"),
    "not saved": ({"extra": torch.zeros(1)}, "extra: given, not saved"),
    "not tied": ({"row": torch.zeros(4)}, "row"),
}


@pytest.mark.parametrize(("change", "told"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_another_structure_is_refused_named_and_nothing_is_written(
    change: dict[str, Any], told: str
) -> None:
    given = state(0.0) | change
    before = {name: bits(tensor) for name, tensor in named_tensors(given)}

    with pytest.raises(MismatchError, match=told) as refused:
        load_into(state(5.0), given)

    assert "was left as it is" in str(refused.value)
    assert {name: bits(tensor) for name, tensor in named_tensors(given)} == before


def _load(rank: int, world_size: int, file: Path, is_in_place: bool) -> int:
    """Load 200 MB; by how much the process has grown at most."""
    given = {f"t{n}": torch.ones(2_500_000) for n in range(20)}
    into = find_targets(given) if is_in_place else None
    growth = Growth()
    loaded = ImageReader(FileSource(file), SafeGlobals()).restore(into)
    assert int(loaded["t7"][-1]) == 7
    return growth()


@pytest.mark.parametrize(("is_in_place", "limit"), [(True, 60 << 20), (False, 260 << 20)])
def test_a_load_needs_no_second_copy_of_the_state(
    is_in_place: bool, limit: int, tmp_path: Path
) -> None:
    file = tmp_path / "shard"
    image = pack({f"t{n}": torch.full((2_500_000,), float(n)) for n in range(20)}, IDENTITY)
    file.write_bytes(image.view)
    if is_in_place:
        make_cold(file)

    (grown,) = run_ranks(_load, 1, file, is_in_place, init_group=False)

    assert grown < limit
