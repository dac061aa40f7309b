"""Tensors of a captured image: views of them, and digests of those that other ranks have as well.

Each set of ranks has one digest, of the key, place, dtype, shape and bytes of each tensor that it
has in common, in the order of the keys: xxh3 without a seed, alike on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import xxhash

from localckpt.memory.tensor_bytes import flat_bytes, integer_view
from localckpt.state_dict.boxes import NO_BOXES, parse_boxes
from localckpt.state_dict.header import Skeleton
from localckpt.state_dict.layout import TensorSlot
from localckpt.state_dict.source import MemorySource, read_header
from localckpt.state_dict.tensor_table import (
    DTYPES,
    TableEntry,
    free_name,
    parse_entries,
)


class PartDigest(NamedTuple):
    """Digests of what a set of ranks has in common: one of all, and one of each tensor by key."""

    set_id: int
    digest: int
    tensors: dict[str, int]


def replica_digests(image: memoryview) -> list[PartDigest]:
    """Compute the digests of what a captured image has in common with other ranks.

    Sets of ranks that the image names are compared as they are. Megatron-Core names none: its keys
    are unique in a job, so ranks with the same boxes have the same tensors. They are compared by
    the kind of box (the first name in the key, and the dimensions that are whole), among the ranks
    that have all boxes of that kind in common.
    """
    header = read_header(MemorySource(image))
    identity = header.identity
    skeleton = Skeleton.split(bytes(image[header.skeleton_start : header.digests_start]))
    if identity.world_size < 2 or skeleton.boxes == NO_BOXES:
        return []
    entries = parse_entries(skeleton.table)
    shapes = [entry.shape for entry in entries]
    boxes = parse_boxes(skeleton.boxes, shapes, identity.rank, identity.world_size)
    parts: dict[tuple[str, bool], dict[str, int]] = {}
    for number, box in boxes.items():
        entry = entries[number]
        if entry.slot is None or not box.is_shared:
            continue
        slot = header.slots[entry.slot]
        start = header.data_start + slot.offset
        tensors = parts.setdefault((box.kind, box.ranks is None), {})
        name = box.key if all(box.wholes) else f"{box.key} {box.place}"
        tensors[free_name(name, tensors)] = _digest(entry, image[start : start + slot.nbytes])
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


def _digest(entry: TableEntry, content: memoryview) -> int:
    """Digest of a tensor's dtype, shape and values, whatever their order in the image."""
    hasher = xxhash.xxh3_64(f"{entry.dtype}{list(entry.shape)}".encode())
    if entry.view is None:
        hasher.update(content)
    elif len(content) and 0 not in entry.shape:
        offset, strides = entry.view
        reached = torch.frombuffer(content[offset : entry.reach_nbytes()], dtype=torch.uint8)
        items = integer_view(reached, entry.torch_dtype().itemsize)
        hasher.update(flat_bytes(items.as_strided(entry.shape, strides).contiguous()).numpy().data)
    return hasher.intdigest()


_CHUNK_NBYTES = 8 << 20


def tensor_views(image: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a captured image by name, in its memory; else they are bytes."""
    header = read_header(MemorySource(image))
    return {name: _view(image, header.data_start, slot) for name, slot in header.slots.items()}


def find_not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first tensor's name with a value that is infinite or no number, and this."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            flat = values.reshape(-1)
            for part in torch.split(flat, max(1, _CHUNK_NBYTES // flat.element_size())):
                if (found := _worst(part)) is not None:
                    return f"{name} has the value {found}"
    return None


def _view(image: memoryview, data_start: int, slot: TensorSlot) -> torch.Tensor:
    dtype, start = DTYPES[slot.dtype], data_start + slot.offset
    if not slot.nbytes:
        return torch.empty(slot.shape, dtype=dtype)
    return torch.frombuffer(image[start : start + slot.nbytes], dtype=dtype).view(slot.shape)


def _worst(part: torch.Tensor) -> float | None:
    """Return a value that is not finite; ``None`` if there is none."""
    if not part.numel():
        return None
    # torch has no minimum of numbers of a byte.
    values = part.float() if part.element_size() == 1 else part
    # One pass; where any value is no number, both are none.
    for bound in torch.aminmax(values):
        if not math.isfinite(value := bound.item()):
            return float(value)
    return None
