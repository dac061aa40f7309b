"""Shared storage in an object store: in this process's memory, or with a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from localckpt import StorageError, open_checkpoint
from localckpt.global_tier.folders import Folder, find_shared_sessions, folders_in, remove
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from tests.cli.commands import call
from tests.global_tier.models import WAIT_S, Job, assert_loads, loaded_by, manager_on, state_of
from tests.global_tier.s3 import Way, import_client, needs_s3, serving
from tests.global_tier.states import blank
from tests.managers.jobs import assert_same, error_of
from tests.ranks import announce, await_announced, run_ranks, start_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of an empty root in the memory of this process."""
    return f"memory://{tmp_path.name}"


def _whole(url: str) -> list[Folder]:
    (session,) = find_shared_sessions(url)
    return [known.folder for known in session.whole()]


def _assert_torch_loads(folder: Folder, state: dict[str, Any]) -> None:
    found: dict[str, Any] = blank(state)
    dcp.load(found, storage_reader=FsspecReader(str(folder.path)), no_dist=True)
    assert_same(found, state)


def test_what_is_saved_is_loaded_by_us_and_by_torch_and_seen_by_all_commands(url: str) -> None:
    with manager_on(url, keep_last=2) as manager:
        for iteration in range(1, 6):
            manager.save(state_of(iteration, 0), iteration, is_async=True)
            if iteration == 2:
                manager.pin(2)
        manager.wait_until_finished()
        assert manager.all_iterations() == [5, 4, 2]
        assert_loads(manager, 0, 5)

    _assert_torch_loads(_whole(url)[0], state_of(5, 0))
    assert {call(command, url).status for command in ("ls", "verify", "explain")} == {0}
    assert {call("pin", url, "4").status, call("unpin", url, "2").status} == {0}
    with open_checkpoint(url, iteration=5) as opened:
        assert_same(opened["shared.weight"], state_of(5, 0)["shared"]["weight"])


@pytest.mark.fault("two-jobs")
def test_the_job_that_begins_to_save_last_has_the_root(url: str) -> None:
    with manager_on(url) as first, manager_on(url) as second:
        first.save(state_of(1, 0), 1)
        assert loaded_by(second, 0)[0] == 1
        second.save(state_of(2, 0), 2)

        with pytest.raises(StorageError, match=r"another job has begun to save .*process \w+"):
            first.save(state_of(3, 0), 3)
        assert_loads(second, 0, 2)


def test_a_pin_while_a_checkpoint_is_removed_keeps_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_on(url) as manager:
        manager.save(state_of(1, 0), 1)
    (folder,) = _whole(url)
    record, pinned = folder.beside("localckpt.json"), folder.beside("localckpt.pin")
    delete = type(pinned).remove

    def pin_and_delete(place: Any) -> None:
        delete(place)
        if place == record:
            pinned.put(b"pinned\n")

    monkeypatch.setattr(type(pinned), "remove", pin_and_delete)

    assert not remove(folder)
    assert _whole(url) == [folder]


def _refused_in_memory(rank: int, world_size: int, url: str) -> str:
    return error_of(lambda: manager_on(url), StorageError)


def test_what_cannot_be_used_is_said(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="pip install fsspec s3fs"):
        manager_on("s3://bucket/run")
    with pytest.raises(StorageError, match=r"cannot be used \(Protocol not known"):
        manager_on("nothing://bucket/run")
    with manager_on(f"file://{tmp_path}/run") as manager:
        assert manager.root == tmp_path / "run"
    for error in run_ranks(_refused_in_memory, 2, url):
        assert "in the memory of one process, and the job has 2 ranks" in error


@pytest.fixture(scope="module")
def way() -> Iterator[Way]:
    with serving() as way:
        yield way


def _state(iteration: int, rank: int, nbytes: int = 0) -> dict[str, Any]:
    large = torch.ones(nbytes, dtype=torch.uint8)
    return {**state_of(iteration, rank), f"large of {rank}": large}


def _drain(rank: int, world_size: int, root: Path, url: str, sizes: dict[str, int]) -> list[int]:
    """Drain states of some sizes, each when the test lets it go on."""
    import_client()
    with Job(root, {"root": url, "timeout": 5.0, "keep_last": 2}) as job:
        for iteration, (name, nbytes) in enumerate(sizes.items(), 1):
            job.nodes.save(_state(iteration, rank, nbytes), iteration)
            announce(f"{name} on {rank}")
            await_announced(f"drain {name}", WAIT_S)
            try:
                job.promote(iteration)
            except StorageError as error:
                announce(f"{name} failed", str(error))
        iterations = job.shared.all_iterations()
        with job.shared.images(iterations[0]) as (images, first):
            source = images.open(first)
            ImageReader(source, SafeGlobals(), first).verify()
            source.close()
        return iterations


def _go_on(rank: int, world_size: int, url: str, iteration: int) -> None:
    import_client()
    with manager_on(url) as manager:
        state = blank(_state(0, rank))
        assert manager.load(into=state)[1].iteration == iteration
        assert_same(state, _state(iteration, rank))
        everything = [_state(iteration, rank) for rank in range(world_size)]
        _assert_torch_loads(_whole(url)[0], dict(i for s in everything for i in s.items()))
        manager.save(_state(iteration + 1, rank), iteration + 1)
        assert folders_in(manager.root)[1] == []


@needs_s3
def test_ranks_drain_and_resume_while_the_server_refuses_and_throttles(
    way: Way, tmp_path: Path
) -> None:
    url, plan = "s3://bucket/refused", {"good": [], "failing": [500] * 2, "slow": [503] * 12}
    with start_ranks(_drain, 2, tmp_path, url, dict.fromkeys(plan, 0), env=way.variables) as group:
        for name, statuses in plan.items():
            for rank in range(2):
                group.await_announced(f"{name} on {rank}", WAIT_S)
            way.refused += statuses
            group.announce(f"drain {name}")
        assert group.join(WAIT_S) == [[3, 2]] * 2

    run_ranks(_go_on, 2, url, 3, env=way.variables)


@needs_s3
@pytest.mark.fault("cut-network", "kill-save")
def test_a_cut_network_is_waited_for_until_the_deadline_and_a_kill_leaves_the_drain_before(
    way: Way, tmp_path: Path
) -> None:
    url, large = "s3://bucket/cut", 40 << 20
    sizes = {"mended": large, "cut": large, "good": 0, "killed": large}
    with start_ranks(_drain, 1, tmp_path, url, sizes, env=way.variables) as group:
        for name, nbytes in sizes.items():
            group.await_announced(f"{name} on 0", WAIT_S)
            way.mend()
            if nbytes:
                way.be_silent_after(35 << 20)
            group.announce(f"drain {name}")
            if nbytes:
                assert way.silent.wait(WAIT_S)
            if name in ("mended", "cut"):
                way.cut()
            if name == "mended":
                way.mend()
        group.kill(0)
        group.join(WAIT_S, expect_dead=[0])
        error = group.await_announced("cut failed", WAIT_S)
    way.mend()

    assert "could not write s3://bucket/cut" in error
    assert "saved before are as they were" in error
    run_ranks(_go_on, 1, url, 3, env=way.variables)
