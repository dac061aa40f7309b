"""Lightning's own ``Trainer`` goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trainings import Jobs, assert_resumed, assert_stopped, run_example
from tests.upstream.environment import import_upstream, needs

pytestmark = [pytest.mark.framework, needs("lightning")]


def run_jobs() -> dict[str, Any]:
    runs, jobs = import_upstream("tests.integrations.lightning_runs"), Jobs()
    sharded = partial(runs.fit, is_sharded=True)
    return {
        "fsdp2 within an epoch": jobs.killed("fsdp2", sharded, 3, 11),
        "ddp within an epoch": jobs.killed("ddp", runs.fit, 3, 11),
        "one process between epochs": jobs.killed("one", runs.fit, 7, 9, ranks=1),
        "stopped": jobs.stopped(sharded, 0),
        "refused": jobs.run(runs.refuse_a_path, 1),
    }


@pytest.mark.parametrize(
    ("job", "first"),
    [("fsdp2 within an epoch", 9), ("ddp within an epoch", 9), ("one process between epochs", 7)],
)
def test_a_run_goes_on_bit_for_bit_after_a_kill(
    job: str, first: int, outcomes: dict[str, Any]
) -> None:
    assert_resumed(outcomes[job], first)


def test_a_signal_on_one_rank_stops_all_after_the_same_step(outcomes: dict[str, Any]) -> None:
    assert_stopped(outcomes["fsdp2 within an epoch"][0], outcomes["stopped"])


def test_a_path_to_begin_from_is_refused_beside_a_checkpoint_that_was_found(
    outcomes: dict[str, Any],
) -> None:
    (error,) = outcomes["refused"]

    assert "leave ckpt_path out to go on from the newest checkpoint" in error


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    # As under torchrun.
    env = {"TORCHELASTIC_RUN_ID": "example"}
    printed = run_example("lightning_training", tmp_path, [1, 2], env=env)

    assert printed == ["trained up to step 8", "trained up to step 16"]
