"""Loading into tensors that are there: in place, all or a clear error, without a second copy."""

from __future__ import annotations

import os
import subprocess
import sys
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
from tests.state_dict.states import IDENTITY, assert_same, bits

ROOT = Path(__file__).parents[2]


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


MEASURE = """
import sys, torch
from pathlib import Path
from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import find_targets
from localckpt.storage.files import FileSource

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) << 10

given = {f"t{n}": torch.ones(2_500_000) for n in range(20)}
into = find_targets(given)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
source = FileSource(Path(sys.argv[1]))
reader = ImageReader(source, SafeGlobals())
if sys.argv[2] == "in place":
    reader.restore(into)
    value = given["t7"]
else:
    value = reader.restore()["t7"]
print(status("VmHWM") - before, int(value[-1]))
"""


@pytest.mark.parametrize(
    ("how", "limit", "cached"), [("in place", 60 << 20, False), ("new", 260 << 20, True)]
)
def test_a_load_needs_no_second_copy_of_the_state(
    how: str, limit: int, cached: bool, tmp_path: Path
) -> None:
    file = tmp_path / "shard"
    image = pack({f"t{n}": torch.full((2_500_000,), float(n)) for n in range(20)}, IDENTITY)
    file.write_bytes(image.view)
    if not cached:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    more, value = map(int, done.stdout.split())
    assert value == 7
    assert more < limit
