"""Large states do not make Python look through all objects of the trainer."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import psutil
import pytest
import torch

from localckpt.memory.copying import Copier
from localckpt.memory.gpu_copies import SideStreams
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.targets import find_targets
from localckpt.storage.directory import DirectoryStore
from tests.state_dict.states import IDENTITY


def test_saving_and_loading_many_tensors_collects_no_garbage() -> None:
    planner = ImagePlanner()
    state = {f"tensor.{n}": torch.tensor(n) for n in range(3000)}
    assert gc.isenabled()
    gc.collect()
    run: list[str] = []
    gc.callbacks.append(lambda phase, info: run.append(phase) if phase == "start" else None)
    try:
        planner.capture(state)
        at_capture = len(run)
        image = pack(state, IDENTITY, planner)
        run.clear()
        loaded = unpack(image)
    finally:
        gc.callbacks.pop()

    # Thousands of objects set off a collection each 700; here it is once, when all are there.
    assert at_capture <= 1
    assert len(run) <= 2
    assert gc.isenabled()
    assert [int(tensor) for tensor in loaded.values()] == list(range(3000))


pytestmark = pytest.mark.fault("hard-state")

NBYTES = (4 << 30) + (1 << 20) + 8
NEEDED = 12 << 30


@pytest.mark.long
def test_a_tensor_of_more_than_4_gib_goes_to_disk_and_back(tmp_path: Path) -> None:
    if psutil.virtual_memory().available < NEEDED or shutil.disk_usage(tmp_path).free < NEEDED:
        pytest.skip("needs 12 GiB of memory and of disk")
    store = DirectoryStore(tmp_path / "store", IDENTITY.session_id, IDENTITY.rank, 10.0)
    # Zero but for one word in each MiB: pages that nobody wrote to cost no memory.
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    words = tensor.view(torch.int64)
    marks = torch.arange(1, len(words[:: 1 << 17]) + 1)
    words[:: 1 << 17] = marks
    copier = Copier()

    capture = ImagePlanner().capture({"large": tensor, "small": torch.tensor(5)})
    nbytes = capture.nbytes(IDENTITY)
    slot = store.reserve(IDENTITY, nbytes, 10.0)
    written = capture.write(slot.image, IDENTITY, copier, SideStreams())
    slot.filled(written.covered_nbytes, MemorySource(slot.image), is_complete=written.has_digests)
    store.commit([slot])
    store.release([slot])
    del slot, capture
    words[:: 1 << 17] = 0
    words[5 << 26] = 7
    assert store.holds(IDENTITY)
    source = store.open(IDENTITY)
    target = find_targets({"large": tensor, "small": torch.tensor(0)})
    loaded = ImageReader(source, SafeGlobals(), IDENTITY).restore(target)

    source.close()
    store.close()
    assert loaded["large"] is tensor
    assert loaded["small"] == 5
    assert torch.equal(words[:: 1 << 17], marks)
    assert int(torch.count_nonzero(words)) == len(marks)
