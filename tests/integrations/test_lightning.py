"""Lightning's own ``Trainer`` goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.trainings import (
    Jobs,
    Run,
    assert_resumed,
    assert_stopped,
    example,
    run_example,
)
from tests.managers.jobs import error_of
from tests.ranks import node_store
from tests.upstream.environment import import_upstream, needs

pytestmark = [pytest.mark.framework, needs("lightning"), pytest.mark.timeout(400)]

LONGEST_S = 300.0
# As under torchrun.
_ENVIRONMENT = {"TORCHELASTIC_RUN_ID": "example"}
# Ranks, the step of the kill, and how many steps are before what comes next. An epoch has 15 steps
# on one rank, and 8 on each of two.
_KINDS = {
    "fsdp2 within an epoch": (2, 7, 5),
    "ddp within an epoch": (2, 7, 5),
    "ddp within the second epoch": (2, 11, 10),
    "one process within an epoch": (1, 7, 5),
    "one process between epochs": (1, 17, 15),
}


def _train(run: Run, kind: str) -> None:
    strategies = import_upstream("lightning.pytorch.strategies")
    strategy: Any = "auto"
    if kind.startswith("fsdp2"):
        strategy = strategies.ModelParallelStrategy(run.world_size, tensor_parallel_size=1)
    elif kind.startswith("ddp"):
        # Without the option DDP rounds the first step of a process in another way.
        strategy = strategies.DDPStrategy(find_unused_parameters=True)
    example("lightning_training", 2, strategy)(run)


def _refuse_a_path(rank: int, world_size: int) -> str:
    """Fit twice, the second time from a file of Lightning's; the error that this raises."""
    lightning = import_upstream("lightning.pytorch")
    plug_in = import_upstream("localckpt.integrations.lightning")
    program = import_upstream("examples.integrations.lightning_training")
    local = node_store() / "refused"
    data = DataLoader(TensorDataset(torch.ones(4, 8)), batch_size=2)

    def trainer() -> Any:
        checkpoints = plug_in.LocalCheckpoint(local=local, every=1)
        names = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
        return lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            callbacks=[checkpoints],
            **dict.fromkeys(names, False),
        )

    first = trainer()
    first.fit(program.Regression(), data)
    first.save_checkpoint(local / "lightning.ckpt")
    path = local / "lightning.ckpt"
    return error_of(lambda: trainer().fit(program.Regression(), data, ckpt_path=path))


def run_jobs() -> dict[str, Any]:
    os.environ |= _ENVIRONMENT
    jobs = Jobs()
    import_upstream("examples.integrations.lightning_training")
    told: dict[str, Any] = {
        kind: jobs.killed(kind, partial(_train, kind=kind), kill_at, ranks)
        for kind, (ranks, kill_at, _) in _KINDS.items()
    }
    told["stopped"] = jobs.stopped(partial(_train, kind="fsdp2"), 0)
    told["refused"] = jobs.run(_refuse_a_path, 1)
    return told


@pytest.mark.parametrize("kind", _KINDS)
def test_a_run_goes_on_bit_for_bit_after_a_kill(kind: str, outcomes: dict[str, Any]) -> None:
    assert_resumed(outcomes[kind], first=_KINDS[kind][-1])


def test_a_signal_on_one_rank_stops_all_after_the_same_step(outcomes: dict[str, Any]) -> None:
    assert_stopped(outcomes["fsdp2 within an epoch"][0], outcomes["stopped"])


def test_a_path_to_begin_from_is_refused_beside_a_checkpoint_that_was_found(
    outcomes: dict[str, Any],
) -> None:
    (error,) = outcomes["refused"]

    assert "leave ckpt_path out to go on from the newest checkpoint" in error


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    printed = run_example("lightning_training", tmp_path, [1, 2], env=_ENVIRONMENT)

    assert printed == ["trained up to step 8", "trained up to step 16"]
