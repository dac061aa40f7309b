"""The file of a shard taken apart: where each part lies, and parts changed and sealed again."""

from __future__ import annotations

import dataclasses
import json
from itertools import accumulate, pairwise
from typing import Any

from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher
from localckpt.state_dict.header import FORMAT_VERSION, NO_PARTS, Skeleton

__all__ = ["Parts", "blocks_of", "flip", "identity_in", "regions", "sealed"]

_DIGEST_NBYTES = 8
_PAGE_NBYTES = 4096


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an image is made of; :meth:`image` puts it together, whatever has been changed."""

    identity: ShardIdentity
    # Name to dtype, shape and bytes, in the order of the data.
    slots: dict[str, tuple[str, list[int], bytes]]
    table: bytes
    boxes: bytes
    pickled: bytes

    @classmethod
    def of(cls, image: bytes) -> Parts:
        start, entries = _header(image)
        metadata = entries.pop("__metadata__")
        slots = {}
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            slots[name] = (entry["dtype"], entry["shape"], image[start + begin : start + end])
        framed = slots.pop("__skeleton__")[2]
        del slots["__digests__"]
        table, boxes, _, pickled = Skeleton.split(framed)
        return cls(_identity(metadata), slots, table, boxes, pickled)

    def replace(self, **parts: Any) -> Parts:
        return dataclasses.replace(self, **parts)

    def with_rows(self, rows: Any) -> Parts:
        return self.replace(table=json.dumps(rows).encode())

    @property
    def rows(self) -> list[list[Any]]:
        rows: list[list[Any]] = json.loads(self.table)
        return rows

    def image(self) -> bytes:
        """The whole image, with digests that are right."""
        framed = Skeleton(self.table, self.boxes, NO_PARTS, self.pickled).join()
        data_nbytes = sum(len(data) for _, _, data in self.slots.values())
        room = sum(len(json.dumps(name)) + 150 + 10 * len(s[1]) for name, s in self.slots.items())
        start = -(-(room + 1000 + len(json.dumps(self.identity.session_id))) // _PAGE_NBYTES)
        start *= _PAGE_NBYTES
        covered = start + data_nbytes + len(framed)
        digests = b"\0" * (_DIGEST_NBYTES * -(-covered // BLOCK_NBYTES))
        entries: dict[str, Any] = {"__metadata__": _metadata(self.identity)}
        offset = 0
        tail = {
            "__skeleton__": ("U8", [len(framed)], framed),
            "__digests__": ("U8", [len(digests)], digests),
        }
        for name, (dtype, shape, data) in (self.slots | tail).items():
            offsets = [offset, offset := offset + len(data)]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
        assert len(header) == start
        data = b"".join(data for _, _, data in self.slots.values())
        return sealed(header + data + framed + digests)


def sealed(image: bytes, identity: ShardIdentity | None = None) -> bytes:
    """The image with digests that match what comes before them; of its own identity, if none."""
    count = blocks_of(len(image))
    covered = len(image) - count * _DIGEST_NBYTES
    copy = bytearray(image)
    BlockHasher(identity or identity_in(image)).fill(memoryview(copy), covered)
    return bytes(copy)


def flip(content: bytes, position: int, bit: int) -> bytes:
    """One bit turned over."""
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def blocks_of(nbytes: int) -> int:
    return -(-nbytes // (BLOCK_NBYTES + _DIGEST_NBYTES))


def identity_in(image: bytes) -> ShardIdentity:
    """What the header says that the shard is."""
    return _identity(_header(image)[1]["__metadata__"])


def regions(image: bytes) -> dict[str, tuple[int, int]]:
    """Where each part of an image begins and ends, in bytes; together they are all of it."""
    start, entries = _header(image)
    text_end = 8 + len(image[8:start].rstrip())
    found = {"length": (0, 8), "header": (8, text_end), "padding": (text_end, start)}
    for name, entry in entries.items():
        if "data_offsets" in entry:
            begin, end = entry["data_offsets"]
            found[name] = (start + begin, start + end)
    begin, end = found.pop("__skeleton__")
    table, boxes, *_ = Skeleton.split(image[begin:end])
    ends = accumulate([24, len(table), len(boxes), len(NO_PARTS)], initial=begin)
    names = "lengths of the tables", "table", "boxes", "parts", "pickle"
    return found | dict(zip(names, pairwise([*ends, end]), strict=True))


def _header(image: bytes) -> tuple[int, dict[str, Any]]:
    start = 8 + int.from_bytes(image[:8], "little")
    return start, json.loads(image[8:start])


def _metadata(identity: ShardIdentity) -> dict[str, str]:
    return {
        "format": FORMAT_VERSION,
        "session": identity.session_id,
        "epoch": str(identity.generation.epoch),
        "sequence": str(identity.generation.sequence),
        "iteration": str(identity.iteration),
        "rank": str(identity.rank),
        "world_size": str(identity.world_size),
    }


def _identity(metadata: dict[str, str]) -> ShardIdentity:
    epoch, sequence, iteration, rank, world_size = (
        int(metadata[key]) for key in ("epoch", "sequence", "iteration", "rank", "world_size")
    )
    return ShardIdentity(
        metadata["session"], Generation(epoch, sequence), iteration, rank, world_size
    )
