"""Signals that reach the workers of data loaders as well, as launchers send them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

import localckpt
from localckpt.checkpointer.parts import TrainingState
from localckpt.checkpointer.stopping import Evidence, judge_ends
from tests.checkpointer.loops import resume_once
from tests.programs import run_python
from tests.ranks import run_ranks, start_ranks


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    # Killed workers leave folders there; names of sockets are short.
    with tempfile.TemporaryDirectory(prefix="w-") as folder:
        yield os.environ | {"TMPDIR": folder}


def _state() -> dict[str, Any]:
    model = torch.nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}


def _train_with_workers(rank: int, world_size: int, folder: Path) -> int:
    # As torchrun starts a rank, whose signals then go to its workers as well.
    os.setsid()
    state = _state()
    data = TensorDataset(torch.ones(100_000, 4))
    init = localckpt.worker_init_fn
    loader = iter(
        DataLoader(data, num_workers=2, worker_init_fn=init, multiprocessing_context="fork")
    )
    places = {"local": folder / str(rank), "shared": folder / "shared"}
    with localckpt.Checkpointer(state, **places, every=100_000, grace_s=10.0) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, first + 10_000):
            (batch,) = next(loader)
            state["model"](batch).sum().backward()
            dist.barrier()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            time.sleep(0.02)
            print(f"step {step}", flush=True)
            if checkpointer.step(step):
                return step
    raise AssertionError("it was not stopped")


def _first(rank: int, world_size: int, nodes: Path, shared: Path | None = None) -> int:
    return resume_once(_state(), local=nodes / str(rank), shared=shared)


def test_sigterm_to_ranks_with_workers_stops_them_with_the_last_step_on_both_tiers(
    tmp_path: Path,
) -> None:
    with start_ranks(_train_with_workers, 2, tmp_path) as group:
        group.await_printed(0, "step 30\n")
        for pid in group.pids:
            os.killpg(pid, signal.SIGTERM)
        stopped = group.join()

    of_nodes = run_ranks(_first, 2, tmp_path)
    of_shared = run_ranks(_first, 2, tmp_path / "other nodes", tmp_path / "shared")

    assert of_nodes == of_shared == [step + 1 for step in stopped]


class _Stuck(Dataset[torch.Tensor]):
    """Samples, of which one never comes, so that its workers are not ahead of the loop."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.at:
            time.sleep(600)
        return torch.ones(4)

    def __len__(self) -> int:
        return 1000


def _train(folder: str, batches: int) -> None:
    """Train until a signal ends a loader's workers, before the last batch of a step."""
    model, stuck = torch.nn.Linear(4, 1), 59 + batches
    loader = iter(DataLoader(_Stuck(stuck), num_workers=2))
    with localckpt.Checkpointer({"m": model}, local=folder, every=100_000) as checkpointer:
        for step in range(checkpointer.resume(), 500):
            for number in range(batches):
                if step * batches + number == stuck:
                    # A worker takes a signal of its own trainer for an end in order.
                    family = [psutil.Process(), *psutil.Process().children()]
                    subprocess.run(["kill", *(str(each.pid) for each in family)], check=True)
                model(next(loader)).sum().backward()
            model.zero_grad()
            # The workers are looked for now and then.
            time.sleep(0.02)
            checkpointer.step(step)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("batches", "is_saved"), [(1, True), (2, False)])
def test_after_a_signal_a_loader_that_fails_has_the_last_step_saved_if_nothing_has_changed(
    batches: int, is_saved: bool, tmp_path: Path, environment: dict[str, str]
) -> None:
    program = f"from {__name__} import _train; _train({str(tmp_path)!r}, {batches})"

    ended = run_python(program, timeout=90.0, env=environment)

    assert "DataLoader worker" in ended.stderr
    assert ("came in the middle of the next step" in ended.stderr) == (not is_saved)
    first = resume_once({"m": torch.nn.Linear(4, 1)}, local=tmp_path)
    assert first == (60 if is_saved else 0)


def _add_to_a_parameter(model: torch.nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


@pytest.mark.parametrize(
    "change",
    [
        _add_to_a_parameter,
        lambda model: model[1].running_mean.zero_(),
        lambda model: model(torch.ones(2, 2)).sum().backward(),
        lambda _: torch.rand(1),
        lambda model: model.append(torch.nn.Linear(2, 2)),
        None,
    ],
)
def test_changes_since_the_last_step_are_noticed(
    change: Callable[[Any], object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = TrainingState({"model": model}, None, rng=True, private={}, drop=False)
    evidence = Evidence(state.parts)
    monkeypatch.setattr("multiprocessing.active_children", lambda: [object()])
    evidence.look()
    assert not evidence.is_unchanged()
    evidence.note()

    if change is not None:
        change(model)

    assert evidence.is_unchanged() == (change is None)


def test_ranks_at_different_steps_or_in_the_middle_of_one_are_named() -> None:
    judge_ends([(5, True), (5, True)])
    with pytest.raises(localckpt.CheckpointingException, match=r"differ: \[5, 6\]"):
        judge_ends([(5, True), (6, True)])
    with pytest.raises(localckpt.CheckpointingException, match="on rank 1 the error came in"):
        judge_ends([(5, True), (5, False)])


def test_a_worker_that_its_trainer_could_not_find_is_ended_by_signals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr("localckpt.checkpointer.workers._end_with", lambda trainer: None)
    before = signal.getsignal(signal.SIGTERM)

    localckpt.worker_init_fn(0)

    assert signal.getsignal(signal.SIGTERM) is before
    assert "Permission denied" in caplog.text
