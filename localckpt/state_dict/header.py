"""The image's first bytes: a safetensors header that also says what the shard is.

Written without torch, so that a process that imports none can read what a file is. The format is
described in ``docs/format.md``; :func:`parse_header` refuses whatever does not follow it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from localckpt.errors import CorruptShardError, FormatVersionError, MismatchError
from localckpt.ids import MOST_DIGITS, MOST_RANKS, Generation, ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.state_dict.digests import digests_nbytes
from localckpt.state_dict.layout import (
    ITEM_NBYTES,
    PAGE_NBYTES,
    Layout,
    TensorSlot,
    round_up,
)
from localckpt.state_dict.parity_of import ParityOf

__all__ = [
    "DIGESTS",
    "FORMAT_VERSION",
    "PARITY_OF",
    "RESERVED_NAMES",
    "SKELETON",
    "ImageHeader",
    "header_length",
    "parse_header",
    "parse_record",
    "parse_safetensors",
    "render_header",
    "render_slots",
]

FORMAT_VERSION = "localckpt-1"
SKELETON = "__skeleton__"
DIGESTS = "__digests__"
METADATA = "__metadata__"
# Only in the header of a parity.
PARITY_OF = "parity_of"
# Absent from the headers of earlier versions.
LINEAGE = "lineage"
_BEGINNING = b'{"%s":' % METADATA.encode()
RESERVED_NAMES = frozenset({SKELETON, DIGESTS, METADATA})

# The limit of the safetensors library, which must be able to open the file.
_MAX_HEADER_NBYTES = 100_000_000
# Room that the figures which change at every save may grow into without moving the data.
_GROWTH_NBYTES = 512
# Room for the lineage, whether it is there or not: the size of an image stays the same from epoch
# to epoch, also if it is asked for before the lineage is known. A long lineage takes more.
_LINEAGE_NBYTES = 512


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """A parsed header. Offsets count from the start of the image, in bytes."""

    identity: ShardIdentity
    slots: dict[str, TensorSlot]
    data_start: int
    skeleton_start: int
    digests_start: int
    nbytes: int
    parity_of: ParityOf | None = None
    """Of what it is the parity; ``None`` for a shard."""


def render_slots(layout: Layout) -> bytes:
    """The part of the header that stays the same from save to save."""
    entries = (_entry(s.name, s.dtype, s.shape, s.offset, s.nbytes) for s in layout.slots)
    return "".join(f"{entry}," for entry in entries).encode()


def render_header(
    slots_json: bytes,
    data_nbytes: int,
    skeleton_nbytes: int,
    identity: ShardIdentity,
    parity_of: ParityOf | None = None,
    at_least_nbytes: int = 0,
) -> tuple[bytes, int]:
    """Build the header.

    Args:
        slots_json: From :func:`render_slots`.
        data_nbytes: Bytes of the tensors.
        skeleton_nbytes: Bytes of the skeleton.
        identity: What the shard is.
        parity_of: What it is the parity of, if it is one.
        at_least_nbytes: The header is not shorter; a multiple of 4096.

    Returns:
        The header, a multiple of 4096 bytes with its length in front, and the image's size.

    Raises:
        MismatchError: There are more tensors than a header of the format can describe.
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
    if parity_of is not None:
        claims[PARITY_OF] = parity_of.to_json()
    metadata = json.dumps(claims).encode()
    room = len(metadata) + _LINEAGE_NBYTES
    if identity.lineage is not None:
        claims[LINEAGE] = json.dumps(identity.lineage.to_json(), separators=(",", ":"))
        metadata = json.dumps(claims).encode()
    room = max(room, len(metadata))
    start = round_up(8 + room + len(slots_json) + _GROWTH_NBYTES, PAGE_NBYTES)
    start = max(start, at_least_nbytes)
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
    text = b"%s%s,%s%s}" % (_BEGINNING, metadata, slots_json, tail.encode())
    header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    return header, digests_start + digests


def header_length(first_bytes: memoryview | bytes, image_nbytes: int) -> int:
    """Bytes from the start of the image to its tensor data, told by the first 8 bytes.

    Raises:
        CorruptShardError: No image has such a header.
    """
    if len(first_bytes) < 8:
        _refuse(f"it has {len(first_bytes)} bytes")
    start = 8 + int.from_bytes(first_bytes[:8], "little")
    if start > min(image_nbytes, 8 + _MAX_HEADER_NBYTES):
        _refuse(f"its header would take {start} of {image_nbytes} bytes")
    return start


def parse_safetensors(header: memoryview | bytes) -> tuple[Any, list[TensorSlot]]:
    """Read what any safetensors header says: its metadata, and its tensors in order of offset.

    Raises:
        CorruptShardError: It is no such header, or its tensors overlap or leave holes.
    """
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
    """Read and check an image's header.

    Args:
        header: The first :func:`header_length` bytes.
        image_nbytes: Size of the whole image.

    Raises:
        CorruptShardError: The header does not describe an image of that size.
    """
    metadata, slots = parse_safetensors(header)
    identity, parity_of = _claims_of(metadata)
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
        parity_of,
    )


def parse_record(header: memoryview | bytes, image_nbytes: int) -> ShardRecord:
    """What a shard is, without looking at the rest of its header, which may describe 100,000 slots.

    Arguments as for :func:`parse_header`.

    Raises:
        CorruptShardError: The header does not begin as an image's does.
    """
    text = bytes(header[8:])
    if not text.startswith(_BEGINNING):
        _refuse(f"its header does not begin with {METADATA}")
    try:
        metadata, _ = json.JSONDecoder().raw_decode(text.decode(), len(_BEGINNING))
    except (ValueError, RecursionError) as error:
        _refuse(f"its header is not JSON: {error}", error)
    identity, parity_of = _claims_of(metadata)
    return ShardRecord(identity, image_nbytes, None if parity_of is None else parity_of.group)


def _entry(name: str, dtype: str, shape: Sequence[int], offset: int, nbytes: int) -> str:
    value = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
    return f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"


def _parse_entry(name: str, entry: Any) -> TensorSlot:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        nbytes = ITEM_NBYTES[dtype]
        # JSON's true is an int to Python. A restart waits for this loop.
        good = type(shape) is list and type(begin) is int and type(end) is int and begin >= 0
        for size in shape:
            good = good and type(size) is int and size >= 0
            nbytes *= size
        if good and end - begin == nbytes:
            return TensorSlot(name, dtype, tuple(shape), nbytes, begin)
    except (KeyError, TypeError, ValueError):
        pass
    _refuse(f"the header's entry for tensor {name!r} contradicts itself")


def _claims_of(metadata: Any) -> tuple[ShardIdentity, ParityOf | None]:
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT_VERSION:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        if isinstance(found, str) and re.fullmatch(r"localckpt-\d+", found):
            raise FormatVersionError(
                f"its format is {found}, and this version of localckpt reads {FORMAT_VERSION}: use "
                f"the version that wrote it, or give the job another session_id"
            )
        _refuse(f"its format is {found!r}, this version reads {FORMAT_VERSION!r}")
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
    if PARITY_OF not in metadata:
        return identity, None
    try:
        parity_of = ParityOf.from_json(metadata[PARITY_OF])
    except MismatchError as error:
        _refuse(str(error), error)
    if rank not in parity_of.group.ranks or max(parity_of.group.ranks) >= world_size:
        _refuse(f"it says that it is rank {rank}'s of {world_size} and of {parity_of.group}")
    return identity.parity, parity_of


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
