"""Plans: what ranks send of them to each other, and where the items of a rank lie in files."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from localckpt import CheckpointingException
from localckpt.availability.divergence import compare_replicas
from localckpt.errors import MismatchError, UnsafeGlobalError
from localckpt.global_tier.drain_items import merge_plans
from localckpt.global_tier.metadata import RankPlan, StoragePrefix, pack, unpack
from localckpt.global_tier.save_plan import MOST_COMPARED, _device_digest, judge_differing
from localckpt.global_tier.staging import FileLayout, frame_of, lay_out_files
from localckpt.state_dict.boxes import RankSet
from localckpt.state_dict.safe_globals import SafeGlobals
from tests.state_dict.states import Call

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


def test_a_digest_made_on_a_device_is_of_the_values_wherever_they_begin() -> None:
    for dtype, first in product((torch.bfloat16, torch.float32, torch.uint8), range(1, 9)):
        values = torch.arange(40).to(dtype)

        # A part of a flat buffer begins anywhere, and a copy at a whole word.
        found, expected = _device_digest(values[first:]), _device_digest(values[first:].clone())

        assert found == expected
        assert found != _device_digest(values[first - 1 : -1].clone())


def test_a_command_is_not_run_and_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    command = Call(os.mkdir, str(tmp_path / "ran"))
    for place in ("planner_data", "items", None):
        value: Any = _plan() if place else command
        if place:
            object.__setattr__(value, place, [command])

        with pytest.raises(UnsafeGlobalError, match="mkdir"):
            unpack(pickle.dumps(value), SavePlan, _ALLOWED)
    assert not (tmp_path / "ran").exists()
    for value in ([], {"items": []}, "plan", 1, None):
        with pytest.raises(MismatchError, match="in place of a SavePlan"):
            unpack(pack(value), SavePlan, _ALLOWED)


def test_a_plan_names_no_files_outside_of_the_saves_folder() -> None:
    plan = _plan()
    for prefix in ("../../.ssh/", "/etc/__0_", "__0_\0"):
        object.__setattr__(plan, "storage_data", StoragePrefix(prefix))

        for value in (plan, (plan, {}), {0: plan}, {0: RankPlan(plan)}):
            with pytest.raises(MismatchError, match="files named"):
                unpack(pack(value), type(value), _ALLOWED)


def _shard(offset: int, size: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([8]))
    index = MetadataIndex("w", torch.Size([offset]))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


@pytest.mark.parametrize(("second", "size"), [(3, 4), (5, 3)])
def test_parts_that_overlap_or_leave_gaps_are_refused(second: int, size: int) -> None:
    parts = [
        RankPlan(SavePlan([item], planner_data={}), {}, {item.index: RankSet.of([rank])})
        for rank, item in enumerate([_shard(0, 4), _shard(second, size)])
    ]

    # torch 2.8 does not name the key.
    with pytest.raises(MismatchError, match=r"do not make it up: (.*key:w|Failed to validate)"):
        merge_plans(parts)


PAGE_ALIGNED_NBYTES = 256 << 10
NAMES = st.sampled_from(["model", "model.a", "modest", "optimizer", "step", "a/b", ""])
DTYPE_LIST = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]
CHUNKS = st.one_of(
    st.lists(st.integers(0, 12), max_size=3),
    st.tuples(st.sampled_from([(256 << 10) - 1, 256 << 10, 1 << 21])).map(list),
)


def tensor_item(name: str, chunk: Sequence[int], dtype: torch.dtype = torch.float32) -> WriteItem:
    offsets = torch.Size([0] * len(chunk))
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size(chunk)),
            TensorProperties(dtype=dtype),
            torch.Size(2 * size for size in chunk),
        ),
    )


def lay_out(items: list[WriteItem], bins: int, hint: str | None = None) -> tuple[FileLayout, ...]:
    plan = SavePlan(items)
    others = {number for number, item in enumerate(items) if item.tensor_data is None}
    return lay_out_files(plan, others, prefix="__3_", bins=bins, separation_hint=hint)


@st.composite
def items_of_a_rank(draw: st.DrawFn) -> list[WriteItem]:
    tensors = draw(st.lists(st.tuples(NAMES, CHUNKS, st.sampled_from(DTYPE_LIST)), max_size=24))
    objects = draw(st.lists(NAMES, max_size=12))
    # Names need not differ: chunks of one tensor have the same.
    items = [tensor_item(*one) for one in tensors]
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]
    return draw(st.permutations(items))


@settings(max_examples=100, deadline=None)
@given(items_of_a_rank(), st.integers(1, 5), st.sampled_from([None, "model", "x"]))
def test_every_item_has_one_place_of_its_own_with_its_values_aligned(
    items: list[WriteItem], bins: int, hint: str | None
) -> None:
    files = lay_out(items, bins, hint)

    placed = [slot.number for file in files for slot in file.slots]
    others = [number for file in files for number in file.others]
    assert sorted(placed + others) == list(range(len(items)))
    assert all(items[number].type == WriteItemType.BYTE_IO for number in others)
    assert len({file.name for file in files}) == len(files)
    for file in files:
        assert file.slots or file.others
        assert all(one.end <= other.offset for one, other in pairwise(file.slots))
        assert file.nbytes == (file.slots[-1].end if file.slots else 0)
        for slot in file.slots:
            assert slot.offset >= 0
            assert slot.data == slot.offset + len(slot.frame.head)
            assert slot.end == slot.data + slot.nbytes + len(slot.frame.tail)
            data = items[slot.number].tensor_data
            assert data is not None
            assert slot.nbytes == math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
            assert slot.frame == frame_of(data.properties.dtype, data.chunk.sizes)
            assert slot.data % (4096 if slot.nbytes >= PAGE_ALIGNED_NBYTES else 64) == 0


@pytest.mark.parametrize("hint", ["../outside", ""])
def test_a_hint_that_cannot_begin_the_name_of_a_file_is_refused(hint: str) -> None:
    with pytest.raises(CheckpointingException, match="separation_hint"):
        lay_out([tensor_item("model/layers", [3])], 2, hint)
