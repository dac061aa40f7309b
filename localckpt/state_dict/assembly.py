"""Search of the parts of divided tensors in the images of a division.

Each image says which rows of a tensor it holds. Together they must be all rows, each once; whatever
else they say is found before a byte is read of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from localckpt.errors import CorruptShardError
from localckpt.state_dict.boxes import Box
from localckpt.state_dict.parts import SlotPart
from localckpt.state_dict.tensor_table import TableEntry

__all__ = ["Piece", "Tables", "find_pieces", "mates_of"]


class Tables(NamedTuple):
    """Tables of an image.

    Attributes:
        entries: The tensors, each described whole.
        boxes: By the number of a tensor, the part of a global tensor that it is.
        parts: By the name of each divided slot, the part of it that the image holds.
    """

    entries: tuple[TableEntry, ...]
    boxes: dict[int, Box]
    parts: dict[str, SlotPart]


class Piece(NamedTuple):
    """Rows of a tensor that another image holds.

    Attributes:
        number: Number of the tensor in the image that lacks them.
        slot: Name of the slot that holds them in the other image.
        part: The rows, as the other image has them.
    """

    number: int
    slot: str
    part: SlotPart


def mates_of(tables: Tables, rank: int) -> tuple[int, ...]:
    """Return the ranks whose images hold what the image of a rank lacks, in ascending order."""
    groups = {part.ranks for part in tables.parts.values()}
    return tuple(sorted({mate for ranks in groups for mate in ranks} - {rank}))


def find_pieces(own: Tables, rank: int, others: Mapping[int, Tables]) -> dict[int, list[Piece]]:
    """Find the rows that an image lacks.

    Args:
        own: Tables of the image.
        rank: The rank whose image it is.
        others: Tables of the images of other ranks, at least of :func:`mates_of`.

    Returns:
        By the other ranks, the pieces that their images hold.

    Raises:
        CorruptShardError: The images do not fit together: some rows are in none of them, or in
            several.
    """
    if not own.parts:
        return {}
    numbers: dict[str | None, int] = {}
    for number, entry in enumerate(own.entries):
        numbers.setdefault(entry.slot, number)
    places = {
        mate: {(box.key, box.shape, box.runs): number for number, box in tables.boxes.items()}
        for mate, tables in others.items()
    }
    found: dict[int, list[Piece]] = {}
    for slot, part in own.parts.items():
        number = numbers[slot]
        entry, box = own.entries[number], own.boxes[number]
        taken = [(part.start, part.count)]
        for mate in part.ranks:
            if mate == rank:
                continue
            there = places[mate].get((box.key, box.shape, box.runs))
            piece = None if there is None else _piece(number, entry, others[mate], there, part)
            if piece is None:
                raise CorruptShardError(
                    f"{box.key!r} is divided among ranks {list(part.ranks)} in the image of rank "
                    f"{rank}, and not so in that of rank {mate}"
                )
            taken.append((piece.part.start, piece.part.count))
            if piece.part.count:
                found.setdefault(mate, []).append(piece)
        _require_tiling(taken, entry.shape[0] if entry.shape else 1, box.key, part.ranks)
    return found


def _piece(
    number: int, entry: TableEntry, tables: Tables, there: int, part: SlotPart
) -> Piece | None:
    other = tables.entries[there]
    found = tables.parts.get(other.slot or "")
    if found is None or found.ranks != part.ranks:
        return None
    if (other.dtype, other.shape) != (entry.dtype, entry.shape):
        return None
    assert other.slot is not None, "it has a part"
    return Piece(number, other.slot, found)


def _require_tiling(
    taken: list[tuple[int, int]], rows: int, key: str, ranks: tuple[int, ...]
) -> None:
    end = 0
    for start, count in sorted(row for row in taken if row[1]):
        if start != end:
            what = "are in none" if start > end else "are in several"
            raise CorruptShardError(
                f"rows {min(start, end)}:{max(start, end)} of {key!r} {what} of the images of "
                f"ranks {list(ranks)}"
            )
        end = start + count
    if end != rows:
        raise CorruptShardError(
            f"rows {end}:{rows} of {key!r} are in none of the images of ranks {list(ranks)}"
        )
