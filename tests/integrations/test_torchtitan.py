"""torchtitan's own trainer goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils._pytree import tree_leaves

from tests.integrations.trainings import Jobs, Run, assert_resumed, assert_stopped
from tests.ranks import node_store, run_ranks
from tests.upstream.environment import import_upstream, needs

# All jobs of this file are run by its first test.
LONGEST_S = 560.0

pytestmark = [
    pytest.mark.framework,
    needs("torchtitan", "torchdata", "datasets", "spmd_types", "tyro", "tensorboard"),
    pytest.mark.timeout(600),
]


def _torchtitan() -> Any:
    warnings.simplefilter("ignore")
    import_upstream("examples.integrations.torchtitan_on_cpu").prepare()
    return import_upstream("tests.integrations.torchtitan_runs")


def run_jobs() -> dict[str, Any]:
    runs, jobs = _torchtitan(), Jobs()

    def start(name: str, *options: str, config: str = "both", **told: Any) -> Any:
        """What a job of one process has noted."""

        def train(rank: int, world_size: int) -> list[str]:
            run = Run(rank, world_size, node_store() / name / "node", **told)
            runs.train_as_told(run, *options, config=config)
            return run.noted

        return jobs.run(train, 1)[0]

    def up_to(last: int) -> tuple[str, str]:
        return "--training.steps", f"{last}"

    def train(run: Run) -> None:
        runs.train_as_told(run, *up_to(14))

    own = node_store() / "one" / "titan" / "checkpoint"
    again = partial(start, "one", is_new=False)
    told: dict[str, Any] = {
        "two ranks": jobs.killed("two", train, 3),
        "stopped": jobs.stopped(train, 3),
        "whole": start("whole", *up_to(9)),
        "killed": start("one", *up_to(9), end_at="6"),
        "resumed": again(*up_to(9), "--checkpoint.async-mode", "async"),
        "own": sorted(path.name for path in own.iterdir()),
        "back": again(*up_to(5), "--checkpoint.load-step", "4"),
    }
    for newer in ("step-8", "step-9"):
        shutil.rmtree(own / newer)
    told["after"] = again(*up_to(7))
    told["data"] = runs.kept_data(node_store() / "one" / "node")
    for lost in ("node 0", "node 1", "titan/checkpoint/step-14"):
        shutil.rmtree(node_store() / "two" / lost)
    told["without nodes"] = jobs.start("two", train, 2, is_new=False)
    named = {"local": f"{node_store()}/named", "local_interval": 1, "finite": True}
    flag = f"localckpt.integrations.torchtitan.local_checkpoint={json.dumps(named)}"
    by_flag = partial(start, "plain", "--override.imports", flag, config="plain")
    told["by flag"] = [by_flag(*up_to(3)), by_flag(*up_to(5))]
    told["refused"] = runs.refusals(f"{node_store()}/unused")
    return told


def test_two_ranks_go_on_bit_for_bit_after_a_kill_and_stop_on_a_signal(
    outcomes: dict[str, Any],
) -> None:
    assert_resumed(outcomes["two ranks"], first=3)
    assert_stopped(outcomes["two ranks"][0], outcomes["stopped"])


def test_two_ranks_without_their_nodes_go_on_from_torchtitans_own(outcomes: dict[str, Any]) -> None:
    for whole, alone in zip(outcomes["two ranks"][0], outcomes["without nodes"], strict=True):
        # torchtitan's own checkpoints have no random numbers, which stand last.
        lines = [line.rpartition(" ")[0] for line in alone.noted]
        assert lines == [line.rpartition(" ")[0] for line in whole.noted[12:]]


def test_one_process_goes_on_and_goes_back(outcomes: dict[str, Any]) -> None:
    assert outcomes["resumed"] == outcomes["whole"][5:]
    assert outcomes["own"] == ["step-4", "step-8", "step-9"]
    # The node has step 9, too, which was given up.
    assert [len(outcomes[start]) for start in ("back", "after")] == [1, 2]


def test_a_flag_switches_a_job_over_and_saves_nothing_of_torchtitans_own(
    outcomes: dict[str, Any],
) -> None:
    assert [len(noted) for noted in outcomes["by flag"]] == [3, 2]


def test_what_torchtitan_pickles_is_saved_as_plain_values(outcomes: dict[str, Any]) -> None:
    assert outcomes["data"]["packed"]["dp_rank_0"]["_num_yielded"] == 7
    assert not any(isinstance(leaf, bytes) for leaf in tree_leaves(outcomes["data"]))


def test_what_makes_no_sense_is_refused(outcomes: dict[str, Any]) -> None:
    told = ["needs checkpoint.local", "shared", "evry", "was changed"]
    assert all(words in error for words, error in zip(told, outcomes["refused"], strict=True))


def _run_example_twice(rank: int, world_size: int) -> list[list[int]]:
    by_example, jobs = _torchtitan().train_by_example, Jobs()
    return [jobs.run(by_example, 2, node_store() / "node", last) for last in (3, 6)]


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    (steps,) = run_ranks(
        *(_run_example_twice, 1), store_per_node=[tmp_path], init_group=False, timeout_s=LONGEST_S
    )

    assert steps == [[3, 3], [3, 3]]
