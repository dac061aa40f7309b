"""Tensors past the limits of 31 and 32 bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import torch

from localckpt.state_dict.copying import Copier
from localckpt.state_dict.image import ImagePlanner
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.disk import DiskStore
from localckpt.storage.write import write_shards
from tests.state_dict.states import IDENTITY

NBYTES = (4 << 30) + (1 << 20) + 8
NEEDED = 12 << 30


def test_a_tensor_of_more_than_4_gib_goes_to_disk_and_back(tmp_path: Path) -> None:
    if psutil.virtual_memory().available < NEEDED or shutil.disk_usage(tmp_path).free < NEEDED:
        pytest.skip("needs 12 GiB of memory and of disk")
    store = DiskStore(tmp_path / "store", IDENTITY.session_id, IDENTITY.rank, 10.0)
    # Each 8 bytes say where they are, so none can stand in for another.
    tensor = torch.arange(NBYTES // 8).view(torch.uint8)
    copier = Copier()

    capture = ImagePlanner().capture({"large": tensor, "small": torch.tensor(5)})
    nbytes = capture.nbytes(IDENTITY)
    buffer = store.stage(IDENTITY, nbytes, 10.0)
    covered = capture.write(buffer.view[:nbytes], IDENTITY, copier)
    write_shards([store.write_job(buffer, IDENTITY, nbytes, covered, "compute")])
    del buffer, capture
    tensor.zero_()
    assert store.holds(IDENTITY)
    source = store.open(IDENTITY)
    target = ImagePlanner().capture({"large": tensor, "small": torch.tensor(0)})
    loaded = ImageReader(source, SafeGlobals(), IDENTITY).restore((target.table, target.tensors))

    source.close()
    store.close()
    copier.close()
    assert loaded["large"] is tensor
    assert loaded["small"] == 5
    words = tensor.view(torch.int64)
    step = 1 << 20
    for start in range(0, len(words), step):
        stop = min(start + step, len(words))
        assert torch.equal(words[start:stop], torch.arange(start, stop))
