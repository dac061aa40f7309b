"""Files that claim to be NVRx's, read without running what is in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import CorruptShardError, StorageError, UnsafeGlobalError
from localckpt.integrations.nvrx.changeover import find_nvrx_files, read_nvrx_file


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made by a file",)


class _Own:
    def __init__(self) -> None:
        self.values = [1, 2]


def test_a_file_that_names_code_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(2), "hook": _RunsCode()}, tmp_path / "file.pt")

    with pytest.raises(UnsafeGlobalError, match="mkdir"):
        read_nvrx_file(tmp_path / "file.pt")

    assert not (tmp_path / "made by a file").exists()


def test_a_class_of_the_user_is_read_when_it_is_allowed(tmp_path: Path) -> None:
    torch.save({"own": _Own()}, tmp_path / "file.pt")

    with pytest.raises(UnsafeGlobalError, match="_Own"):
        read_nvrx_file(tmp_path / "file.pt")
    state = read_nvrx_file(tmp_path / "file.pt", safe_globals=[_Own])

    assert state["own"].values == [1, 2]


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_none_of_theirs_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.pt").write_bytes(content)

    with pytest.raises(CorruptShardError, match="left as it is"):
        read_nvrx_file(tmp_path / "file.pt")


def test_a_file_that_is_not_there_is_an_error_of_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"file\.pt"):
        read_nvrx_file(tmp_path / "file.pt")


def test_files_are_found_by_rank_the_own_folder_first(tmp_path: Path) -> None:
    for name in (
        *("0/iter_0000005_0_local.pt", "1/iter_0000005_0_local.pt", "1/iter_0000004_0_local.pt"),
        *(
            "0/iter_0000006_0_local.dirty.pt",
            "0/iter_0000007_1_local.pt",
            "x/iter_0000008_0_local.pt",
        ),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert find_nvrx_files(tmp_path, "", 0) == {
        4: tmp_path / "1/iter_0000004_0_local.pt",
        5: tmp_path / "0/iter_0000005_0_local.pt",
    }
    assert find_nvrx_files(tmp_path / "missing", "", 0) == {}
