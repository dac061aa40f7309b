"""The memory of an image is not reused while the image is read, however late the reader comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.ids import Generation, ShardIdentity
from localckpt.managers import capture
from localckpt.managers import save as save_module
from localckpt.storage import write
from localckpt.storage.directory import DirectoryStore, MemoryStore
from localckpt.storage.write import write_shard
from tests.managers.jobs import MAX_S, cliques, make_manager
from tests.ranks import node_store, run_ranks
from tests.storage.shards import filled, write_of

Dirs = Callable[[int], list[Path]]

_READERS: dict[str, tuple[Any, str]] = {
    "comparison": (save_module, "replica_digests"),
    "check": (save_module, "tensor_views"),
    "writer's digests": (write, "_finish_digests"),
    "replication": (capture._CapturedImage, "read"),
}
_LATE_S = 0.1


def _read_late(rank: int, world_size: int, kind: str, readers: tuple[str, ...]) -> list[str]:
    """Save more often than there are buffers, with one reader after another late on rank 1."""
    failed = []
    state = {"model": localckpt.replicated({"w": torch.zeros(1 << 16)})}
    for reader in readers:
        owner, name = _READERS[reader]
        options = {"check_replicas": 1, "keep_last": 9}
        checked = []

        def check(tensors: Any, checked: list[float] = checked) -> None:
            (weight,) = tensors.values()
            checked.append(float(weight.unique()))

        options["check"] = check
        on_time = getattr(owner, name)

        def late(*args: Any, on_time: Any = on_time) -> Any:
            time.sleep(_LATE_S)
            return on_time(*args)

        if rank == 1:
            setattr(owner, name, late)
        with (
            cliques(1, 2) as repl,
            make_manager(kind, node_store(), reader, repl, **options) as manager,
            localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        ):
            for iteration in range(1, 5):
                state["model"].value["w"].fill_(float(iteration))
                try:
                    queue.schedule_async_request(manager.save(state, iteration, is_async=True))
                    queue.maybe_finalize_async_calls()
                except localckpt.CheckpointingException as error:
                    failed.append(f"{reader}: {error}")
            queue.maybe_finalize_async_calls(blocking=True)
            for iteration in range(1, 5):
                loaded, _ = manager.load(iteration=iteration)
                if not (loaded["model"]["w"] == iteration).all():
                    failed.append(f"{reader}: iteration {iteration} has other values")
        setattr(owner, name, on_time)
        if checked != [1.0, 2.0, 3.0, 4.0]:
            failed.append(f"{reader}: the check saw {checked}")
    return failed


@pytest.mark.parametrize(
    ("kind", "readers"),
    [
        ("disk", tuple(_READERS)),
        ("memory", ("comparison", "replication")),
    ],
)
def test_saves_wait_for_readers_of_older_images(
    kind: str, readers: tuple[str, ...], node_dirs: Dirs, shm_roots: Dirs
) -> None:
    stores = (node_dirs if kind == "disk" else shm_roots)(2)

    assert run_ranks(_read_late, 2, kind, readers, store_per_node=stores) == [[], []]


@pytest.mark.parametrize("make", [DirectoryStore, MemoryStore])
def test_an_image_is_read_as_it_was_captured_until_its_last_reader_has_ended(
    make: Any, tmp_path: Path, shm_roots: Dirs
) -> None:
    store = make(
        tmp_path if make is DirectoryStore else shm_roots(1)[0], "run", 0, MAX_S, num_buffers=2
    )
    first, *later = (
        ShardIdentity("run", Generation(1, number), number, 0, 1) for number in (1, 2, 3, 4)
    )
    slot = filled(store, first)
    slot.hold("a reader that comes late")
    write_shard(write_of(store, slot))
    with slot.reading() as image:
        before = bytes(image)
        # A failed save, whose file the next save would be staged in.
        store.discard([slot])
        for other in later:
            saved = filled(store, other)
            write_shard(write_of(store, saved))
            store.release([saved])

        assert bytes(image) == before

    del image
    store.close()


def test_an_image_whose_memory_was_given_back_is_not_read_there(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, "run", 0, MAX_S)
    slot = filled(store, ShardIdentity("run", Generation(1, 1), 1, 0, 1))

    write_shard(write_of(store, slot))

    with (
        pytest.raises(localckpt.StorageError, match="was given back once it was written"),
        slot.reading(),
    ):
        pass
    store.close()
