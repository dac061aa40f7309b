"""Loops with Accelerate go on bit for bit where they were killed, or stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.trainings import (
    Jobs,
    Run,
    assert_resumed,
    assert_stopped,
    example,
    leave_out,
    run_example,
)
from tests.managers.jobs import error_of
from tests.ranks import node_store
from tests.upstream.environment import import_upstream, needs

pytestmark = [pytest.mark.framework, needs("accelerate", "torchdata")]

_COUNTS = "adjust_state_dict_for_prefetch"
_STATEFUL = {"use_stateful_dataloader": True}
# How data is loaded, the step of the kill, and how many steps are before what comes next. An epoch
# has 7 steps of 2 batches, the last one of a single batch.
_KINDS: dict[str, tuple[dict[str, bool], int, int]] = {
    "batches left out": ({}, 5, 3),
    "batches dispatched": ({"dispatch_batches": True}, 5, 3),
    "stateful, sharded": (_STATEFUL | {"use_seedable_sampler": True}, 9, 7),
    "stateful": (_STATEFUL, 5, 3),
}


def _train(run: Run, is_sharded: bool, loading: dict[str, bool]) -> None:
    train = example("accelerate_training", 2, **loading)
    accelerator = import_upstream("accelerate").Accelerator
    prepare_model = accelerator.prepare_model

    def prepare_sharded(self: Any, model: torch.nn.Module) -> Any:
        # Accelerate leaves its plugin for FSDP out where ranks have no accelerators.
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
        return prepare_model(self, model, evaluation_mode=True)

    if is_sharded:
        accelerator.prepare_model = prepare_sharded
    train(run)


def _counts_are_right() -> bool:
    """Whether this release notes the position of stateful loaders on several ranks as it is."""
    return _COUNTS in vars(import_upstream("accelerate.data_loader").DataLoaderShard)


def _miscounted(rank: int, world_size: int) -> str:
    """Begin a loop with a stateful loader of an older release; the error that this raises."""
    if _counts_are_right():
        delattr(import_upstream("accelerate.data_loader").DataLoaderShard, _COUNTS)
    run = Run(rank, world_size, node_store() / "miscounted")
    return error_of(partial(example("accelerate_training", 1, **_STATEFUL), run))


def _wrong_uses(rank: int, world_size: int) -> list[str]:
    """Errors of loops over what was not prepared."""
    plug_in = import_upstream("localckpt.integrations.accelerate")
    accelerator = import_upstream("accelerate").Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)))
    with plug_in.LocalCheckpoints(accelerator, local=node_store()) as checkpoints:
        uses = checkpoints.epochs(1), checkpoints.batches(loader)
        return [error_of(partial(next, use)) for use in uses]


def run_jobs() -> dict[str, Any]:
    leave_out()
    jobs = Jobs()
    told: dict[str, Any] = {
        kind: jobs.killed(
            kind, partial(_train, is_sharded="sharded" in kind, loading=loading), kill_at
        )
        for kind, (loading, kill_at, _) in _KINDS.items()
        if "stateful" not in kind or _counts_are_right()
    }
    told["stopped"] = jobs.stopped(example("accelerate_training", 2), 1)
    told["miscounted"] = jobs.run(_miscounted, 2)
    told["wrong uses"] = jobs.run(_wrong_uses, 1)
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

    assert printed == ["trained up to step 7", "trained up to step 14"]
