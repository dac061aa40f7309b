"""Directories as they are given: a URL is refused everywhere, a relative path is fixed at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.events.jsonl import JsonLines
from localckpt.exporters.prometheus import PrometheusTextfile
from localckpt.storage.names import local_path
from tests.cli.commands import call
from tests.events.sinks import make_event

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
    assert local_path(name) == Path.cwd() / name


def test_a_relative_path_is_that_of_where_the_object_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    sinks = [JsonLines("lines"), PrometheusTextfile("metrics")]
    writer = localckpt.FileSystemWriterAsync("first")
    reader = localckpt.CachedMetadataFileSystemReader("first")
    writer.reset("second")
    reader.reset("second")
    with (
        localckpt.LocalCheckpointManager("node") as nodes,
        localckpt.GlobalCheckpointManager("shared") as shared,
    ):
        monkeypatch.chdir("later")
        nodes.save({"value": torch.ones(4)}, 1)
        shared.save({"value": torch.ones(4)}, 1)

    for sink in sinks:
        sink.write(make_event())
        sink.flush()
        sink.close()

    assert list(Path.cwd().iterdir()) == []
    assert Path(writer.path) == Path(reader.path) == tmp_path / "second"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("later", "lines", "metrics", "node", "shared")
    }
