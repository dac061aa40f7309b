"""Transformers' own ``Trainer`` goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trainings import (
    Jobs,
    assert_resumed,
    assert_stopped,
    leave_out,
    run_example,
)
from tests.upstream.environment import import_upstream, needs

pytestmark = [pytest.mark.framework, needs("transformers", "accelerate", "peft")]


def run_jobs() -> dict[str, Any]:
    leave_out()
    runs, jobs = import_upstream("tests.integrations.transformers_runs"), Jobs()
    for run in (runs.resume_from_paths, runs.export):
        jobs.run(run, 1)
    return {
        # After step 4 there was an evaluation. That of the first epoch was made after step 11.
        "ddp within an epoch": jobs.killed("ddp", runs.train, 5, 7),
        "adapters between epochs": jobs.killed("adapters", runs.train_adapters, 12, 13, ranks=1),
        "stopped": jobs.stopped(runs.train, 2),
        "wrong uses": jobs.run(runs.wrong_uses, 1),
    }


@pytest.mark.parametrize(
    ("job", "first"), [("ddp within an epoch", "4a"), ("adapters between epochs", "11a")]
)
def test_a_run_goes_on_bit_for_bit_after_a_kill(
    job: str, first: str, outcomes: dict[str, Any]
) -> None:
    assert_resumed(outcomes[job], first)


def test_a_signal_on_one_rank_stops_all_after_the_same_step(outcomes: dict[str, Any]) -> None:
    assert_stopped(outcomes["ddp within an epoch"][0], outcomes["stopped"])


def test_wrong_uses_are_told(outcomes: dict[str, Any]) -> None:
    (errors,) = outcomes["wrong uses"]

    told = ["attach(trainer)", "give the size", "leave enable_jit_checkpoint out", "another one"]
    assert all(words in error for words, error in zip(told, errors, strict=True))


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    printed = run_example("transformers_training", tmp_path, [6, 12], leave_out)

    assert printed == ["trained up to step 6", "trained up to step 12"]
