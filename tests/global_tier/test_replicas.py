"""What the ranks' images have in common is planned once, and what differs for the first rank."""

from __future__ import annotations

from collections import Counter

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
from localckpt.global_tier.drain_items import fingerprint, merge_plans
from localckpt.global_tier.metadata import RankPlan
from localckpt.state_dict.boxes import RankSet

_KEYS = ("a", "b", "c.d", "e")


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
