"""Transformers' own ``Trainer`` goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

import contextlib
import io
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.forks import Jobs, leave_out
from tests.ranks import node_store, run_ranks
from tests.upstream.environment import import_upstream, needs

pytestmark = [pytest.mark.framework, needs("transformers", "accelerate", "peft")]

# What Transformers takes to be imported on a busy machine is within it.
_LONGEST_S = 170.0


def _runs() -> Any:
    leave_out()
    return import_upstream("tests.integrations.transformers_runs")


def _run_example_twice(rank: int, world_size: int) -> list[str]:
    _runs()
    example = import_upstream("examples.integrations.transformers_training")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for steps in (6, 12):
            example.main(str(node_store()), steps)
    return [line for line in printed.getvalue().splitlines() if line.startswith("trained")]


def _run_jobs(rank: int, world_size: int) -> dict[str, list[Any]]:
    """What the ranks of all jobs return, by the name of the job."""
    runs, jobs, store = _runs(), Jobs(), node_store()
    kill_pair = {0: {7: signal.SIGKILL}, 1: {7: signal.SIGKILL}}
    # Only one rank receives the signal, and no cadence saves. The ranks have a few steps' time to
    # learn of it.
    stop, slow = {1: {2: signal.SIGTERM}}, partial(runs.train, pause_s=0.2)
    resume = partial(runs.train, is_new=False)
    adapt, readapt = runs.train_adapters, partial(runs.train_adapters, is_new=False)
    return {
        "pair": jobs.run(runs.train, 2, store / "pair", 10**6, {}),
        "pair killed": jobs.run(runs.train, 2, store / "killed", 5, kill_pair),
        "pair resumed": jobs.run(resume, 2, store / "killed", 5, {}),
        "pair stopped": jobs.run(slow, 2, store / "stopped", 10**6, stop),
        "pair after stop": jobs.run(resume, 2, store / "stopped", 10**6, {}),
        "one": jobs.run(adapt, 1, store / "one", 10**6, {}),
        "one killed": jobs.run(adapt, 1, store / "epoch", 12, {0: {13: signal.SIGKILL}}),
        "one resumed": jobs.run(readapt, 1, store / "epoch", 12, {}),
        "paths": jobs.run(runs.resume_from_paths, 1, store / "paths"),
        "export": jobs.run(runs.export, 1, store / "export"),
        "wrong uses": jobs.run(runs.wrong_uses, 1, store / "wrong"),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    # All in one process, which imports Transformers once.
    nodes = [tmp_path_factory.mktemp("node")]
    (by_job,) = run_ranks(
        *(_run_jobs, 1), store_per_node=nodes, init_group=False, timeout_s=_LONGEST_S
    )
    return dict(by_job)


def _jobs(outcomes: dict[str, list[Any]], *names: str) -> Any:
    return zip(*(outcomes[name] for name in names), strict=True)


@pytest.mark.parametrize(
    ("job", "resumed_from"),
    [
        # After step 4 there was an evaluation. That of the first epoch was made after step 11.
        pytest.param("pair", "4", id="ddp-within-an-epoch"),
        pytest.param("one", "11", id="adapters-between-epochs"),
    ],
)
def test_a_run_goes_on_bit_for_bit_after_a_kill(
    job: str, resumed_from: str, outcomes: dict[str, Any]
) -> None:
    for whole, killed, resumed in _jobs(outcomes, job, f"{job} killed", f"{job} resumed"):
        losses, at_end = whole
        assert killed.signal == signal.SIGKILL
        assert resumed[0][0].startswith(f"{resumed_from}a ")
        assert resumed == (losses[-len(resumed[0]) :], at_end)


def test_a_signal_on_one_rank_stops_all_after_the_same_step(outcomes: dict[str, Any]) -> None:
    for whole, stopped, after_stop in _jobs(outcomes, "pair", "pair stopped", "pair after stop"):
        losses, at_end = whole
        assert stopped[1]["is_stopped"]
        assert 0 < len(stopped[0]) < len(losses)
        assert stopped[0] == losses[: len(stopped[0])]
        assert after_stop == (losses[len(stopped[0]) :], at_end)


def test_wrong_uses_are_told(outcomes: dict[str, Any]) -> None:
    (errors,) = outcomes["wrong uses"]

    told = ["attach(trainer)", "give the size", "leave enable_jit_checkpoint out", "another one"]
    assert [words for words in told if not any(words in error for error in errors)] == []
    assert len(errors) == len(told)


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    printed = run_ranks(_run_example_twice, 2, store_per_node=[tmp_path], timeout_s=_LONGEST_S)

    assert printed == [["trained up to step 6", "trained up to step 12"]] * 2
