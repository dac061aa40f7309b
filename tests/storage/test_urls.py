"""Directories as they are given: nodes take no URL, and a relative path is fixed at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import localckpt
from localckpt.events.jsonl import JsonLines
from localckpt.exporters.prometheus import PrometheusTextfile
from localckpt.storage.names import local_path
from tests.cli.commands import call
from tests.events.sinks import make_event

_URL = "s3://bucket/run"


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("name", ["LocalCheckpointManager", "InMemoryCheckpointManager"])
def test_no_store_of_a_node_takes_it_for_a_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = {"root_local_ckpt_dir" if name[0] == "L" else "root": _URL}

    with pytest.raises(localckpt.StorageError, match="s3://bucket/run is a URL, and this is kept"):
        getattr(localckpt, name)(**where)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "verify", "clean", "explain", "inspect"])
def test_the_command_line_says_so_or_what_it_needs(command: str) -> None:
    answer = call(command, _URL)

    assert answer.status == 2
    said = "is a URL" if command == "inspect" else "run pip install fsspec s3fs"
    assert said in answer.err
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
