"""Ray Train's own ``TorchTrainer`` goes on bit for bit where it lost a worker, or a node."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.managers.jobs import Dirs
from tests.ranks import run_ranks
from tests.upstream.environment import UPSTREAM, import_upstream, needs

pytestmark = [pytest.mark.framework, needs("ray")]

# What a cluster takes to start, and to start workers anew, on a very busy machine is within it.
_LONGEST_S = 500.0
_STEPS = 16
_VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(UPSTREAM)]),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # One process less for each start of the workers.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}


def _call(rank: int, world_size: int, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(import_upstream("tests.integrations.ray_runs"), name)(*arguments, **options)


def _lose_a_node(rank: int, world_size: int, stores: list[Path], directory: Path) -> Any:
    with _call(rank, world_size, "start_cluster", stores, 2) as cluster:
        return _call(rank, world_size, "lose_a_node", cluster, directory, _STEPS)


def _fit_whole(rank: int, world_size: int, directory: Path) -> None:
    _call(rank, world_size, "fit", "whole", directory, workers=0, steps=_STEPS)


def _run_locally(fn: Callable[..., Any], ranks: int, *args: Any, store: Path) -> list[Any]:
    """Run in Ray Train's local mode, with the ranks as its workers."""
    options: dict[str, Any] = {"init_group": False, "timeout_s": _LONGEST_S, "env": _VARIABLES}
    return run_ranks(fn, ranks, *args, store_per_node=[store], **options)


def _attempts(notes: Path, rank: int) -> list[list[str]]:
    """What each attempt of a rank has noted, line by line, without those that noted nothing."""
    files = sorted(notes.glob(f"{rank}-*"), key=lambda path: int(path.name.split("-")[1]))
    return [lines for file in files if (lines := file.read_text().splitlines())]


# Starting two nodes of Ray and their workers twice takes longer than all other tests of the file.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_goes_on_bit_for_bit_after_the_loss_of_a_node(
    tmp_path: Path, node_dirs: Dirs
) -> None:
    _run_locally(_fit_whole, 2, tmp_path, store=tmp_path / "store")

    (told,) = run_ranks(
        *(_lose_a_node, 1, node_dirs(2), tmp_path),
        init_group=False,
        # The first worker of Ray Train hosts the store of its job, other than a rank of a test.
        env=_VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        timeout_s=_LONGEST_S,
    )

    assert told["metrics"]["last"] == 15
    assert told["kept"][-1] == 15
    assert len(told["kept"]) == 2
    assert told["newest"].items() >= {"session_id": "faulty", "step": 15, "world_size": 2}.items()
    for rank in (0, 1):
        (whole,) = _attempts(tmp_path / "whole", rank)
        attempts = _attempts(tmp_path / "faulty", rank)
        began = [whole.index(noted[0]) for noted in attempts]
        assert len(began) > 1
        assert began[-1] > 0
        for first, noted in zip(began, attempts, strict=True):
            assert noted == whole[first:][: len(noted)]
        assert attempts[-1][-1] == whole[-1]


def test_wrong_use_and_a_run_of_which_nothing_is_left_are_errors(tmp_path: Path) -> None:
    ((outside, relative, lost, other_run),) = _run_locally(
        *(_call, 1, "refuse", tmp_path), store=tmp_path / "node"
    )

    assert "Elsewhere use localckpt.Checkpointer" in outside
    assert "local='relative' is not absolute" in relative
    assert lost.startswith("NoReplicasAvailableError: Ray Train was told of a checkpoint of step 7")
    assert other_run == "resumed at step 0"


@pytest.mark.example
def test_the_example_resumes(tmp_path: Path) -> None:
    (printed,) = _run_locally(_call, 1, "run_example", tmp_path, 0, store=tmp_path)

    assert printed == ["trained step 0 to step 7", "trained step 8 to step 15"]
