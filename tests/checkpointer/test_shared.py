"""Shared storage under the front door: what outlives the nodes, and the number of ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import (
    Best,
    Checkpointer,
    Every,
    LocalCheckpointManager,
    NoReplicasAvailableError,
    Retention,
)
from localckpt.checkpointer import tiers
from localckpt.global_tier.folders import find_shared_sessions, why_kept
from localckpt.global_tier.manager import GlobalCheckpointManager


@pytest.fixture(params=["directory", "memory"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory, and an object store as far as one process sees it."""
    return f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "shared")


def test_a_damaged_checkpoint_on_shared_storage_makes_way_for_the_one_before(
    tmp_path: Path, shared: str
) -> None:
    model, saved = torch.nn.Linear(50, 50), []
    with Checkpointer({"model": model}, local=tmp_path / "a", shared=shared) as checkpointer:
        checkpointer.resume()
        for step in range(2):
            torch.nn.init.normal_(model.weight)
            saved.append(model.weight.detach().clone())
            checkpointer.step(step)
            checkpointer.save(step, shared=True)
            checkpointer.wait_until_finished()
    newest = find_shared_sessions(shared)[0].whole()[0].folder.path
    data = newest / next(name for name in newest.names() if name.endswith(".distcp"))
    content = bytearray(data.read())
    content[len(content) // 2] ^= 1
    data.put(bytes(content))

    with Checkpointer({"model": model}, local=tmp_path / "b", shared=shared) as checkpointer:
        assert checkpointer.resume() == 1

    assert torch.equal(model.weight, saved[0])


def test_rules_metrics_and_pins_reach_shared_storage(tmp_path: Path, shared: str) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(
        {"model": model},
        local=tmp_path / "local",
        shared=shared,
        shared_every=Every(steps=10),
        shared_retention=Retention(last=1, best=Best("loss")),
    ) as checkpointer:
        for step in range(checkpointer.resume(), 40):
            loss = torch.tensor(abs(step - 20.0))
            checkpointer.step(step, metrics={"loss": loss})
            if step == 12:
                checkpointer.save(step, shared=True, metrics={"loss": 100})
                checkpointer.pin(step)
        checkpointer.wait_until_finished()
        with pytest.raises(NoReplicasAvailableError, match="no checkpoint of iteration 11"):
            checkpointer.pin(11)

    (session,) = find_shared_sessions(shared)
    kept = why_kept(session.checkpoints())
    assert kept == {
        (1, 12): ("pinned",),
        (1, 19): ("best",),
        (1, 39): ("newest", "last"),
    }


def _leave_while_it_drains(model: torch.nn.Module, places: dict[str, str]) -> None:
    with Checkpointer({"model": model}, **places) as checkpointer:
        checkpointer.resume()
        for step in (0, 1):
            checkpointer.step(step)
            checkpointer.save(step, shared=True)
        while checkpointer.newest != 1:
            time.sleep(0.01)
            checkpointer.step()
        raise RuntimeError("the job ends here")


def test_a_drain_that_was_cut_off_and_the_one_behind_it_go_on_at_the_next_start(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"local": str(tmp_path / "local"), "shared": shared}
    model = torch.nn.Linear(300, 300)
    monkeypatch.setattr(tiers, "_RATE", 1e4)
    with pytest.raises(RuntimeError, match="ends here"):
        _leave_while_it_drains(model, places)
    monkeypatch.undo()
    (session,) = find_shared_sessions(shared)
    assert not session.checkpoints()
    assert session.leftovers()

    with Checkpointer({"model": model}, **places, save_last=False) as checkpointer:
        checkpointer.resume()
        checkpointer.wait_until_finished()

    assert [known.folder.iteration for known in session.checkpoints()] == [1, 0]
    assert not session.leftovers()


def test_a_drain_that_takes_longer_than_ranks_wait_for_each_other_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"local": tmp_path / "local", "shared": tmp_path / "shared"}
    monkeypatch.setattr(tiers, "_RATE", 5e5)

    with Checkpointer({"model": torch.nn.Linear(800, 800)}, **places, timeout_s=4) as checkpointer:
        checkpointer.resume()
        checkpointer.step(0)
        checkpointer.save(0, shared=True)
        began = time.monotonic()
        checkpointer.pin(0)

    assert time.monotonic() - began > 4
    assert checkpointer.failed_saves == 0
    (session,) = find_shared_sessions(tmp_path / "shared")
    assert [(known.folder.iteration, known.is_pinned) for known in session.checkpoints()] == [
        (0, True)
    ]


@pytest.mark.parametrize("is_open", [False, True], ids=["found", "opened"])
def test_what_a_job_prunes_while_another_reads_it_makes_way_for_the_newest(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shared = torch.nn.Linear(50, 50), tmp_path / "shared"
    with Checkpointer(
        {"model": model}, local=tmp_path / "a", shared=shared, shared_keep_last=1, save_last=False
    ) as job:
        job.resume()

        def save(step: int) -> None:
            job.step(step)
            job.save(step, shared=True)
            job.wait_until_finished()

        save(0)
        owner: Any = LocalCheckpointManager if is_open else GlobalCheckpointManager
        call = "load_from" if is_open else "images"
        looked = getattr(owner, call)

        def look(*args: Any) -> Any:
            monkeypatch.undo()
            save(1)
            return looked(*args)

        monkeypatch.setattr(owner, call, look)
        with Checkpointer(
            {"model": torch.nn.Linear(50, 50)}, local=tmp_path / "b", shared=shared, read_only=True
        ) as reader:
            assert reader.resume() == 2


def test_a_stop_has_older_drains_keep_to_no_rate_so_that_the_last_one_is_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Either drain would take 160 s.
    monkeypatch.setattr(tiers, "_RATE", 1e5)
    stop, model = tmp_path / "stop", torch.nn.Linear(2000, 2000)
    with Checkpointer(
        {"model": model},
        local=tmp_path / "node",
        shared=tmp_path / "shared",
        every=Every(steps=1000),
        shared_every=Every(steps=1000),
        stop_file=stop,
        grace_s=60.0,
    ) as checkpointer:
        checkpointer.resume()
        checkpointer.step(0)
        checkpointer.save(0, shared=True)
        last = 0
        for step in range(1, 3000):
            last = step
            if checkpointer.step(step):
                break
            stop.touch()
            time.sleep(0.02)

    assert checkpointer.stopped is not None
    with GlobalCheckpointManager(tmp_path / "shared", read_only=True) as shared:
        assert shared.all_iterations() == [last, 0]
