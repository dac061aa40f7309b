"""Loops with Accelerate go on bit for bit where they were killed, or stopped."""

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

pytestmark = [pytest.mark.framework, needs("accelerate", "torchdata")]

# What Accelerate takes to be imported on a busy machine is within it.
_LONGEST_S = 170.0

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


def _run_jobs(rank: int, world_size: int) -> dict[str, list[Any]]:
    """What the ranks of all jobs return, by the name of the job."""
    leave_out()
    runs = import_upstream("tests.integrations.accelerate_runs")
    jobs, store = Jobs(), node_store()
    outcomes = {}
    for kind, (options, every, kill_at, _) in _KINDS.items():
        if "stateful" in kind and not runs.can_resume_stateful_loaders():
            continue
        train = partial(runs.train, **options)
        kill = {rank: {f"{kill_at}": signal.SIGKILL} for rank in range(2)}
        resume = partial(train, is_new=False)
        outcomes[kind] = jobs.run(train, 2, store / kind / "whole", 10**6, {})
        outcomes[f"{kind} killed"] = jobs.run(train, 2, store / kind, every, kill)
        outcomes[f"{kind} resumed"] = jobs.run(resume, 2, store / kind, every, {})
    # Only one rank receives the signal, and no cadence saves. The ranks have a few steps' time to
    # learn of it.
    slow, stop = partial(runs.train, pause_s=0.2), {1: {"4": signal.SIGTERM}}
    resume = partial(runs.train, is_new=False)
    outcomes["stopped"] = jobs.run(slow, 2, store / "stopped", 10**6, stop)
    outcomes["after stop"] = jobs.run(resume, 2, store / "stopped", 10**6, {})
    outcomes["miscounted"] = jobs.run(runs.refuse_miscounted, 2, store / "miscounted")
    outcomes["wrong uses"] = jobs.run(runs.wrong_uses, 1, store / "wrong")
    return outcomes


def _run_example_twice(rank: int, world_size: int) -> list[str]:
    leave_out()
    example = import_upstream("examples.integrations.accelerate_training")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for epochs in (1, 2):
            example.main(str(node_store()), epochs)
    return printed.getvalue().splitlines()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    # All in one process, which imports Accelerate once.
    store = tmp_path_factory.mktemp("node")
    options: dict[str, Any] = {"init_group": False, "timeout_s": _LONGEST_S}
    return dict(run_ranks(_run_jobs, 1, store_per_node=[store], **options)[0])


@pytest.mark.parametrize("kind", _KINDS)
def test_a_loop_goes_on_bit_for_bit_after_a_kill(kind: str, outcomes: dict[str, Any]) -> None:
    if kind not in outcomes:
        pytest.skip("this release notes the position of the loader wrongly, and is refused")
    of_ranks = zip(
        *(outcomes[kind], outcomes[f"{kind} killed"], outcomes[f"{kind} resumed"]), strict=True
    )
    for (losses, at_end), killed, (resumed, at_end_again) in of_ranks:
        assert killed.signal == signal.SIGKILL
        assert resumed[0].startswith(f"{_KINDS[kind][-1]} ")
        assert resumed == losses[-len(resumed) :]
        assert at_end_again == at_end


def test_all_ranks_stop_after_the_same_step_and_go_on(outcomes: dict[str, Any]) -> None:
    names = "batches left out", "stopped", "after stop"
    for whole, stopped, after in zip(*(outcomes[name] for name in names), strict=True):
        assert stopped[1][-1] is True
        assert 0 < len(stopped[0]) < len(whole[0])
        assert [*stopped[0], *after[0]] == whole[0]
        assert after[1] == whole[1]


def test_what_was_not_prepared_is_refused(outcomes: dict[str, Any]) -> None:
    ((no_model, no_loader),) = outcomes["wrong uses"]

    assert "call accelerator.prepare() before epochs()" in no_model
    assert "takes a loader that accelerator.prepare() has returned" in no_loader


def test_a_loader_whose_position_is_noted_wrongly_is_refused(outcomes: dict[str, Any]) -> None:
    told, also_told = outcomes["miscounted"]

    assert told == also_told
    assert "install accelerate>=1.13" in told


@pytest.mark.example
def test_the_example_resumes(tmp_path: Path) -> None:
    printed = run_ranks(_run_example_twice, 2, store_per_node=[tmp_path], timeout_s=_LONGEST_S)

    assert printed == [["trained up to step 8", "trained up to step 16"]] * 2
