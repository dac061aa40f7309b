"""What a killed process left is removed at the next start; what a live one has is left alone."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from localckpt.storage.owner import Owner, owner_of
from tests.storage.conftest import Node
from tests.storage.shards import (
    another_process,
    assert_loads,
    everything,
    found,
    identity,
    kill,
    names,
    older_than,
    save,
)


def files(*folders: Path) -> set[str]:
    return {path.name for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fault("trainer-dies")
def test_half_a_shard_of_a_killed_process_is_removed_at_the_next_start(node: Node) -> None:
    first = node()
    save(first, identity(7))
    first.close()
    with another_process(node.kind, node.root) as process:
        folder = node.root / "session-run" / "0"
        assert any(path.name.endswith(".dirty") for path in folder.iterdir())
        kill(process)

    store = node()

    assert not [path for path in folder.iterdir() if path.name.endswith(".dirty")]
    assert found(store) == {identity(7)}
    assert_loads(store, identity(7))


@pytest.mark.fault("two-jobs")
def test_what_a_live_process_is_writing_is_never_touched(node: Node) -> None:
    with another_process(node.kind, node.root, rank=3):
        before = files(node.root)
        assert any(name.endswith(".dirty") for name in before)

        store = node(rank=0)
        save(store, identity(1))
        store.close()

        assert before <= files(node.root)


@pytest.mark.fault("trainer-dies", "two-jobs")
@pytest.mark.parametrize("change", [{"boot": "0123456789ab"}, {"started": 1}])
def test_the_recycled_files_of_a_killed_process_are_used_by_the_one_after_it(
    node: Node, change: dict[str, Any]
) -> None:
    store = node()
    save(store, identity(1))
    (file,) = store.folder.glob("*.safetensors")
    inode = file.stat().st_ino
    store.prune(everything, [])
    # As if it had been killed here: nobody closes it.
    (store.folder / ".owner").write_text(str(dataclasses.replace(Owner.me(), **change)))

    again = node()
    save(again, identity(2))

    assert owner_of(again.folder) == Owner.me()
    assert next(again.folder.glob("*.safetensors")).stat().st_ino == inode
    assert_loads(again, identity(2))


def test_the_recycled_files_of_a_rank_that_went_elsewhere_are_removed_with_its_shards(
    node: Node,
) -> None:
    gone = node(rank=3)
    save(gone, identity(1, rank=3))
    save(gone, identity(2, rank=3))
    gone.prune(older_than(identity(2)), [])
    assert names(gone.folder) >= {"recycled"}
    (gone.folder / ".owner").write_text(str(Owner("0123456789ab", 1, 1)))
    store = node(rank=0)
    store.list_stored()

    store.prune(everything, adopted_ranks=[3])

    assert names(gone.folder) == {"owner"}


def test_nothing_but_the_shards_and_the_token_stays_after_close(node: Node) -> None:
    stores = [node(rank) for rank in range(2)]
    for store, iteration in itertools.product(stores, range(4)):
        save(store, identity(iteration, store.rank))
        store.prune(older_than(identity(iteration)), [])

    for store in stores:
        store.close()

    left = files(node.root)
    assert {name for name in left if not name.endswith(".safetensors")} == {"node-token", ".lock"}
    assert len(left) == 4
