"""Loops with Accelerate go on bit for bit where they were killed, or stopped."""

from __future__ import annotations

from functools import partial
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

pytestmark = [pytest.mark.framework, needs("accelerate", "torchdata")]

# How data is loaded, whether FSDP2 shards the model, the cadence, the batch of the kill, and what
# comes next: a batch, or what the loop does after an epoch.
_KINDS: dict[str, tuple[dict[str, Any], int, int, int | str]] = {
    "batches left out": ({}, 4, 11, 6),
    "batches dispatched": ({"loading": {"dispatch_batches": True}}, 4, 11, 6),
    "stateful, sharded": (
        {
            "loading": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
            "is_sharded": True,
        },
        *(8, 18, "epoch 0"),
    ),
    "stateful": ({"loading": {"use_stateful_dataloader": True}}, 4, 11, 6),
}


def run_jobs() -> dict[str, Any]:
    leave_out()
    runs, jobs = import_upstream("tests.integrations.accelerate_runs"), Jobs()
    told: dict[str, Any] = {
        kind: jobs.killed(kind, partial(runs.train, **options), every, kill_at)
        for kind, (options, every, kill_at, _) in _KINDS.items()
        if "stateful" not in kind or runs.can_resume_stateful_loaders()
    }
    told["stopped"] = jobs.stopped(runs.train, 4)
    told["miscounted"] = jobs.run(runs.refuse_miscounted, 2)
    told["wrong uses"] = jobs.run(runs.wrong_uses, 1)
    return told


@pytest.mark.parametrize("kind", _KINDS)
def test_a_loop_goes_on_bit_for_bit_after_a_kill(kind: str, outcomes: dict[str, Any]) -> None:
    if kind not in outcomes:
        pytest.skip("this release notes the position of the loader wrongly, and is refused")
    assert_resumed(outcomes[kind], first=_KINDS[kind][-1])


def test_all_ranks_stop_after_the_same_step_and_go_on(outcomes: dict[str, Any]) -> None:
    assert_stopped(outcomes["batches left out"][0], outcomes["stopped"])


def test_what_was_not_prepared_or_is_counted_wrongly_is_refused(outcomes: dict[str, Any]) -> None:
    ((no_model, no_loader),) = outcomes["wrong uses"]
    told, also_told = outcomes["miscounted"]

    assert "call accelerator.prepare() before epochs()" in no_model
    assert "takes a loader that accelerator.prepare() has returned" in no_loader
    assert told == also_told
    assert "install accelerate>=1.13" in told


@pytest.mark.example
def test_the_example_resumes(tmp_path: Path) -> None:
    printed = run_example("accelerate_training", tmp_path, [1, 2], leave_out)

    assert printed == ["trained up to step 8", "trained up to step 16"]
