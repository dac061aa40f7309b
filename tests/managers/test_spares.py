"""A spare beside a job has the shards of the rank whose place it takes, and never slows a save."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.stores import serve_store
from localckpt import Spare
from localckpt.errors import MismatchError, PeerLostError, StorageError
from localckpt.ids import Checkpoint, Generation
from localckpt.replication.spares import Order, Push, SpareRegistry
from localckpt.state_dict.source import MemorySource
from localckpt.waiting import wait_until
from tests.checkpointer.survivors import begin, connect
from tests.managers.jobs import MAX_S, Dirs, error_of, files, make_manager, resume, save, state_of
from tests.ranks import announce, await_announced, node_store, run_ranks, start_ranks
from tests.state_dict.states import image_of

_SAVED, _NEWER = (Checkpoint(Generation(3, n), n - 2, 2) for n in (7, 8))


def _shards(root: Path) -> list[tuple[int, int]]:
    names = (name.rpartition("/")[2] for name in files(root) if name.endswith(".safetensors"))
    return sorted((int(n.split(".")[0]), int(n.split(".")[1])) for n in names)


def _spare(rate_limit: float = 1e9) -> Spare:
    port = os.environ["MASTER_PORT"]
    return Spare(f"127.0.0.1:{port}", node_store(), "job", rate_limit=rate_limit)


def _await_held(spare: Spare, iteration: int) -> None:
    """Wait until a spare has an iteration (0 for none), and waits for the next."""
    registry = SpareRegistry(connect("").underlying_store, "job")
    assert wait_until(lambda: (spare.held.iteration if spare.held else 0) == iteration, MAX_S)
    assert wait_until(lambda: bool(registry.waiting()), MAX_S)
    announce(f"held {iteration}")


def _take_its_place(home: int, homes: int, kind: str, lost: int) -> str:
    """Two ranks, of which one is lost, and a spare; returns where the shard came from."""
    manager: Any = None
    if home == 2:
        with _spare() as spare:
            for iteration in range(3):
                _await_held(spare, iteration)
            assert getattr(spare.held, "ranks", None) == (0, 1)
            assert _shards(node_store()) == [(2, 0), (2, 1)]
            await_announced("dying")
    else:
        begin(0, [0, 1], home)
        manager = make_manager(kind, node_store(), "job")
        for iteration in (1, 2):
            await_announced(f"held {iteration - 1}")
            save(manager, state_of(home, iteration), iteration)
        await_announced("held 2")
        if home == lost:
            announce("dying")
            os.kill(os.getpid(), signal.SIGKILL)
        await_announced("dying")
        manager.abort()
        dist.destroy_process_group()
    begin(1, [2 if rank == lost else rank for rank in (0, 1)], home)
    rank = dist.get_rank()
    if manager is None:
        manager = make_manager(kind, node_store(), "job")
    else:
        manager.rejoin()
    with manager:
        source = resume(manager, rank, 2)
        for iteration in (3, 4):
            save(manager, state_of(rank, iteration), iteration)
    dist.destroy_process_group()
    return source


@pytest.mark.fault("survivors")
@pytest.mark.parametrize(("kind", "lost"), [("disk", 1), ("disk", 0), ("memory", 1)])
def test_who_takes_a_lost_ranks_place_finds_its_shard_on_its_own_node(
    kind: str, lost: int, node_dirs: Dirs
) -> None:
    options: Any = {"store_per_node": node_dirs(3), "init_group": False, "expect_dead": [lost]}
    told = run_ranks(_take_its_place, 3, kind, lost, **options)

    assert (told[1 - lost], told[2]) == ("own memory" if kind == "disk" else "own node", "own node")
    # What the spare had there, of both ranks, is pruned as the rest.
    kept = [3, 4] if kind == "disk" else [4]
    assert _shards(options["store_per_node"][2]) == [(iteration, lost) for iteration in kept]


def _save_beside(home: int, homes: int, ending: signal.Signals) -> Any:
    """Two ranks that save while a spare is killed, or stopped, in the middle of a transfer."""
    if home == 2:
        # The second shard would come after a minute.
        with _spare(100.0) as spare:
            _await_held(spare, 0)
            assert wait_until(lambda: _shards(node_store()) == [(1, 0)], MAX_S)
            announce("half")
            os.kill(os.getpid(), ending)
            await_announced("over")
            return spare.held
    begin(0, [0, 1], home)
    with make_manager("disk", node_store(), "job") as manager:
        await_announced("held 0")
        save(manager, state_of(home, 1), 1)
        await_announced("half")
        for iteration in (2, 3, 4):
            save(manager, state_of(home, iteration), iteration)
        told = [str(standing) for standing in manager.status()]
    announce(f"closed {home}")
    dist.destroy_process_group()
    return told


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_that_is_killed_or_stuck_in_a_transfer_holds_up_no_save_and_no_close(
    ending: signal.Signals, node_dirs: Dirs
) -> None:
    nodes, told = node_dirs(3), [f"iteration {i} is local" for i in (4, 3)]
    with start_ranks(_save_beside, 3, ending, store_per_node=nodes, init_group=False) as group:
        for rank in range(2):
            group.await_announced(f"closed {rank}")
        group.announce("over")
        if ending == signal.SIGSTOP:
            group.kill(2, signal.SIGCONT)
        results = group.join(expect_dead=[2] if ending == signal.SIGKILL else [])

    assert results[:2] == [told, told]
    # Nothing unfinished stays for the next one.
    with Spare(serve_store(), nodes[2], "job"):
        assert len(files(nodes[2])) == len(_shards(nodes[2])) == 1


class _Job:
    """A job of nodes of one rank each, as spares see it."""

    def __init__(self) -> None:
        self.store = serve_store()
        self.registry = SpareRegistry(self.store, "job")

    def await_spare(self) -> str:
        assert wait_until(lambda: bool(self.registry.waiting()), MAX_S)
        return self.registry.waiting()[0].name

    def send(self, images: dict[int, bytes], checkpoint: Checkpoint = _SAVED) -> None:
        """Send the images of nodes to the spare; raises the error of the first that fails."""
        spare = self.await_spare()
        order = Order(token_hex(8), checkpoint, 1e9, tuple((rank,) for rank in images))
        self.registry.give(spare, order)
        for rank, image in images.items():
            source = MemorySource(memoryview(bytearray(image)))
            Push(self.registry, order, spare, MAX_S).send([rank], lambda _, source=source: source)


def _image(rank: int, checkpoint: Checkpoint = _SAVED) -> bytes:
    return bytes(image_of(state_of(rank, 5, 3_000_000), checkpoint.shard(rank, "job")))


_OTHERS = {
    "a flipped bit": lambda good: good[:2000000] + bytes([good[2000000] ^ 1]) + good[2000001:],
    "no image": lambda good: b"\xff" * len(good),
    "cut short": lambda good: good[: len(good) // 2],
    "another rank's": lambda good: _image(1),
    "another save's": lambda good: _image(0, _NEWER),
    "too large": lambda good: good + bytes(4_000_000),
}


@pytest.mark.fault("hostile-store")
@pytest.mark.parametrize("what", _OTHERS)
def test_a_forged_or_damaged_shard_is_refused_and_nothing_of_it_is_kept(
    what: str, tmp_path: Path
) -> None:
    job, good = _Job(), _image(0)
    with Spare(job.store, tmp_path / "node", "job", max_nbytes=12_000_000) as spare:
        with pytest.raises(PeerLostError):
            job.send({0: _OTHERS[what](good)})

        assert (spare.held, files(tmp_path)) == (None, [])
        job.send({0: good})
        assert wait_until(lambda: spare.held == (5, (0,), len(good)), MAX_S)
        assert _shards(tmp_path) == [(5, 0)]


_FOREIGN = [
    *(b"garbage", b"[" * 200_000, b"{}", b'[["../../x"]]'),
    *(b'["x", [3, 7], 5, 2, 1.0, [["../../x"]]]', b'["../x", [3, 7], 5, 2, 1.0, [[0]]]'),
]


@pytest.mark.fault("hostile-store")
@pytest.mark.parametrize("value", _FOREIGN, ids=map(str, range(6)))
def test_what_a_stranger_writes_to_a_spare_is_an_error_and_the_next_is_taken(
    value: bytes, tmp_path: Path
) -> None:
    job = _Job()
    with Spare(job.store, tmp_path / "node", "job") as spare:
        name, part = job.await_spare(), job.registry._part
        part.set("spares", value)
        with pytest.raises(MismatchError):
            job.registry.waiting()
        part.set(f"order/{name}", b"\0\0\0\0" + value)
        assert wait_until(lambda: name.encode() in part.get("spares"), MAX_S)
        job.send({0: _image(0)})
        assert wait_until(lambda: spare.held is not None, MAX_S)

    assert _shards(tmp_path) == [(5, 0)]
    assert list(tmp_path.iterdir()) == [tmp_path / "node"]


def test_shards_come_at_its_rate_and_once_and_what_is_older_goes(tmp_path: Path) -> None:
    job, images = _Job(), {of: {r: _image(r, of) for r in (0, 1)} for of in (_SAVED, _NEWER)}
    for checkpoint in (_SAVED, _NEWER):
        # Each is another process on the same directory, as after a kill.
        with Spare(job.store, tmp_path, "job", rate_limit=6e6) as spare:
            job.await_spare()
            began = time.monotonic()
            job.send(images[checkpoint], checkpoint)
            # The second shard comes once the first has had its time.
            assert len(images[checkpoint][0]) / (time.monotonic() - began) <= 6e6
            assert wait_until(lambda: spare.held is not None, MAX_S)
        assert _shards(tmp_path) == [(checkpoint.iteration, 0), (checkpoint.iteration, 1)]
    with Spare(job.store, tmp_path, "job") as spare:
        job.send(dict.fromkeys((0, 1), b"is not asked for"), _NEWER)
        assert wait_until(lambda: spare.held is not None, MAX_S)
    assert spare.held == (6, (0, 1), sum(map(len, images[_NEWER].values())))
    assert job.registry.waiting() == []


def test_a_spare_leaves_when_ranks_begin_in_its_directory_and_comes_to_no_live_one(
    tmp_path: Path,
) -> None:
    store = serve_store()
    with Spare(store, tmp_path, "job") as spare, make_manager("disk", tmp_path, "job") as manager:
        save(manager, state_of(0, 1), 1)

        assert spare.wait(MAX_S)
        assert "use" in error_of(lambda: Spare(store, tmp_path, "job"), StorageError)
    for wrong in ({"rate_limit": 0}, {"max_nbytes": -1}, {"ranks": [1 << 20]}, {"store": "there"}):
        given: dict[str, Any] = {"store": store, "local": tmp_path / "new", **wrong}
        assert str(*wrong) in error_of(lambda given=given: Spare(**given))  # type: ignore[misc]
    assert not (tmp_path / "new").exists()
