"""Checkpoints of other releases of torch and Python, and saving under a torch of before 2.9."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.global_tier.states import assert_same, load_with_ours, state_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Takes away what torch 2.8 has not, before localckpt is imported; nothing on torch 2.8 itself.
_AS_TORCH_2_8 = """
import dataclasses, sys
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

if hasattr(filesystem, "CURRENT_DCP_VERSION"):
    del filesystem.CURRENT_DCP_VERSION
    del Metadata.version, Metadata.__annotations__["version"]
    del Metadata.__init__, Metadata.__eq__, Metadata.__repr__
    dataclasses.dataclass(Metadata)
"""

_SAVE_AND_LOAD = """
import pathlib, torch, localckpt

root = pathlib.Path(sys.argv[1])
with localckpt.GlobalCheckpointManager(root / "ours", timeout=20.0) as manager:
    manager.save({"w": torch.arange(5), "more": {"left": torch.ones(2)}}, 3, is_async=False)
    for folder in ("theirs", "ours"):
        state = {"w": torch.zeros(5, dtype=torch.int64)}
        if folder == "ours":
            assert manager.load(into=state, partial=True)[1].iteration == 3
        else:
            reader = localckpt.CachedMetadataFileSystemReader(root / folder)
            planner = localckpt.ReshardingLoadPlanner()
            torch.distributed.checkpoint.load(state, storage_reader=reader, planner=planner)
        assert torch.equal(state["w"], torch.arange(5)), state
"""


def test_a_torch_whose_metadata_has_no_version_saves_and_loads(tmp_path: Path) -> None:
    theirs = {"w": torch.arange(5), "more": {"left": torch.ones(2)}}
    dcp.save(theirs, checkpoint_id=tmp_path / "theirs", no_dist=True)
    metadata = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())
    metadata.__dict__.pop("version", None)
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(metadata))

    code = _AS_TORCH_2_8 + _SAVE_AND_LOAD
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    # Any release of torch reads what was saved there.
    found = {"w": torch.zeros(5, dtype=torch.int64)}
    (folder,) = (tmp_path / "ours").glob("iteration_*")
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found["w"], torch.arange(5))


def test_a_checkpoint_that_torch_wrote_under_python_3_13_is_read(tmp_path: Path) -> None:
    dcp.save(state_of(1), checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert isinstance(metadata.storage_meta.checkpoint_id, Path)
    here = f"c{type(tmp_path).__module__}\nPosixPath\n".encode()

    told = pickle.dumps(metadata, protocol=2)
    (tmp_path / ".metadata").write_bytes(told.replace(here, b"cpathlib._local\nPosixPath\n"))

    assert b"pathlib._local" in (tmp_path / ".metadata").read_bytes()
    assert_same(load_with_ours(tmp_path, state_of(1)), state_of(1))
