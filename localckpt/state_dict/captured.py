"""Tables of a captured image, whose digests may not be written yet."""

from __future__ import annotations

from typing import NamedTuple

from localckpt.state_dict.boxes import NO_BOXES, Box, parse_boxes
from localckpt.state_dict.header import ImageHeader
from localckpt.state_dict.identify import read_header
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.tensor_table import TableEntry, parse_entries

__all__ = ["CapturedTables", "read_tables"]


class CapturedTables(NamedTuple):
    """Header and tables of an image.

    Attributes:
        header: The header.
        entries: The tensors; none if no tensor has a box.
        boxes: By the number of the tensor the part of a global tensor that it is; none in a job of
            one rank.
    """

    header: ImageHeader
    entries: tuple[TableEntry, ...]
    boxes: dict[int, Box]


def read_tables(image: memoryview) -> CapturedTables:
    """Read the tables of an image in memory; its blocks are not verified.

    Raises:
        CorruptShardError: The image is damaged.
    """
    header = read_header(MemorySource(image))
    identity = header.identity
    framed = bytes(image[header.skeleton_start : header.digests_start])
    table, boxes_text, _, _ = header.format.split_skeleton(framed)
    if identity.world_size < 2 or boxes_text == NO_BOXES:
        return CapturedTables(header, (), {})
    entries = parse_entries(table)
    shapes = [entry.shape for entry in entries]
    boxes = parse_boxes(boxes_text, shapes, identity.rank, identity.world_size)
    return CapturedTables(header, entries, boxes)
