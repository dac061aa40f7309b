"""Plans as ranks send them to each other: what a rank packs, and nothing else."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from localckpt.availability.divergence import compare_replicas
from localckpt.errors import CheckpointingException, MismatchError, UnsafeGlobalError
from localckpt.global_tier.metadata import RankPlan, StoragePrefix, pack, unpack
from localckpt.global_tier.save_plan import (
    MOST_COMPARED,
    _device_digest,
    judge_differing,
)
from localckpt.state_dict.safe_globals import SafeGlobals

_ALLOWED = SafeGlobals()


def _plan() -> SavePlan:
    planner = DefaultSavePlanner()
    state = {"w": torch.ones(4, 5), "nested": {"b": [torch.ones(2, dtype=torch.bfloat16), 1, "x"]}}
    planner.set_up_planner(state, None, True)
    local = planner.create_local_plan()
    (plan,), _ = planner.create_global_plan([local])
    return plan


def test_a_value_that_differs_on_all_ranks_hides_none_that_differs_on_one() -> None:
    count = MOST_COMPARED + 2
    for ranks, left in ((9, ""), (count, f"ranks {count - 2} and {count - 1} differ too")):
        reports = [[(0, 100 + rank)] for rank in range(ranks)]
        divergence = compare_replicas(reports, MOST_COMPARED, MOST_COMPARED)
        assert divergence is not None
        told = [["", {"0": {"rng": str(r), "w": str(r == 8)}}] for r in range(ranks)]
        with pytest.raises(MismatchError) as raised:
            judge_differing(3, divergence, told)
        assert "; w (" in str(raised.value)
        assert left in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("first", range(1, 9))
def test_a_digest_made_on_a_device_is_of_the_values_wherever_they_begin(
    dtype: torch.dtype, first: int
) -> None:
    values = torch.arange(40).to(dtype)

    # A part of a flat buffer begins anywhere, and a copy at a whole word.
    found, expected = _device_digest(values[first:]), _device_digest(values[first:].clone())

    assert found == expected
    assert found != _device_digest(values[first - 1 : -1].clone())


class _Command:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("place", ["whole", "planner_data", "items"])
def test_a_command_is_not_run(place: str, tmp_path: Path) -> None:
    plan, command = _plan(), _Command(tmp_path / "ran")
    value: Any = command
    if place != "whole":
        object.__setattr__(plan, place, [command])
        value = plan

    with pytest.raises(UnsafeGlobalError, match="mkdir"):
        unpack(pickle.dumps(value), SavePlan, _ALLOWED)

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("prefix", ["../../.ssh/", "/etc/__0_", "__0_\0"])
def test_a_plan_names_no_files_outside_of_the_saves_folder(prefix: str) -> None:
    plan = _plan()
    object.__setattr__(plan, "storage_data", StoragePrefix(prefix))

    for value in (plan, (plan, {}), {0: plan}, {0: RankPlan(plan)}):
        with pytest.raises(MismatchError, match="files named"):
            unpack(pack(value), type(value), _ALLOWED)


@pytest.mark.parametrize("value", [[], {"items": []}, "plan", 1, None])
def test_what_is_no_plan_is_refused(value: Any) -> None:
    with pytest.raises(MismatchError, match="in place of a SavePlan"):
        unpack(pack(value), SavePlan, _ALLOWED)


def test_a_plan_that_is_damaged_anywhere_is_read_as_one_or_refused() -> None:
    packed = pack(_plan())

    for at in range(0, len(packed), 7):
        for damaged in (packed[:at], packed[:at] + b"\xff" + packed[at + 1 :]):
            try:
                read = unpack(damaged, SavePlan, _ALLOWED)
            except CheckpointingException:
                continue
            assert isinstance(read, SavePlan)
