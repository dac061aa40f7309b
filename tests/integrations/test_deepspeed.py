"""DeepSpeed's engine goes on bit for bit where it was killed, or stopped, at all ZeRO stages."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trainings import Jobs, assert_resumed, assert_stopped, run_example
from tests.ranks import run_ranks
from tests.upstream.environment import import_upstream, needs

pytestmark = [pytest.mark.framework, needs("deepspeed"), pytest.mark.timeout(400)]

LONGEST_S = 300.0
_STAGES = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
_ON_CPU = {"device": "cpu"}


def _runs() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    runs = import_upstream("tests.integrations.deepspeed_runs")
    runs.use_no_compiler()
    return runs


def _kill_each(rank: int, world_size: int, ranks: int, stages: list[Any]) -> list[Any]:
    train, jobs = _runs().train, Jobs()

    def of(stage: int, precision: str, zero: Any = None) -> Any:
        named = partial(train, stage=stage, precision=precision, zero=zero)
        # Within a step: the step that was cut off is done again.
        return jobs.killed(
            *(f"{stage} {precision}", named, 8, ranks), every=1, loses_node=ranks > 1
        )

    return [of(*stage) for stage in stages]


def run_jobs() -> dict[str, Any]:
    runs, jobs = _runs(), Jobs()
    jobs.run(runs.change_over, 1)
    return {
        "stages": _kill_each(0, 1, 2, _STAGES),
        "stopped": jobs.stopped(partial(runs.train, stage=2, precision="fp32"), 2),
        "wrong": jobs.run(runs.errors_of_wrong_use, 1),
    }


def test_an_engine_goes_on_bit_for_bit_after_a_kill_and_the_loss_of_a_node(
    outcomes: dict[str, Any],
) -> None:
    for of_stage in outcomes["stages"]:
        assert_resumed(of_stage, first=8)


def test_all_ranks_stop_after_the_same_step_and_go_on(outcomes: dict[str, Any]) -> None:
    assert_stopped(outcomes["stages"][2][0], outcomes["stopped"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        pytest.param(2, [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")], id="other precision"),
        pytest.param(
            1, [(stage, kind) for stage in range(4) for kind in ("fp32", "bf16")], id="one process"
        ),
        pytest.param(
            2,
            [
                (1, "fp32", {"offload_optimizer": _ON_CPU}),
                (2, "bf16", {"offload_optimizer": _ON_CPU}),
                (3, "fp32", {"offload_optimizer": _ON_CPU, "offload_param": _ON_CPU}),
            ],
            id="offload",
        ),
    ],
)
def test_so_it_does_at_all_stages_in_both_precisions_and_offloaded(
    ranks: int, stages: list[Any], tmp_path: Path
) -> None:
    (told,) = run_ranks(
        *(_kill_each, 1, ranks, stages),
        store_per_node=[tmp_path],
        init_group=False,
        timeout_s=LONGEST_S,
    )

    for of_stage in told:
        assert_resumed(of_stage, first=8)


def test_wrong_use_gives_a_clear_error(outcomes: dict[str, Any]) -> None:
    (told,) = outcomes["wrong"]

    assert told.keys() == _TOLD.keys()
    for what, expected in _TOLD.items():
        assert expected in told[what]


_TOLD = {
    "no engine": "give it the engine, which is what deepspeed.initialize returns first",
    "key": "is that of the engine: give the part another name",
    "finite": "judge their tensors by check=",
    "elastic": "with elastic_checkpoint each rank loads the files of all others",
    "experts": "only the first rank writes what all others load",
    "pipeline": "a pipeline's ranks each write a part of the layers",
    "twice": "install() once, or close() what was installed first",
    "not loaded": "call engine.load_checkpoint(load_dir) once before engine.save_checkpoint",
    "not loaded, step": "call engine.load_checkpoint(load_dir) once before step()",
    "closed": "closed: install anew",
    "within": "after micro-step 3, with 2 to a step: accumulated gradients are not saved",
    "training": "to go back, end the job and start it again",
    "tag": "has the tag 'good', and load_checkpoint was given tag='bad': leave the tag out",
    "other model": "the state to load into differs from the saved one, and was left as it is",
}


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    printed = run_example("deepspeed_training", tmp_path, [8, 16], _runs)

    assert printed == ["trained from step 0 to step 8", "trained from step 7 to step 16"]
