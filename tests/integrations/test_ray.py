"""Ray Train's own ``TorchTrainer`` goes on bit for bit where it lost a worker, or a node."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localckpt import CheckpointingException
from tests.ranks import run_ranks
from tests.upstream.environment import UPSTREAM, import_upstream, needs

Dirs = Callable[[int], list[Path]]

pytestmark = [pytest.mark.framework, needs("ray")]

# What a cluster takes to start, and to start workers anew, on a very busy machine is within it.
_LONGEST_S = 500.0
_STEPS = 12
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


def _serve(
    rank: int, world_size: int, stores: list[Path], workers: int, name: str, *args: Any
) -> Any:
    """Call a function of the runs with a cluster."""
    start_cluster = import_upstream("tests.integrations.ray_cluster").start_cluster
    with start_cluster(stores, workers) as cluster:
        return _call(rank, world_size, name, cluster, *args)


def _run_in_cluster(
    name: str,
    *arguments: Any,
    stores: list[Path],
    workers: int = 1,
    timeout_s: float = _LONGEST_S,
) -> Any:
    """Call a function of the runs in the process of a cluster with these nodes."""
    (told,) = run_ranks(
        *(_serve, 1, stores, workers, name, *arguments),
        init_group=False,
        # The first worker of Ray Train hosts the store of its job, other than a rank of a test.
        env=_VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        timeout_s=timeout_s,
    )
    return told


def _attempts(notes: Path, rank: int) -> list[list[Any]]:
    """What each attempt of a rank has noted, line by line, without those that noted nothing."""
    files = sorted(notes.glob(f"{rank}-*"), key=lambda path: int(path.name.split("-")[1]))
    noted = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [lines for lines in noted if lines]


def _fit_locally(rank: int, world_size: int, directory: Path, steps: int) -> str:
    """Fit in Ray Train's local mode, with the ranks as its workers; the error that it raises."""
    try:
        _call(rank, world_size, "fit", "whole", directory, workers=0, steps=steps)
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _run_locally(fn: Callable[..., Any], ranks: int, *args: Any, stores: list[Path]) -> list[Any]:
    return run_ranks(
        *(fn, ranks, *args),
        init_group=False,
        store_per_node=stores,
        env=_VARIABLES,
        timeout_s=_LONGEST_S,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Notes of an undisturbed run of two workers, and the directory with its checkpoints."""
    directory = tmp_path_factory.mktemp("whole")
    store = directory / "store"
    assert _run_locally(_fit_locally, 2, directory, _STEPS, stores=[store]) == ["no error"] * 2
    return directory / "whole", store


def _assert_goes_on(whole: Path, faulty: Path, restarts: int) -> None:
    for rank in (0, 1):
        ((_, *losses),) = _attempts(whole, rank)
        attempts = _attempts(faulty, rank)
        began = [begin["first"] for begin, *_ in attempts]
        assert len(began) > restarts
        assert began[-1] > 0
        for first, (_, *noted) in zip(began, attempts, strict=True):
            assert noted == losses[first:][: len(noted)]
        assert attempts[-1][-1] == losses[-1]


# Starting two nodes of Ray and their workers twice takes longer than all other tests of the file.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_goes_on_bit_for_bit_after_the_loss_of_a_node(
    whole: tuple[Path, Path], tmp_path: Path, node_dirs: Dirs
) -> None:
    notes, _ = whole

    told = _run_in_cluster("lose_a_node", tmp_path, _STEPS, stores=node_dirs(2), workers=2)

    assert told["metrics"] == {"step": 11}
    assert told["kept"][-1] == 11
    assert len(told["kept"]) == 2
    assert told["newest"].items() >= {"session_id": "faulty", "step": 11, "world_size": 2}.items()
    _assert_goes_on(notes, tmp_path / "faulty", restarts=1)


def test_wrong_use_and_a_run_of_which_nothing_is_left_are_errors(
    tmp_path: Path, node_dirs: Dirs
) -> None:
    ((outside, relative, lost, other_run),) = _run_locally(
        *(_call, 1, "refuse", tmp_path), stores=node_dirs(1)
    )

    assert "Elsewhere use localckpt.Checkpointer" in outside
    assert "local='relative' is not absolute" in relative
    assert lost.startswith("NoReplicasAvailableError: Ray Train was told of a checkpoint of step 7")
    assert other_run == "resumed at step 0"


@pytest.mark.example
def test_the_example_resumes(node_dirs: Dirs) -> None:
    (store,) = node_dirs(1)

    (printed,) = _run_locally(_call, 1, "run_example", store, 0, stores=[store])

    assert printed == ["trained step 0 to step 7", "trained step 8 to step 15"]
