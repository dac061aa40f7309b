"""What every store does, on disk and in shared memory."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import localckpt
from localckpt.errors import StorageError
from localckpt.events.jsonl import JsonLines
from localckpt.exporters.prometheus import PrometheusTextfile
from localckpt.storage.catalog import Problem
from localckpt.storage.names import local_path
from localckpt.storage.rank_folder import RankFolder
from localckpt.storage.write import write_shard
from tests.cli.commands import call
from tests.events.sinks import make_event
from tests.storage.conftest import Node
from tests.storage.shards import (
    PATIENCE_S,
    another_process,
    assert_loads,
    everything,
    filled,
    found,
    identity,
    kill,
    names,
    older_than,
    save,
    slots_of,
    staged,
)

NAMES = ["", ".", "..", "a/b", "a%2Fb", "../..", "a b\n", "漢字", "~", "-rf *", "x" * 200, "\0"]


@pytest.mark.fault("hostile-file")
def test_any_name_of_a_session_gives_a_folder_of_its_own(node: Node) -> None:
    for name in NAMES:
        save(node(session=name), identity(1, session=name))

    folders = [path for path in node.root.iterdir() if path.is_dir()]

    assert len(folders) == len(NAMES)
    with pytest.raises(StorageError, match="choose a shorter session_id"):
        node(session="x" * 300)
    for name in NAMES:
        store = node(session=name)
        assert found(store) == {identity(1, session=name)}
        assert store.folder.parent.parent == node.root


def test_a_token_that_is_none_is_an_error_that_says_what_to_do(node: Node) -> None:
    node().close()
    for text in (b"", b"\xff\xfe", b"hello", b"z" * 32):
        (node.root / "node-token").write_bytes(text)

        with pytest.raises(StorageError, match="node-token does not hold a node's name: remove"):
            node()

    (node.root / "node-token").unlink()


@pytest.mark.fault("wrong-place")
def test_a_shard_of_another_session_is_not_counted(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = node(session="one"), node(session="other")
    save(one, identity(1, session="one"))
    (file,) = one.folder.glob("*.safetensors")

    shutil.copy(file, other.folder)

    assert found(other) == set()
    assert "belongs to session 'one'" in caplog.text


@pytest.mark.fault("two-jobs")
def test_shards_of_other_folders_go_only_when_nobody_looks_after_them(node: Node) -> None:
    stores = [node(rank) for rank in range(4)]
    for rank, store in enumerate(stores):
        save(store, identity(1, rank))
    stores[1].close()
    stores[3].close()
    stores[0].list_stored()

    # The process of rank 2 is alive, though its rank is taken to run elsewhere.
    stores[0].prune(everything, adopted_ranks=[1, 2])

    assert found(stores[0]) == {identity(1, rank=2), identity(1, rank=3)}
    assert names(stores[1].folder) == set()


def test_what_a_failed_save_left_is_removed_and_its_file_used_again(node: Node) -> None:
    store = node()
    save(store, identity(1))
    write_shard(staged(store, identity(2)))
    inode = next(store.folder.glob("*2.*.safetensors")).stat().st_ino
    staged(store, identity(3)).buffer.give_back()

    store.discard(store.slots)

    assert store.slots == []
    assert found(store) == {identity(1)}
    assert not store.holds(identity(2))
    assert_loads(store, identity(1))
    save(store, identity(4))
    # In memory somebody may still read or write the file.
    is_reused = next(store.folder.glob("*4.*.safetensors")).stat().st_ino == inode
    assert is_reused or node.kind == "memory"
    assert_loads(store, identity(4))


@pytest.mark.fault("flipped-bit")
@pytest.mark.parametrize("damage", [b"garbage", None])
def test_a_file_with_a_damaged_header_is_quarantined_and_the_others_are_found(
    node: Node, damage: bytes | None
) -> None:
    store = node()
    save(store, identity(1))
    save(store, identity(2))
    file = min(store.folder.glob("*.safetensors"))
    content = file.read_bytes()

    file.write_bytes(content[:-1] if damage is None else damage)

    assert found(store) == {identity(2)}
    assert names(store.folder) >= {"safetensors", "corrupt"}
    assert_loads(store, identity(2))


@pytest.mark.fault("two-jobs")
def test_a_live_owner_of_the_folder_is_named(node: Node) -> None:
    with another_process(node.kind, node.root) as other:
        with pytest.raises(StorageError, match=rf"in use by process {other.pid} of a job"):
            node(timeout_s=0.2)

        # Another rank and another session are nobody's business, and touch nothing of it.
        before = {path for path in node.root.rglob("*") if path.suffix != ".lock"}
        assert any(path.suffix == ".dirty" for path in before)
        save(node(rank=1), identity(1, rank=1))
        node(session="another").close()
        assert before <= set(node.root.rglob("*"))
        kill(other)

        again = node()
        assert "dirty" not in names(again.folder)
        save(again, identity(2))


@pytest.mark.fault("unusable-store", "hostile-file")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("place", ["session-run", "session-run/0"])
def test_a_folder_of_others_or_for_others_is_refused_with_the_cure(node: Node, place: str) -> None:
    node().close()
    (node.root / place).chmod(0o770)

    with pytest.raises(StorageError, match=r"not this user's alone.*chmod 700"):
        node()

    (node.root / place).chmod(0o700)
    os.chown(node.root / place, 12345, -1)
    with pytest.raises(StorageError, match="owner 12345"):
        node()


@pytest.mark.fault("unusable-store")
def test_a_store_whose_directory_is_removed_holds_nothing_and_is_made_again(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    store = node()
    save(store, identity(1))
    domain = store.domain

    for look_first in (True, False):
        shutil.rmtree(node.root)
        assert not look_first or store.list_stored() == []
        save(store, identity(2 + look_first))

        assert [stored.record.identity for stored in store.list_stored() if stored.record] == [
            identity(2 + look_first)
        ]
    assert caplog.text.count("was removed or emptied while the job ran") == 2
    store.close()
    again = node()
    assert again.domain == domain
    again.close()


def test_two_threads_keep_shards_while_old_ones_leave_and_nothing_is_mixed_up(node: Node) -> None:
    store = node()
    count = 40
    over: dict[int, int] = {}

    def keep(rank: int) -> None:
        for iteration in range(1, count + 1):
            # With memory made ahead of time, and by turns larger, so that files are taken over.
            who, nbytes = identity(iteration, rank), 50_000 * (1 + iteration % 3)
            store.prepare(who.piece, nbytes + 10_000)
            save(store, who, nbytes)
            if iteration % 5 == 0:
                # As a copy that did not come.
                job = staged(store, identity(1000 + iteration, rank))
                store.release(slots_of(store, job.identity))
            if rank == 0:
                store.prune(older_than(identity(max(1, iteration - 1))), set())
            else:
                store.list_stored()
            over[rank] = iteration

    with ThreadPoolExecutor(2) as threads:
        for thread in [threads.submit(keep, rank) for rank in (0, 1)]:
            thread.result(PATIENCE_S)

    assert over == {0: count, 1: count}
    store.prune(older_than(identity(count)), set())
    assert found(store) == {identity(count, rank) for rank in (0, 1)}
    for rank in (0, 1):
        assert_loads(store, identity(count, rank), 50_000 * (1 + count % 3))
    assert "dirty" not in names(store.folder)
    store.close()
    assert names(store.folder) <= {"safetensors", "epoch"}


def test_a_link_to_what_is_not_there_is_named(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")

    for root in (link, link / "below"):
        with pytest.raises(StorageError, match=f"{link} is a link to {tmp_path}/nowhere, which is"):
            RankFolder(root, "run", 0, 5.0)
    assert sorted(tmp_path.iterdir()) == [link]


def test_what_is_gone_is_told_once_and_by_its_name_alone(node: Node) -> None:
    store, other = node(), node(rank=1)
    mine = [save(store, identity(n)) for n in (1, 2, 3, 4)]
    theirs = save(other, identity(4, rank=1))
    for who in mine:
        assert store.holds(who)
    assert other.holds(theirs)
    assert store.lost() == other.lost() == set()

    next(store.folder.glob("000000000001.*")).unlink()
    store.quarantine(mine[1], Problem("damaged", "it was"))
    assert store.lost() == {mine[0].checkpoint, mine[1].checkpoint}

    assert store.lost() == set()
    # Listed again, it knows what another rank has, and what is back.
    save(store, mine[0])
    assert found(store) == {mine[0], *mine[2:], theirs}
    assert store.lost() == set()
    shutil.rmtree(other.folder)
    assert store.lost() == other.lost() == {theirs.checkpoint}


def test_pieces_that_are_made_again_take_no_memory_for_which_a_save_waits(node: Node) -> None:
    store = node()
    again = [identity(n) for n in (1, 2, 3)]
    store.repaired = frozenset(who.checkpoint for who in again)

    slots = [filled(store, who) for who in again]

    assert not store.is_busy()
    assert store.image_nbytes == {}
    for _ in range(2):
        save(store, identity(9))
    for slot in slots:
        store.commit([slot])
    store.release(slots)
    store.repaired = frozenset()
    for who in again:
        assert_loads(store, who)
    assert store.slots == []


@pytest.mark.fault("unusable-store")
def test_a_url_is_no_directory_of_a_node_and_commands_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = "s3://bucket/run"

    with pytest.raises(StorageError, match="s3://bucket/run is a URL, and this is kept"):
        localckpt.LocalCheckpointManager(url)
    with pytest.raises(StorageError, match="s3://bucket/run is a URL, and this is kept"):
        localckpt.InMemoryCheckpointManager(root=url)
    for command in ("ls", "verify", "clean", "explain", "inspect"):
        answer = call(command, url)
        said = "is a URL" if command == "inspect" else "run pip install fsspec s3fs"
        assert (answer.status, answer.out) == (2, "")
        assert said in answer.err

    assert list(tmp_path.iterdir()) == []


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
