"""Overlaps of a tensor's saved and wanted chunks, when it is loaded in another sharding.

torch's own search sorts the chunks along the dimension of the largest extent, so it compares all
with all where they divide another one, such as the rows of a matrix that is wider than high.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from localckpt.state_dict.overlaps import overlapping_pairs

__all__ = ["create_read_items_for_chunk_list"]


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Plan the reads that fill the chunks that this rank wants of a tensor.

    It gives the items that torch's function of this name gives, but in another order, and none of
    no elements.

    Args:
        fqn: The tensor's name in the state dict.
        checkpoint_md: The tensor as it was saved.
        local_chunks: The parts of the tensor that are wanted.

    Returns:
        An item for each wanted and saved chunk that overlap, ordered by the wanted, then the saved.
    """
    saved_chunks = checkpoint_md.chunks

    # The items of a chunk share these: of many objects the garbage collector takes the most time.
    @cache
    def wanted_index(w: int) -> MetadataIndex:
        return MetadataIndex(fqn, local_chunks[w].offsets, w)

    @cache
    def saved_index(s: int) -> MetadataIndex:
        return MetadataIndex(fqn, saved_chunks[s].offsets, s)

    items = []
    for w, s in overlapping_pairs(local_chunks, saved_chunks):
        in_wanted, in_saved, lengths = _intersection(local_chunks[w], saved_chunks[s])
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=wanted_index(w),
                dest_offsets=in_wanted,
                storage_index=saved_index(s),
                storage_offsets=in_saved,
                lengths=lengths,
            )
        )
    return items


def _intersection(
    wanted: ChunkStorageMetadata, saved: ChunkStorageMetadata
) -> tuple[torch.Size, torch.Size, torch.Size]:
    """Its offsets in either chunk, and its lengths."""
    in_wanted, in_saved, lengths = [], [], []
    for a, a_size, b, b_size in zip(
        wanted.offsets, wanted.sizes, saved.offsets, saved.sizes, strict=True
    ):
        start = max(a, b)
        in_wanted.append(start - a)
        in_saved.append(start - b)
        lengths.append(min(a + a_size, b + b_size) - start)
    return torch.Size(in_wanted), torch.Size(in_saved), torch.Size(lengths)
