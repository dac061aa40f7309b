"""A URL in place of a directory is refused everywhere, and no directory of that name is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localckpt
from localckpt.storage.names import local_path
from tests.cli.commands import call

_URL = "s3://bucket/run"

_MAKERS: dict[str, Callable[[str], Any]] = {
    "disk": localckpt.LocalCheckpointManager,
    "memory": lambda url: localckpt.InMemoryCheckpointManager(root=url),
    "shared": localckpt.GlobalCheckpointManager,
    "writer": localckpt.FileSystemWriterAsync,
    "reader": localckpt.CachedMetadataFileSystemReader,
}


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("kind", _MAKERS)
def test_no_tier_takes_it_for_a_directory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(localckpt.StorageError, match="is a URL") as raised:
        _MAKERS[kind](_URL)

    assert str(raised.value).startswith("s3://bucket/run is a URL, and localckpt keeps")
    assert "mount the storage on every node" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "verify", "clean", "explain", "inspect"])
def test_the_command_line_says_so(command: str) -> None:
    answer = call(command, _URL)

    assert answer.status == 2
    assert "is a URL" in answer.err
    assert answer.out == ""


@pytest.mark.parametrize("name", ["a", "a:b", "C:/x", "/x/s3:/y", "./x/https://y", "x y:/z"])
def test_what_is_no_url_is_a_path(name: str) -> None:
    assert local_path(name) == Path(name)
