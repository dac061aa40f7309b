"""What the ranks' images have in common is planned once, and what differs for the first rank."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from localckpt import MismatchError
from localckpt.global_tier.drain_items import _chunks, fingerprint, merge_plans
from localckpt.global_tier.metadata import RankPlan
from localckpt.global_tier.staging import FILE_NBYTES, lay_out_in_order
from localckpt.memory.tensor_bytes import narrowed
from localckpt.state_dict.boxes import Box, RankSet, Run
from localckpt.state_dict.global_view import shard_runs

_KEYS = ("a", "b", "c.d", "e")


class _Strided:
    """A placement of a mesh, sharding by strides."""

    def __init__(self, dim: int, split_factor: int) -> None:
        self.dim, self.split_factor = dim, split_factor

    def is_replicate(self) -> bool:
        return False


@given(st.data())
def test_the_chunks_of_a_box_are_its_items_and_nothing_else(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2))
    mesh = tuple(data.draw(st.integers(1, 3)) for _ in dims)
    at = tuple(data.draw(st.integers(0, size - 1)) for size in mesh)
    placements = [_Strided(dim, data.draw(st.integers(1, 3))) for dim in dims]
    runs = shard_runs(shape, mesh, at, placements)
    assert runs is not None
    whole = torch.arange(1, 1 + prod(shape)).reshape(shape)
    local = _local(whole, runs)

    found = torch.zeros(shape, dtype=torch.int64)
    for (offsets, sizes), part in _chunks(Box("w", shape, runs, None)):
        piece = local if part is None else narrowed(local, *part)
        assert piece.shape == sizes
        place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert not found[place].any()
        found[place] = piece

    expected = torch.zeros(shape, dtype=torch.int64)
    index = torch.meshgrid(
        *(torch.tensor(_indices(r), dtype=torch.int64) for r in runs), indexing="ij"
    )
    expected[index] = whole[index]
    assert torch.equal(found, expected)


def _indices(runs: tuple[Run, ...]) -> list[int]:
    return [i for start, count in runs for i in range(start, start + count)]


def _local(whole: torch.Tensor, runs: tuple[tuple[Run, ...], ...]) -> torch.Tensor:
    for dim, along in enumerate(runs):
        whole = whole.index_select(dim, torch.tensor(_indices(along), dtype=torch.int64))
    return whole


def _plain(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


def _shard(key: str, offset: int, size: int, total: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([total]))
    index = MetadataIndex(key, torch.Size([offset]))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


@given(st.lists(st.dictionaries(st.sampled_from(_KEYS), st.integers(0, 1)), min_size=1, max_size=5))
def test_equal_values_are_planned_once_and_others_as_the_first_rank_has_them(
    values: list[dict[str, int]],
) -> None:
    parts = [
        RankPlan(
            SavePlan([_plain(key) for key in mine], planner_data={key: (key,) for key in mine}),
            {MetadataIndex(key): f"{value}" for key, value in mine.items()},
        )
        for mine in values
    ]

    merged = merge_plans(parts)

    planned = Counter(item.index.fqn for plan in merged.plans for item in plan.items)
    expected = Counter[str]()
    for key in {key for mine in values for key in mine}:
        held = {rank: mine[key] for rank, mine in enumerate(values) if key in mine}
        expected[key] += 1
        if len(set(held.values())) > 1:
            assert key in merged.unequal
            first = merged.plans[min(held)]
            assert key in {item.index.fqn for item in first.items}
    assert planned == expected
    assert merged.metadata.state_dict_metadata.keys() == planned.keys()
    assert merged.metadata.planner_data.keys() == planned.keys()
    assert fingerprint(merged) == fingerprint(merge_plans(parts))


def test_parts_that_several_ranks_have_alike_are_spread_over_them() -> None:
    everywhere = RankSet.of(range(4))
    parts = []
    for _ in range(4):
        items = [_shard("w", 10 * n, 10, 80) for n in range(8)]
        parts.append(
            RankPlan(SavePlan(items, planner_data={}), {}, {i.index: everywhere for i in items})
        )

    merged = merge_plans(parts)

    assert [len(plan.items) for plan in merged.plans] == [2, 2, 2, 2]


def test_parts_of_one_name_that_are_not_said_to_be_equal_are_compared_between_the_sets() -> None:
    item = _shard("w", 0, 4, 4)
    pairs = [RankSet.of([0, 2]), RankSet.of([1, 3])]

    def parts(*digests: str) -> list[RankPlan]:
        told = [{item.index: digest} for digest in digests] or [{}] * 4
        return [
            RankPlan(SavePlan([item], planner_data={}), dict(told[r]), {item.index: pairs[r % 2]})
            for r in range(4)
        ]

    assert len(merge_plans(parts(*"1111")).metadata.state_dict_metadata) == 1
    for those in (parts(), parts(*"1212")):
        with pytest.raises(MismatchError, match=r"w at \[0\] is on ranks 0 and 1"):
            merge_plans(those)
    # Within a set they are said to be equal. If they are not, the image of each rank has its own.
    assert merge_plans(parts(*"1122")).unequal == ["w"]


@pytest.mark.parametrize("second", [3, 5])
def test_parts_that_overlap_or_leave_gaps_are_refused(second: int) -> None:
    items = [_shard("w", 0, 4, 8), _shard("w", second, 4 if second == 3 else 3, 8)]
    parts = [
        RankPlan(SavePlan([item], planner_data={}), {}, {item.index: RankSet.of([rank])})
        for rank, item in enumerate(items)
    ]

    # torch 2.8 does not name the key.
    with pytest.raises(MismatchError, match=r"do not make it up: (.*key:w|Failed to validate)"):
        merge_plans(parts)


def test_a_value_under_the_key_of_a_global_tensor_takes_no_part_of_it() -> None:
    item = _shard("w", 0, 4, 4)
    parts = [
        RankPlan(SavePlan([_plain("w")], planner_data={"w": ("w",)}), {MetadataIndex("w"): "1"}),
        RankPlan(SavePlan([item], planner_data={}), {}, {item.index: RankSet.of([1])}),
    ]

    merged = merge_plans(parts)

    named = [[item.index.fqn for item in plan.items] for plan in merged.plans]
    assert named == [[], ["w"]]
    assert merged.unequal == ["w"]


def test_files_end_at_their_size_and_follow_the_image() -> None:
    size = FILE_NBYTES // 16
    items = [_shard(f"{n}", 0, size, size) for n in range(10)] + [_plain("text")]
    plan = SavePlan(items, planner_data={})

    files = lay_out_in_order(plan, {n: 100 - n for n in range(10)}, "__3_")

    assert [file.name for file in files] == [f"__3_{n}.distcp" for n in range(4)]
    numbers = [[slot.number for slot in file.slots] for file in files]
    assert numbers == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0], []]
    assert files[3].others == (10,)
