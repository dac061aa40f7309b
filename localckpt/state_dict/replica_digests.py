"""Digests of the tensors of a captured image that other ranks of the job have as well.

A rank compares what it has with other ranks by one digest for each set of ranks: of the key, the
place, the dtype, the shape and the bytes of each tensor that the set has in common, in the order of
their keys. The places of tensors in an image, their order and their strides count for nothing. All
digests are xxh3 without a seed, so that they are alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import xxhash

from localckpt.memory.host_memory import memory_at
from localckpt.state_dict.boxes import Box
from localckpt.state_dict.captured import read_tables
from localckpt.state_dict.tensor_table import TableEntry

__all__ = ["PartDigest", "replica_digests"]

# torch copies no values of a dozen dtypes, and bytes are what is compared.
_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
# Values that do not lie in order are copied so many bytes at a time.
_PIECE_NBYTES = 4 << 20


class PartDigest(NamedTuple):
    """Digest of the part of a rank's state that a set of ranks has in common.

    Attributes:
        set_id: The set of ranks; the same number on all of them.
        digest: The digest of the part.
        tensors: The digest of each tensor of the part, by the key of the global tensor, followed by
            the place in it unless the tensor is all of it.
    """

    set_id: int
    digest: int
    tensors: dict[str, int]


def replica_digests(image: memoryview) -> list[PartDigest]:
    """Compute the digests of what a captured image has in common with other ranks.

    Sets of ranks that the image names are compared as they are. Megatron-Core names none: its keys
    are unique in a job, so ranks with the same boxes have the same tensors. They are compared by
    the kind of box (the first name in the key, and the dimensions that are whole), among the ranks
    that have all boxes of that kind in common.

    Args:
        image: A captured image.

    Raises:
        CorruptShardError: The image is damaged.
    """
    header, entries, boxes = read_tables(image)
    parts: dict[tuple[str, bool], dict[str, int]] = {}
    for number, box in boxes.items():
        entry = entries[number]
        if entry.slot is None or not box.is_shared:
            continue
        slot = header.slots[entry.slot]
        start = header.data_start + slot.offset
        tensors = parts.setdefault((box.kind, box.ranks is None), {})
        name = _free_name(box, tensors)
        tensors[name] = _digest(entry, image[start : start + slot.nbytes])
    return sorted(_part(kind, tensors, is_open) for (kind, is_open), tensors in parts.items())


def _part(kind: str, tensors: dict[str, int], is_open: bool) -> PartDigest:
    ordered = dict(sorted(tensors.items()))
    names = "\n".join(ordered)
    # Where the ranks are not known, only those with the same boxes are compared.
    set_id = xxhash.xxh3_64_intdigest((f"{kind}\n{names}" if is_open else kind).encode())
    whole = xxhash.xxh3_64(names.encode())
    for digest in ordered.values():
        whole.update(digest.to_bytes(8, "little"))
    return PartDigest(set_id, whole.intdigest(), ordered)


def _free_name(box: Box, taken: dict[str, int]) -> str:
    wanted = box.key if all(box.wholes) else f"{box.key} {box.place}"
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}#{count}"
    return name


def _digest(entry: TableEntry, content: memoryview) -> int:
    """Digest of a tensor's dtype, shape and values, whatever their order in the image."""
    hasher = xxhash.xxh3_64(f"{entry.dtype}{list(entry.shape)}".encode())
    if entry.view is None:
        hasher.update(content)
    elif len(content) and 0 not in entry.shape:
        offset, strides = entry.view
        dtype = _INTEGERS[entry.torch_dtype().itemsize]
        items = torch.frombuffer(content, dtype=torch.uint8)
        first = items[offset : entry.reach_nbytes()].view(dtype)
        for piece in _pieces(first.as_strided(entry.shape, strides)):
            hasher.update(memory_at(piece.data_ptr(), piece.numel() * piece.itemsize))
    return hasher.intdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values of a tensor in order, as contiguous tensors of a limited size."""
    if tensor.dim() == 0 or tensor.numel() * tensor.itemsize <= _PIECE_NBYTES:
        yield tensor.contiguous()
        return
    row_nbytes = tensor[0].numel() * tensor.itemsize
    rows = max(1, _PIECE_NBYTES // row_nbytes)
    for first in range(0, len(tensor), rows):
        part = tensor[first : first + rows]
        yield from _pieces(part[0] if row_nbytes > _PIECE_NBYTES else part)
