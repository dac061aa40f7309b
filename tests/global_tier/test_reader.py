"""The reader: metadata read once for all ranks, running no code, and data within a budget."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from localckpt import CorruptShardError, MismatchError, PeerLostError, UnsafeGlobalError
from localckpt.global_tier.load import ReshardingLoadPlanner
from localckpt.global_tier.metadata import read_metadata
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.global_tier.storage_writer import FileSystemWriterAsync
from localckpt.state_dict.safe_globals import SafeGlobals
from tests.global_tier.states import load_with_ours, save, state_of, tensor_of, told_by
from tests.ranks import announce, await_announced, run_ranks
from tests.state_dict.states import Call, assert_same

MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def checkpoint(path: Path, state: dict[str, Any]) -> None:
    writer = FileSystemWriterAsync(path)
    save(writer, state)
    writer.close()


def _read_metadata_of_each(rank: int, world_size: int, paths: list[Path]) -> list[str]:
    told = []
    for path in paths:
        reader = CachedMetadataFileSystemReader(path, timeout_s=20.0)
        told.append(told_by(reader.read_metadata))
        reader.reset(paths[-1])
        assert isinstance(reader.read_metadata(), Metadata)
    return told


def test_metadata_that_is_missing_or_damaged_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    checkpoint(tmp_path / "good", {"w": torch.ones(3)})
    whole = (tmp_path / "good" / ".metadata").read_bytes()
    bomb = Call(os.mkdir, str(tmp_path / "exploded"))
    contents = {
        "missing": None,
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "noise": tensor_of(torch.uint8, (len(whole),), 3).numpy().tobytes(),
        "no metadata": pickle.dumps({"w": 1}),
        "bomb": pickle.dumps(bomb),
        "hidden bomb": pickle.dumps(Metadata({}, planner_data=bomb)),
        "good": whole,
    }
    for name, content in contents.items():
        (tmp_path / name).mkdir(exist_ok=True)
        if content is not None:
            (tmp_path / name / ".metadata").write_bytes(content)

    first, other = run_ranks(_read_metadata_of_each, 2, [tmp_path / name for name in contents])

    by_name = dict(zip(contents, first, strict=True))
    assert other == first
    assert by_name["missing"].startswith(f"StorageError: rank 0: could not read {tmp_path}")
    for name in ("empty", "cut", "noise", "no metadata"):
        assert by_name[name].startswith("CorruptShardError"), by_name[name]
        assert str(tmp_path / name) in by_name[name]
    for name in ("bomb", "hidden bomb"):
        assert by_name[name].startswith("UnsafeGlobalError")
        assert "mkdir" in by_name[name]
    assert not (tmp_path / "exploded").exists()
    assert by_name["good"] == ""


def test_metadata_of_a_single_rank_and_an_object_in_a_data_file_run_no_code_either(
    tmp_path: Path,
) -> None:
    bomb = Call(os.mkdir, str(tmp_path / "exploded"))
    dcp.save({"bomb": bomb, "w": torch.ones(3)}, checkpoint_id=tmp_path / "there", no_dist=True)
    with pytest.raises(UnsafeGlobalError, match=r"bomb refers to .*mkdir"):
        load_with_ours(tmp_path / "there", {"bomb": 1, "w": torch.ones(3)})
    # Where there is no metadata of all, torch asks for that of the rank, but for older releases.
    if hasattr(dcp.FileSystemReader, "_get_metadata_path"):
        checkpoint(tmp_path / "here", {"w": torch.ones(3)})
        of_rank = (tmp_path / "here" / ".metadata").rename(tmp_path / "here" / "__0.metadata")
        assert_same(load_with_ours(tmp_path / "here", {"w": torch.ones(3)}), {"w": torch.ones(3)})
        of_rank.write_bytes(pickle.dumps(bomb))
        with pytest.raises(UnsafeGlobalError, match="mkdir"):
            CachedMetadataFileSystemReader(tmp_path / "here").read_metadata(rank=0)
        with pytest.raises(Exception, match="mkdir"):
            load_with_ours(tmp_path / "here", {"w": torch.ones(3)})

    assert not (tmp_path / "exploded").exists()


def test_any_budget_is_enough_for_any_state(tmp_path: Path) -> None:
    # An object, which cannot be read in pieces, is larger than the budgets.
    state = {**state_of(1), "text": "x" * (6 * MIB), "large": tensor_of(torch.int8, (9 * MIB,))}
    checkpoint(tmp_path, state)

    for concurrent_bytes in (1, 5 * MIB):
        found = load_with_ours(tmp_path, state, concurrent_bytes=concurrent_bytes)
        assert_same(found, state)


def test_all_that_does_not_fit_is_named_and_nothing_is_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"a": torch.ones(3), "b": torch.ones(4), "c": 5, "d": torch.ones(2)})
    state = {"a": torch.zeros(3), "b": torch.zeros(5), "c": torch.zeros(1), "d": 1, "e": 2}
    reader = CachedMetadataFileSystemReader(tmp_path)
    planner = ReshardingLoadPlanner()
    planner.set_up_planner(state, reader.read_metadata(), True)

    with pytest.raises(MismatchError) as error:
        planner.create_local_plan()

    told = str(error.value)
    assert "b has shape (5,), not (4,)" in told
    assert "c is a tensor, and was saved as an object" in told
    assert "d is an object, and was saved as a tensor" in told
    assert "e is not in the checkpoint" in told
    assert told.partition(". ")[0].count(";") == 3
    assert_same(state["a"], torch.zeros(3))


def test_metadata_of_another_torch_and_python_is_read(tmp_path: Path) -> None:
    dcp.save(state_of(1), checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    # Before 2.9 there was none.
    metadata.__dict__.pop("version", None)
    here = f"c{type(tmp_path).__module__}\nPosixPath\n".encode()
    described = pickle.dumps(metadata, protocol=2)
    assert here in described

    of_python_3_13 = described.replace(here, b"cpathlib._local\nPosixPath\n")
    (tmp_path / ".metadata").write_bytes(of_python_3_13)

    assert_same(load_with_ours(tmp_path, state_of(1)), state_of(1))
    some = {"shapes": state_of(1)["shapes"]}
    assert_same(load_with_ours(tmp_path, some), some)


def test_other_properties_of_a_tensor_are_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    described = TensorStorageMetadata(TensorProperties(torch.float16), torch.Size([2, 3]), [])
    five = TensorProperties.__getstate__(described.properties)[:5]
    for more in (("strides",), ((1.5,),), (None, None)):
        with monkeypatch.context() as patch:
            patch.setattr(TensorProperties, "__getstate__", lambda _, more=more: (*five, *more))
            metadata = pickle.dumps(Metadata({"weight": described}, {}, {}))

        with pytest.raises(CorruptShardError, match="properties of a tensor"):
            read_metadata(metadata, SafeGlobals())


def _wait_for_a_rank_that_does_not_come(rank: int, world_size: int, path: Path) -> str:
    if rank == 0:
        await_announced("given up")
        return ""
    reader = CachedMetadataFileSystemReader(path, timeout_s=0.3)
    told = told_by(reader.read_metadata)
    announce("given up")
    return told


def test_a_rank_that_reads_for_all_and_does_not_come_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"w": torch.ones(3)})

    _, told = run_ranks(_wait_for_a_rank_that_does_not_come, 2, tmp_path)

    assert told.startswith(PeerLostError.__name__)
    assert "rank 0 has not told" in told
