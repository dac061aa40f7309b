"""Header of an image: a safetensors header that also holds the shard's identity.

This module does not import torch, so a process without torch can identify files. The format is
described in ``docs/format.md``; :func:`parse_header` refuses whatever does not follow it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from localckpt.errors import CorruptShardError, FormatVersionError, MismatchError
from localckpt.ids import (
    MOST_DIGITS,
    MOST_RANKS,
    SHARD_KIND,
    Generation,
    Group,
    ShardIdentity,
    ShardRecord,
)
from localckpt.lineage import Lineage
from localckpt.memory.digests import digests_nbytes
from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.state_dict.layout import ITEM_NBYTES, Layout, TensorSlot

FORMAT_VERSION = "localckpt-6"
"""Format of images, in their headers; an image of another is refused."""
NO_PARTS = b"[[],[]]"
"""Table of parts of an image whose tensors are all whole."""
SKELETON = "__skeleton__"
DIGESTS = "__digests__"
METADATA = "__metadata__"
# Suffix of the key "<kind>_of", under which a piece that is no shard names what it protects.
_OF = "_of"
_KIND = re.compile(r"[a-z]{1,32}")
# Key of the lineage; a piece that no manager saved has none.
LINEAGE = "lineage"
_BEGINNING = b'{"%s":' % METADATA.encode()
RESERVED_NAMES = frozenset({SKELETON, DIGESTS, METADATA})

# Limit of the safetensors library, which must be able to open the file.
_MAX_HEADER_NBYTES = 100_000_000
# Reserve for numbers that grow from save to save, so that the data's offset stays the same.
_GROWTH_NBYTES = 512
# Reserve for the lineage, taken with or without one, so that the size of an image stays the same
# from epoch to epoch and is known before the lineage is. A long lineage takes more.
_LINEAGE_NBYTES = 512


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Parsed header. Offsets are in bytes, from the start of the image."""

    identity: ShardIdentity
    slots: dict[str, TensorSlot]
    data_start: int
    skeleton_start: int
    digests_start: int
    nbytes: int
    protects: str | None = None
    """JSON text of what the piece protects, for its redundancy scheme; ``None`` for a shard."""


def render_slots(layout: Layout) -> bytes:
    """Build the part of the header that stays the same from save to save."""
    entries = (_entry(s.name, s.dtype, s.shape, s.offset, s.nbytes) for s in layout.slots)
    return "".join(f"{entry}," for entry in entries).encode()


def render_header(
    slots_json: bytes,
    data_nbytes: int,
    skeleton_nbytes: int,
    identity: ShardIdentity,
    protects: str | None = None,
) -> tuple[bytes, int]:
    """Build the header, a multiple of 4096 bytes; returns it and the size of the image.

    ``protects``, for a piece that is no shard, is JSON text of what it protects: a list that begins
    with the ranks of its group and the number of them that may be lost.
    """
    numbers = (*identity.generation, identity.iteration, identity.rank, identity.world_size)
    if max(numbers) >= 10**MOST_DIGITS:
        raise MismatchError(
            f"{identity} cannot be saved: one of its numbers has more than {MOST_DIGITS} digits"
        )
    claims = {
        "format": FORMAT_VERSION,
        "session": identity.session_id,
        "epoch": str(identity.generation.epoch),
        "sequence": str(identity.generation.sequence),
        "iteration": str(identity.iteration),
        "rank": str(identity.rank),
        "world_size": str(identity.world_size),
    }
    if protects is not None:
        claims[f"{identity.kind}{_OF}"] = protects
    metadata = json.dumps(claims).encode()
    reserved = len(metadata) + _LINEAGE_NBYTES
    if identity.lineage is not None:
        claims[LINEAGE] = json.dumps(identity.lineage.to_json(), separators=(",", ":"))
        metadata = json.dumps(claims).encode()
    reserved = max(reserved, len(metadata))
    start = round_up(8 + reserved + len(slots_json) + _GROWTH_NBYTES, PAGE_NBYTES)
    if start - 8 > _MAX_HEADER_NBYTES:
        raise MismatchError(
            f"the tensors' names and shapes take {start} bytes, more than the "
            f"{_MAX_HEADER_NBYTES} that a safetensors header may have: save fewer, larger tensors"
        )
    digests_start = start + data_nbytes + skeleton_nbytes
    digests = digests_nbytes(digests_start)
    tail = ",".join(
        (
            _entry(SKELETON, "U8", (skeleton_nbytes,), data_nbytes, skeleton_nbytes),
            _entry(DIGESTS, "U8", (digests,), data_nbytes + skeleton_nbytes, digests),
        )
    )
    texts = (start - 8).to_bytes(8, "little"), _BEGINNING, metadata, b",", slots_json, tail.encode()
    # Joined once: with many tensors it is megabytes, and training waits for it.
    end = b"}".ljust(start - sum(map(len, texts)))
    return b"".join((*texts, end)), digests_start + digests


class Skeleton(NamedTuple):
    """Bytes of a skeleton: the tables of tensors, of boxes and of parts, and the pickle."""

    table: bytes
    boxes: bytes
    parts: bytes
    pickle: bytes

    def join(self) -> bytes:
        """Build the bytes: the lengths of the tables, the tables, and the pickle."""
        return b"".join((*(len(text).to_bytes(8, "little") for text in self[:3]), *self))

    @classmethod
    def split(cls, joined: bytes) -> Skeleton:
        texts, at = [], 24
        for begin in (0, 8, 16):
            end = at + int.from_bytes(joined[begin : begin + 8], "little")
            texts.append(joined[at:end])
            at = end
        if at > len(joined):
            raise CorruptShardError("the skeleton is cut short")
        table, boxes, parts = texts
        return cls(table, boxes, parts, joined[at:])


def header_length(first_bytes: memoryview | bytes, image_nbytes: int) -> int:
    """Read from an image's first 8 bytes the offset of its tensor data."""
    if len(first_bytes) < 8:
        _refuse(f"it has {len(first_bytes)} bytes")
    start = 8 + int.from_bytes(first_bytes[:8], "little")
    if start > min(image_nbytes, 8 + _MAX_HEADER_NBYTES):
        _refuse(f"its header would take {start} of {image_nbytes} bytes")
    return start


def parse_safetensors(header: memoryview | bytes) -> tuple[Any, list[TensorSlot]]:
    """Parse any safetensors header into its metadata, and its tensors in order of offset."""
    try:
        entries = json.loads(bytes(header[8:]).decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        _refuse(f"its header is not JSON: {error}", error)
    if not isinstance(entries, dict):
        _refuse("its header is not a JSON object")
    metadata = entries.pop(METADATA, None)
    slots = [_parse_entry(name, entry) for name, entry in entries.items()]
    slots.sort(key=lambda slot: (slot.offset, slot.nbytes))
    end = 0
    for slot in slots:
        if slot.offset != end:
            _refuse(f"tensor {slot.name!r} starts at byte {slot.offset}, not at {end}")
        end += slot.nbytes
    return metadata, slots


def parse_header(header: memoryview | bytes, image_nbytes: int) -> ImageHeader:
    """Read and check an image's header, its first :func:`header_length` bytes."""
    metadata, slots = parse_safetensors(header)
    identity, protects, _ = _read_claims(_require_format(metadata))
    end = sum(slot.nbytes for slot in slots)
    by_name = {slot.name: slot for slot in slots}
    skeleton, digests = by_name.pop(SKELETON, None), by_name.pop(DIGESTS, None)
    if skeleton is None or digests is None:
        _refuse("its header lacks the skeleton or the digests")
    start = len(header)
    digests_start = start + digests.offset
    if (
        digests.nbytes != digests_nbytes(digests_start)
        or digests.offset + digests.nbytes != end
        or skeleton.offset + skeleton.nbytes != digests.offset
    ):
        _refuse("its skeleton and digests are not where they belong")
    if start + end != image_nbytes:
        _refuse(f"it has {image_nbytes} bytes and its header describes {start + end}")
    return ImageHeader(
        identity,
        by_name,
        start,
        start + skeleton.offset,
        digests_start,
        image_nbytes,
        protects,
    )


def parse_record(header: memoryview | bytes, image_nbytes: int) -> ShardRecord:
    """Parse a piece's identity, but not the slots in its header, which may be 100,000."""
    text = bytes(header[8:])
    if not text.startswith(_BEGINNING):
        _refuse(f"its header does not begin with {METADATA}")
    try:
        metadata, _ = json.JSONDecoder().raw_decode(text.decode(), len(_BEGINNING))
    except (ValueError, RecursionError) as error:
        _refuse(f"its header is not JSON: {error}", error)
    identity, _, group = _read_claims(_require_format(metadata))
    return ShardRecord(identity, image_nbytes, group)


def kind_of(metadata: dict[str, Any]) -> str:
    for key in metadata:
        kind = key.removesuffix(_OF)
        if kind != key and kind != SHARD_KIND and _KIND.fullmatch(kind):
            return kind
    return SHARD_KIND


def _entry(name: str, dtype: str, shape: Sequence[int], offset: int, nbytes: int) -> str:
    value = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
    return f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"


def _parse_entry(name: str, entry: Any) -> TensorSlot:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        nbytes = ITEM_NBYTES[dtype]
        # type() rather than isinstance(): it is faster, and a restart waits for this loop; and
        # JSON's true, a bool, must not pass for an int.
        good = type(shape) is list and type(begin) is int and type(end) is int and begin >= 0
        for size in shape:
            good = good and type(size) is int and size >= 0
            nbytes *= size
        if good and end - begin == nbytes:
            return TensorSlot(name, dtype, tuple(shape), nbytes, begin)
    except (KeyError, TypeError, ValueError):
        pass
    _refuse(f"the header's entry for tensor {name!r} contradicts itself")


def _require_format(metadata: Any) -> dict[str, Any]:
    found = metadata.get("format") if isinstance(metadata, dict) else None
    if found == FORMAT_VERSION:
        return metadata  # type: ignore[no-any-return]
    if isinstance(found, str) and re.fullmatch(r"localckpt-\d+", found):
        raise FormatVersionError(
            f"its format is {found}, and this version of localckpt reads {FORMAT_VERSION}: use the "
            f"version that wrote it, or give the job another session_id"
        )
    _refuse(f"its format is {found!r}, this version reads {FORMAT_VERSION!r}")


def _read_claims(metadata: dict[str, Any]) -> tuple[ShardIdentity, str | None, Group | None]:
    names = ("epoch", "sequence", "iteration", "rank", "world_size")
    texts = [metadata.get(name) for name in names]
    session = metadata.get("session")
    if not isinstance(session, str) or not all(
        isinstance(t, str) and t.isascii() and t.isdigit() and len(t) <= MOST_DIGITS for t in texts
    ):
        _refuse("its metadata does not say which shard it is")
    try:
        session.encode()
    except UnicodeEncodeError as error:
        _refuse(f"its session {session!r} is no text", error)
    epoch, sequence, iteration, rank, world_size = (int(str(t)) for t in texts)
    if not rank < world_size <= MOST_RANKS:
        _refuse(f"it says that it is of rank {rank} of {world_size}")
    generation = Generation(epoch, sequence)
    lineage = _lineage_of(metadata, generation)
    identity = ShardIdentity(session, generation, iteration, rank, world_size, lineage=lineage)
    if (kind := kind_of(metadata)) == SHARD_KIND:
        return identity, None, None
    protects = metadata[f"{kind}{_OF}"]
    try:
        ranks, tolerated, *_ = json.loads(protects)
        group = Group(tuple(ranks), tolerated, kind)
    except MismatchError as error:
        _refuse(str(error), error)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(f"it does not say which group it protects: {error}", error)
    if rank not in group.ranks or max(group.ranks) >= world_size:
        _refuse(f"it says that it is rank {rank}'s of {world_size} and of {group}")
    return identity.of_kind(kind), protects, group


def _lineage_of(metadata: dict[str, Any], generation: Generation) -> Lineage | None:
    if LINEAGE not in metadata:
        return None
    try:
        lineage = Lineage.from_json(json.loads(metadata[LINEAGE]))
    except (MismatchError, TypeError, ValueError, RecursionError) as error:
        _refuse(f"what it says of its lineage cannot be read: {error}", error)
    if lineage.epoch != generation.epoch_id:
        _refuse(f"it is of epoch {generation.epoch_id}, and its lineage of {lineage.epoch}")
    return lineage


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _refuse(why: str, cause: BaseException | None = None) -> NoReturn:
    raise CorruptShardError(f"not a shard image: {why}") from cause
