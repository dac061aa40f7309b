"""What the front door refuses, what it does when saves fail, and how often it saves by itself."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import Checkpointer, CheckpointingException, Every
from tests.checkpointer.loops import Part, stores
from tests.managers.jobs import iterations_on, put_back, take_away
from tests.ranks import node_store, run_ranks


def _state() -> dict[str, Any]:
    return {"value": Part(torch.zeros(1000))}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "memory=True"),
        ({"memory": True, "replication_factor": 0}, "1 \\(no copies\\) or more"),
        ({"memory": True, "on_error": "ignore"}, "'warn' or 'raise'"),
        ({"memory": True, "max_failures": 0}, "must be above 0"),
        ({"memory": True, "every": 1.5}, "every=1.5 is no cadence"),
        ({"memory": True, "shared_every": Every(overhead=0.01)}, "shared_every takes steps or min"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointingException, match=told):
        Checkpointer(_state(), **options)


@pytest.mark.parametrize("below", ["", "shared"])
def test_shared_storage_in_a_directory_of_the_node_is_refused(below: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=r"is in local=.*Give two directories"):
        Checkpointer(_state(), local=tmp_path, shared=tmp_path / below)


def _make_alike(rank: int, world_size: int) -> str:
    options: dict[str, Any] = {"local": node_store(), "timeout_s": 30, "events": ()}
    with pytest.raises(CheckpointingException) as caught:
        Checkpointer(_state(), **options, every=5 + rank)
    Checkpointer(_state(), **options).close()
    return str(caught.value)


def test_arguments_that_differ_are_an_error_on_all(tmp_path: Path) -> None:
    for text in run_ranks(_make_alike, 2, store_per_node=[tmp_path]):
        assert "every is 5 on rank 0 and 6 on rank 1. Give all ranks the same" in text


def test_a_signal_that_cannot_be_handled_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    signals = [signal.SIGUSR1, signal.SIGKILL]

    with pytest.raises(CheckpointingException, match="leave it out"):
        Checkpointer(_state(), local=tmp_path, stop_signals=signals)

    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    Checkpointer(_state(), local=tmp_path).close()


def test_steps_before_resume_or_out_of_order_or_after_the_end_are_refused(tmp_path: Path) -> None:
    with Checkpointer(_state(), local=tmp_path, every=Every(steps=1)) as checkpointer:
        with pytest.raises(CheckpointingException, match=r"call resume\(\) before the first step"):
            checkpointer.step(0)
        assert checkpointer.resume() == 0
        assert not checkpointer.step(0)
        with pytest.raises(CheckpointingException, match=r"step\(0\) was called after step\(0\)"):
            checkpointer.step(0)
    with pytest.raises(CheckpointingException, match="is closed"):
        checkpointer.step(1)
    with pytest.raises(CheckpointingException, match="is closed"):
        checkpointer.resume()
    assert iterations_on(tmp_path) == {0}


def test_a_checkpoint_that_is_not_there_is_neither_pinned_nor_marked_good(tmp_path: Path) -> None:
    with Checkpointer(_state(), local=tmp_path) as checkpointer:
        checkpointer.resume()

        for call in (checkpointer.pin, checkpointer.unpin):
            with pytest.raises(CheckpointingException, match="there is no shared storage"):
                call(0)
        with pytest.raises(CheckpointingException, match="no checkpoint to mark as good"):
            checkpointer.mark_good()


def test_a_program_that_changes_its_working_directory_finds_its_checkpoints_on_both_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(folder: str, steps: int) -> tuple[int, bool]:
        monkeypatch.chdir(tmp_path)
        options: dict[str, Any] = {"local": "nodes", "shared": "shared", "stop_file": "stop"}
        with Checkpointer(_state(), **options, every=Every(steps=1)) as checkpointer:
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(folder)
            first = checkpointer.resume()
            for step in range(first, first + steps):
                checkpointer.step(step)
            if steps:
                checkpointer.save(first + steps - 1, shared=True)
            return first, checkpointer.stopped is not None

    first = start("first", 3)
    from_nodes = start("second", 0)
    shutil.rmtree(tmp_path / "nodes")
    from_shared = start("third", 0)

    assert [first, from_nodes, from_shared] == [(0, False), (3, False), (3, False)]
    assert not any((tmp_path / folder / "shared").exists() for folder in ("first", "third"))
    assert all(not any((tmp_path / folder).iterdir()) for folder in ("first", "second", "third"))


def test_a_program_may_ask_for_the_step_before_it_makes_its_state(tmp_path: Path) -> None:
    made: list[Part] = []

    def make() -> dict[str, Any]:
        made.append(Part(torch.zeros(1000)))
        return {"value": made[-1]}

    options: dict[str, Any] = {
        "local": tmp_path / "node",
        "every": Every(steps=1),
        "shared": tmp_path / "shared",
        "shared_every": Every(steps=2),
    }
    with Checkpointer(make, **options) as checkpointer:
        assert checkpointer.find_latest() == -1
        assert checkpointer.resume() == 0
        for step in range(4):
            made[-1].value += 1
            checkpointer.step(step)
    with Checkpointer(make, **options) as checkpointer:
        assert checkpointer.find_latest() == 3
        assert len(made) == 1
        assert checkpointer.resume() == 4
    shutil.rmtree(tmp_path / "node")
    with Checkpointer(make, **options) as checkpointer:
        assert checkpointer.find_latest() == 3
        assert checkpointer.resume() == 4

    assert [part.value[0].item() for part in made] == [4.0, 4.0, 4.0]


def _train_while_the_store_is_away(
    rank: int, world_size: int, max_failures: int
) -> tuple[list[int], int, str]:
    """Steps of which the store was there, the saves that failed, and what was raised."""
    root = node_store()
    told, steps = "", []
    options: dict[str, Any] = {"every": Every(steps=1), "max_failures": max_failures}
    with Checkpointer(_state(), local=root, timeout_s=60.0, **options) as checkpointer:
        checkpointer.resume()
        for step in range(6):
            if rank == 1 and step == 2:
                take_away(root)
            if rank == 1 and step == 4:
                put_back(root)
            try:
                checkpointer.step(step)
                checkpointer.wait_until_finished()
            except CheckpointingException as error:
                told = str(error)
                break
            steps.append(step)
        if rank == 1 and root.is_file():
            put_back(root)
        return steps, checkpointer.failed_saves, told


@pytest.mark.fault("unusable-store")
def test_training_goes_on_when_saves_fail_and_ends_when_too_many_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = stores(tmp_path / "goes on", 2)
    went_on = run_ranks(_train_while_the_store_is_away, 2, 3, store_per_node=nodes)

    assert went_on == [([0, 1, 2, 3, 4, 5], 2, "")] * 2
    warned = capfd.readouterr().out
    for count in (1, 2):
        assert f"a save to the nodes failed ({count} in a row; training ends at 3): " in warned
    for node in nodes:
        assert 5 in iterations_on(node)
    nodes = stores(tmp_path / "ends", 2)
    ended = run_ranks(_train_while_the_store_is_away, 2, 2, store_per_node=nodes)
    (told,) = {text for _, _, text in ended}
    assert "rank 1" in told
    assert [failed for _, failed, _ in ended] == [2, 2]


def _stop_while_the_store_is_away(rank: int, world_size: int) -> tuple[int, int]:
    """The step after which the job was stopped, and the saves that failed before."""
    root = node_store()
    file = root.parent / "stop"
    with Checkpointer(
        _state(), local=root, every=Every(steps=10**6), stop_file=file, timeout_s=60.0
    ) as checkpointer:
        checkpointer.resume()
        checkpointer.step(0)
        if rank == 1:
            take_away(root)
        # Fails behind training, and is heard of when the job is stopped.
        checkpointer.save(0)
        dist.barrier()
        time.sleep(0.5)
        if rank == 1:
            put_back(root)
            file.touch()
        dist.barrier()
        for step in range(1, 10**6):
            if checkpointer.step(step):
                return step, checkpointer.failed_saves
            time.sleep(0.002)
    raise AssertionError("the job was not stopped")


@pytest.mark.fault("unusable-store")
def test_a_job_that_is_stopped_when_a_save_has_failed_is_safe_all_the_same(tmp_path: Path) -> None:
    nodes = stores(tmp_path, 2)

    ((step, failed), other) = run_ranks(_stop_while_the_store_is_away, 2, store_per_node=nodes)

    assert (step, failed) == other
    assert failed == 1
    for node in nodes:
        assert step in iterations_on(node)
