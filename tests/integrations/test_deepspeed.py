"""DeepSpeed's engine goes on bit for bit where it was killed, or stopped, at all ZeRO stages."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import announce, node_store, run_ranks, start_ranks
from tests.upstream.environment import import_upstream, needs

Dirs = Callable[[int], list[Path]]
_Seen = tuple[list[str], str, str]
_Stages = list[tuple[Any, ...]]

pytestmark = [pytest.mark.framework, needs("deepspeed")]

# What DeepSpeed takes to be imported on a busy machine is within it.
_LONGEST_S = 150.0
_ON_CPU = {"device": "cpu"}
_ENV = {"DS_ACCELERATOR": "cpu"}


def _runs() -> Any:
    runs = import_upstream("tests.integrations.deepspeed_runs")
    runs.use_no_compiler()
    return runs


def _train_and_be_killed(rank: int, world_size: int, stages: _Stages) -> None:
    runs = _runs()
    wholes = [runs.train(node_store() / "whole", *stage, is_new=True) for stage in stages]
    announce(f"whole {rank}", wholes)
    saved = [runs.train_until_cut_off(node_store() / "killed", *stage) for stage in stages]
    announce(f"killed {rank}", saved)
    os.kill(os.getpid(), signal.SIGKILL)


def _go_on(rank: int, world_size: int, stages: _Stages) -> tuple[list[_Seen], Any]:
    runs = _runs()
    resumed = [runs.train(node_store() / "killed", *stage, is_new=False) for stage in stages]
    # Only one rank receives the signal.
    return resumed, runs.stop_and_go_on(node_store(), is_asked=rank == world_size - 1)


@pytest.mark.parametrize(
    ("world_size", "stages"),
    [
        pytest.param(2, [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")], id="two-nodes"),
        pytest.param(
            *(2, [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")]),
            id="two-nodes-other-precision",
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(1, [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]),
            id="one-process",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            [
                (1, "fp32", {"offload_optimizer": _ON_CPU}),
                (2, "bf16", {"offload_optimizer": _ON_CPU}),
                (3, "fp32", {"offload_optimizer": _ON_CPU, "offload_param": _ON_CPU}),
            ],
            id="offload",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_engine_goes_on_bit_for_bit_after_a_kill_and_the_loss_of_a_node_and_after_a_signal(
    world_size: int, stages: _Stages, node_dirs: Dirs
) -> None:
    nodes = node_dirs(world_size)

    dies = (_train_and_be_killed, world_size, stages)
    with start_ranks(*dies, store_per_node=nodes, env=_ENV) as group:
        wholes = [group.await_announced(f"whole {rank}", _LONGEST_S) for rank in range(world_size)]
        saved = [group.await_announced(f"killed {rank}", _LONGEST_S) for rank in range(world_size)]
        group.join(_LONGEST_S, expect_dead=range(world_size))
    if world_size > 1:
        shutil.rmtree(nodes[1])
        nodes[1].mkdir()
    goes_on = (_go_on, world_size, stages)
    went_on = run_ranks(*goes_on, store_per_node=nodes, timeout_s=_LONGEST_S, env=_ENV)

    for rank in range(world_size):
        resumed, (stopped, after_stop) = went_on[rank]
        assert [first for _, _, first in resumed] == saved[rank]
        for (whole_lines, whole_state, _), (lines, state, _) in zip(
            *(wholes[rank], resumed), strict=True
        ):
            # The step that was cut off is done again.
            assert lines == whole_lines[8:]
            assert state == whole_state
        assert after_stop == stopped


def _change_over_and_err(rank: int, world_size: int) -> tuple[Any, Any]:
    runs = _runs()
    return runs.change_over(node_store() / "over"), runs.errors_of_wrong_use(node_store() / "wrong")


def test_a_run_changes_over_from_files_and_back_and_wrong_use_gives_a_clear_error(
    node_dirs: Dirs,
) -> None:
    ((seen, told),) = run_ranks(
        _change_over_and_err, 1, store_per_node=node_dirs(1), timeout_s=_LONGEST_S, env=_ENV
    )

    assert seen == {
        "first": "own",
        # What DeepSpeed has written before, and nothing of what was saved to the node.
        "own files": ["global_step0", "latest", "zero_to_fp32.py"],
        "second": ("global_step1", "node"),
        "is same": True,
        "weights only": "own",
        "after": "exported",
        "newer": ("global_step3", 3),
        "from shared storage": 1,
        "left": [],
    }
    for what, expected in _TOLD.items():
        assert expected in told.pop(what)
    assert not told


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


def _run_example_twice(rank: int, world_size: int) -> list[str]:
    _runs()
    example = import_upstream("examples.integrations.deepspeed_training")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for steps in (8, 16):
            example.main(str(node_store()), steps)
    return [line for line in printed.getvalue().splitlines() if line.startswith("trained")]


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(node_dirs: Dirs) -> None:
    printed = run_ranks(
        *(_run_example_twice, 2), store_per_node=node_dirs(1), timeout_s=_LONGEST_S, env=_ENV
    )

    assert printed == [["trained from step 0 to step 8", "trained from step 7 to step 16"]] * 2
