"""torchtitan's own trainer goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils._pytree import tree_leaves

from tests.ranks import run_ranks
from tests.upstream.environment import import_upstream, needs

# All jobs of this file are run by its first test.
_LONGEST_S = 560.0

pytestmark = [
    pytest.mark.framework,
    needs("torchtitan", "torchdata", "datasets", "spmd_types", "tyro", "tensorboard"),
    pytest.mark.timeout(600),
]


@dataclass(frozen=True)
class _Told:
    """What the jobs have recorded, which one process has started after one another.

    Attributes:
        whole: Of an undisturbed job of two ranks.
        stopped: Of a job that is resumed after a kill, and stopped by a signal.
        rest: Of the same job, after its node was lost.
        alone: Of the starts of a job of one process: killed, resumed, sent back, and resumed.
        own: torchtitan's own checkpoints of that job.
        by_flag: Of two starts of a job with torchtitan's own manager, replaced by a flag.
        data: State of a data loader in a checkpoint of the node.
        refused: Errors.
    """

    whole: list[list[str]]
    stopped: list[list[str]]
    rest: list[list[str]]
    alone: list[list[str]]
    own: list[str]
    by_flag: list[list[str]]
    data: Any
    refused: list[str]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> _Told:
    folder = tmp_path_factory.mktemp("torchtitan")
    (answer,) = run_ranks(_run_all, 1, folder, init_group=False, timeout_s=_LONGEST_S)
    assert isinstance(answer, _Told)
    return answer


def _torchtitan() -> Any:
    warnings.simplefilter("ignore")
    import_upstream("examples.integrations.torchtitan_on_cpu").prepare()
    return import_upstream("tests.integrations.torchtitan_runs")


def _run_all(rank: int, world_size: int, folder: Path) -> _Told:
    runs = _torchtitan()
    steps, other_seed = ("--training.steps", "14"), ("--debug.seed", "5")

    whole = runs.Job(folder / "whole", 2).run(*steps)
    two = runs.Job(folder / "two", 2)
    two.run(*steps, "--end", "SIGKILL", "--end-at", "4")
    # Only one rank receives the signal. The ranks have a few steps' time to learn of it.
    end = ("--end", "SIGTERM", "--end-at", "4")
    stopped = two.run(*steps, *other_seed, "--pause-s", "0.4", last_rank=end)
    shutil.rmtree(two.local)
    rest = two.run(*steps, *other_seed)

    one = runs.Job(folder / "one", 1)
    alone = one.run("--training.steps", "9", "--end", "SIGKILL", "--end-at", "7")
    asynchronously = ("--checkpoint.async-mode", "async")
    alone += one.run("--training.steps", "9", *other_seed, *asynchronously)
    own = sorted(path.name for path in one.folder.rglob("step-*"))
    alone += one.run("--training.steps", "5", "--checkpoint.load-step", "4")
    for newer in ("step-8", "step-9"):
        shutil.rmtree(one.folder / "titan/checkpoint" / newer)
    alone += one.run("--training.steps", "7")

    named = json.dumps({"local": f"{folder}/named", "local_interval": 1, "finite": True})
    flag = f"localckpt.integrations.torchtitan.local_checkpoint={named}"
    plain = runs.Job(folder / "plain", 1, runs.train_plain)
    by_flag = plain.run("--override.imports", flag, "--training.steps", "3")
    by_flag += plain.run("--override.imports", flag, "--training.steps", "5")
    data, refused = runs.kept_data(one.local), runs.refusals(folder)
    return _Told(whole, stopped, rest, alone, own, by_flag, data, refused)


def test_two_ranks_go_on_bit_for_bit_after_a_kill_and_stop_on_a_signal(told: _Told) -> None:
    for whole, stopped in zip(told.whole, told.stopped, strict=True):
        assert 0 < len(stopped) < len(whole[3:])
        assert stopped == whole[3 : 3 + len(stopped)]


def test_one_process_goes_on_and_goes_back(told: _Told) -> None:
    killed, resumed, back, after = told.alone

    assert list(map(_step, killed)) == [1, 2, 3, 4, 5, 6, 7]
    assert list(map(_step, resumed)) == [6, 7, 8, 9]
    assert resumed[:2] == killed[5:]
    assert told.own == ["step-4", "step-8", "step-9"]
    # The node has step 9, too, which was given up.
    assert list(map(_step, back)) == [5]
    assert list(map(_step, after)) == [6, 7]


def test_a_flag_switches_a_job_over_and_saves_nothing_of_torchtitans_own(told: _Told) -> None:
    assert [list(map(_step, start)) for start in told.by_flag] == [[1, 2, 3], [4, 5]]


def test_what_torchtitan_pickles_is_saved_as_plain_values(told: _Told) -> None:
    assert told.data["packed"]["dp_rank_0"]["_num_yielded"] == 7
    assert not any(isinstance(leaf, bytes) for leaf in tree_leaves(told.data))


def _run_example_twice(rank: int, world_size: int, folder: Path) -> list[list[str]]:
    runs = _torchtitan()
    job = runs.Job(folder, 2, runs.run_example)
    return [job.first_steps("--training.steps", last) for last in ("3", "6")]


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    (first_steps,) = run_ranks(
        _run_example_twice, 1, tmp_path, init_group=False, timeout_s=_LONGEST_S
    )

    assert first_steps == [["1", "1"], ["4", "4"]]


def _step(record: str) -> int:
    return int(record.split()[0])
