"""Lightning's own ``Trainer`` goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import announce, node_store, run_ranks, start_ranks
from tests.upstream.environment import import_upstream, needs

Dirs = Callable[[int], list[Path]]
_Run = tuple[list[str], list[int]]

pytestmark = [pytest.mark.framework, needs("lightning")]

# What Lightning takes to be imported on a busy machine is within it.
_LONGEST_S = 150.0


def _fit(*args: Any, **kwargs: Any) -> _Run:
    run: _Run = import_upstream("tests.integrations.lightning_runs").fit(*args, **kwargs)
    return run


def _fit_and_be_killed(
    rank: int, world_size: int, every: int, kill_at: int, options: dict[str, bool]
) -> None:
    whole = _fit(rank, world_size, node_store() / "whole", every, {}, **options)
    announce(f"whole {rank}", whole)
    _fit(rank, world_size, node_store() / "killed", every, {kill_at: signal.SIGKILL}, **options)


def _resume_and_be_stopped(
    rank: int, world_size: int, every: int, options: dict[str, bool]
) -> tuple[_Run, _Run, _Run]:
    goes_on = options | {"is_new": False}
    resumed = _fit(rank, world_size, node_store() / "killed", every, {}, **goes_on)
    # Only one rank receives the signal, and no cadence saves. The ranks have a few steps' time to
    # learn of it.
    end = {0: signal.SIGTERM} if rank == world_size - 1 else {}
    stopped = _fit(rank, world_size, node_store() / "stopped", 10**6, end, pause_s=0.3, **options)
    after_stop = _fit(rank, world_size, node_store() / "stopped", 10**6, {}, **goes_on)
    return resumed, stopped, after_stop


@pytest.mark.parametrize(
    ("world_size", "every", "kill_at", "resumed_at", "options"),
    [
        pytest.param(1, 7, 9, 7, {}, id="one-process-between-epochs", marks=pytest.mark.long),
        pytest.param(2, 3, 11, 9, {}, id="ddp-within-an-epoch", marks=pytest.mark.long),
        pytest.param(2, 3, 11, 9, {"is_sharded": True}, id="fsdp2-within-an-epoch"),
    ],
)
def test_a_run_goes_on_bit_for_bit_after_a_kill_and_after_a_signal(
    world_size: int,
    every: int,
    kill_at: int,
    resumed_at: int,
    options: dict[str, bool],
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(world_size)

    dies = (_fit_and_be_killed, world_size, every, kill_at, options)
    with start_ranks(*dies, store_per_node=nodes) as group:
        wholes = [group.await_announced(f"whole {rank}", _LONGEST_S) for rank in range(world_size)]
        group.join(_LONGEST_S, expect_dead=range(world_size))
    goes_on = (_resume_and_be_stopped, world_size, every, options)
    runs = run_ranks(*goes_on, store_per_node=nodes, timeout_s=_LONGEST_S)

    for whole, (resumed, stopped, after_stop) in zip(wholes, runs, strict=True):
        losses, at_end = whole
        assert resumed == (losses[resumed_at:], at_end)
        assert stopped[1][-1] == 1
        assert 0 < len(stopped[0]) < len(losses)
        assert stopped[0] == losses[: len(stopped[0])]
        assert after_stop == (losses[len(stopped[0]) :], at_end)


def _refuse_a_path(rank: int, world_size: int) -> str:
    return str(import_upstream("tests.integrations.lightning_runs").refuse_a_path(node_store()))


def test_a_path_to_begin_from_is_refused_beside_a_checkpoint_that_was_found(
    node_dirs: Dirs,
) -> None:
    (error,) = run_ranks(_refuse_a_path, 1, store_per_node=node_dirs(1), timeout_s=_LONGEST_S)

    assert "leave ckpt_path out to go on from the newest checkpoint" in error


def _run_example_twice(rank: int, world_size: int) -> list[str]:
    example = import_upstream("examples.integrations.lightning_training")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for epochs in (1, 2):
            example.main(str(node_store()), epochs)
    return [line for line in printed.getvalue().splitlines() if line.startswith("trained")]


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(node_dirs: Dirs) -> None:
    printed = run_ranks(
        *(_run_example_twice, 2),
        store_per_node=node_dirs(1),
        timeout_s=_LONGEST_S,
        # As under torchrun.
        env={"TORCHELASTIC_RUN_ID": "example"},
    )

    assert printed == [["trained up to step 8", "trained up to step 16"]] * 2
