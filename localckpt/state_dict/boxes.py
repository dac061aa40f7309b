"""Boxes: for each tensor of an image the part of a global tensor that it is.

A job's global tensors are known by their keys. A tensor without a box is private to its rank. The
table of boxes is stored in the skeleton as JSON; sets of ranks stand in it once, however many
tensors have them. This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from localckpt.errors import CorruptShardError
from localckpt.ids import MOST_DIGITS

__all__ = ["NO_BOXES", "Box", "RankSet", "Run", "parse_boxes", "render_boxes"]

NO_BOXES = b"[[],[]]"
"""Table of an image whose tensors are all private to its rank."""

Run = tuple[int, int]
"""First index, and number of indices, along one dimension of a global tensor."""

# Every number in a table is below this.
_LIMIT = 10**MOST_DIGITS


# Without slots, since its pickle is read field by field.
@dataclass(frozen=True)
class RankSet:
    """Set of ranks, as lattices in ascending order: small however many ranks it has.

    Attributes:
        lattices: Each the first rank, and for each direction, the innermost first, a number of
            steps and their length. A single rank has no direction.
    """

    lattices: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, ranks: Sequence[int]) -> RankSet:
        """Describe distinct ranks."""
        ordered = sorted(ranks)
        if not ordered:
            return cls(())
        if (whole := _lattice(ordered)) is not None:
            return cls((whole,))
        return cls(tuple(_runs(ordered)))

    def __len__(self) -> int:
        return sum(math.prod(count for count, _ in steps) for _, steps in self.lattices)

    def __iter__(self) -> Iterator[int]:
        for first, steps in self.lattices:
            ranks = [first]
            for count, step in steps:
                ranks = [rank + step * n for n in range(count) for rank in ranks]
            yield from ranks

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(_holds(lattice, rank) for lattice in self.lattices)

    @property
    def text(self) -> str:
        """Short text of the ranks, the same for equal sets."""
        return ",".join(
            "+".join([str(first), *(f"{count}x{step}" for count, step in steps)])
            for first, steps in self.lattices
        )

    @property
    def last(self) -> int:
        """Highest rank."""
        return _last(self.lattices[-1])


class Box(NamedTuple):
    """Part of a global tensor that one tensor of an image is.

    Attributes:
        key: Name of the global tensor in the whole job.
        shape: Shape of the global tensor.
        runs: For each dimension of the global tensor the indices that the tensor has of it, as
            runs in ascending order: one, except where a sharding is strided.
        ranks: The ranks whose tensors of this box have equal bytes; ``None`` if all have that name
            it so (Megatron-Core, whose keys are unique in a job).
    """

    key: str
    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    ranks: RankSet | None

    @property
    def place(self) -> str:
        """Text of the place in the global tensor, as in ``[0:3, 4:8] of [10, 8]``."""
        sides = (
            "+".join(f"{start}:{start + count}" for start, count in runs) for runs in self.runs
        )
        return f"[{', '.join(sides)}] of {list(self.shape)}"

    @property
    def is_shared(self) -> bool:
        """True if other ranks should have the tensor equal, or it is not known which."""
        return self.ranks is None or len(self.ranks) > 1

    @property
    def kind(self) -> str:
        """Text that the ranks which should have the tensor equal have in common.

        Megatron-Core names no ranks. Its tensors are of a kind if the first name in their keys, and
        the dimensions that are whole, are the same: so are replicas of data parallelism, and what
        tensor parallelism leaves whole.
        """
        if self.ranks is not None:
            return repr(self.ranks.lattices)
        wholes = "".join("w" if is_whole else "p" for is_whole in self.wholes)
        return f"{self.key.partition('.')[0]} {wholes}"

    @property
    def wholes(self) -> list[bool]:
        """For each dimension whether the tensor has all of it."""
        return [runs == ((0, size),) for runs, size in zip(self.runs, self.shape, strict=True)]

    def fits(self, local: tuple[int, ...]) -> bool:
        """Return whether this can be the box of a tensor of a shape, as a reader will ask."""
        try:
            return _parse_place(local, self.shape, _starts(self)) == self.runs
        except (CorruptShardError, TypeError, ValueError):
            return False

    def is_at(self, other: Box) -> bool:
        """Return whether two boxes are the same part of the same global tensor."""
        return self[:3] == other[:3]


def render_boxes(boxes: Mapping[int, Box]) -> bytes:
    """Build the text of a table.

    Args:
        boxes: Boxes by the number of the tensor; others are private to their rank.
    """
    groups: dict[RankSet, int] = {}
    rows = [
        [
            number,
            box.key,
            box.shape,
            _starts(box),
            None if box.ranks is None else groups.setdefault(box.ranks, len(groups)),
        ]
        for number, box in boxes.items()
    ]
    lattices = [[[first, *steps] for first, steps in ranks.lattices] for ranks in groups]
    return json.dumps([lattices, rows], separators=(",", ":")).encode()


def parse_boxes(
    text: bytes, shapes: Sequence[tuple[int, ...]], rank: int, world_size: int
) -> dict[int, Box]:
    """Parse and check the text of a table.

    Args:
        text: The text.
        shapes: Shape of each tensor of the image.
        rank: The rank whose image it is.
        world_size: Number of ranks of its job.

    Returns:
        The boxes by the number of the tensor.

    Raises:
        CorruptShardError: The text is no table, or contradicts the tensors or itself.
    """
    try:
        lattices, rows = json.loads(text)
        groups = [_parse_ranks(fields, rank, world_size) for fields in lattices]
        boxes: dict[int, Box] = {}
        # By their texts, which tell 1 from 1.0 and from true: most tensors have one of few places.
        places: dict[str, tuple[tuple[int, ...], tuple[tuple[Run, ...], ...]]] = {}
        for number, key, shape, starts, group in rows:
            if type(number) is not int or not 0 <= number < len(shapes) or number in boxes:
                _refuse(f"a box of tensor {number!r} of {len(shapes)}")
            if type(key) is not str:
                _refuse(f"a key {key!r}")
            if group is not None and (type(group) is not int or not 0 <= group < len(groups)):
                _refuse(f"a set of ranks {group!r} of {len(groups)}")
            text_of_place = repr((shapes[number], shape, starts))
            if (place := places.get(text_of_place)) is None:
                runs = _parse_place(shapes[number], shape, starts)
                place = places[text_of_place] = tuple(shape), runs
            boxes[number] = Box(key, *place, None if group is None else groups[group])
    except CorruptShardError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptShardError(f"the table of boxes cannot be read: {error}") from error
    return boxes


def _parse_ranks(fields: Any, rank: int, world_size: int) -> RankSet:
    lattices = []
    end = -1
    for first, *steps in fields:
        reach = 0
        for count, step in steps:
            _require_numbers(count, step)
            # Each direction leaves the ranks of those before it behind, so none is named twice.
            if count < 2 or step <= reach:
                _refuse(f"a set of ranks {fields!r:.80}")
            reach += (count - 1) * step
        _require_numbers(first)
        if not end < first <= first + reach < world_size:
            _refuse(f"a set of ranks {fields!r:.80} of {world_size}")
        end = first + reach
        lattices.append((first, tuple((count, step) for count, step in steps)))
    ranks = RankSet(tuple(lattices))
    if rank not in ranks:
        _refuse(f"a set of ranks without rank {rank}, whose image it is")
    return ranks


def _starts(box: Box) -> list[Any]:
    # A run that is alone has the size of the tensor, which the table of tensors has.
    return [runs[0][0] if len(runs) == 1 else runs for runs in box.runs]


def _parse_place(local: tuple[int, ...], shape: Any, starts: Any) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of a box, all of which lie in the global tensor."""
    _require_numbers(*shape)
    # A global tensor may have more dimensions in front, in each of which the tensor is one index.
    sizes = (1,) * (len(shape) - len(local)) + local
    place = []
    for size, count, start in zip(sizes, shape, starts, strict=True):
        runs = ((start, size),) if type(start) is int else tuple((s, n) for s, n in start)
        _require_numbers(*(number for run in runs for number in run))
        end = 0
        for first, length in runs:
            if first < end or first + length > count or (len(runs) > 1 and not length):
                _refuse(f"a box at {starts!r:.80} of a tensor of {shape!r:.80}")
            end = first + length
        if not runs or sum(length for _, length in runs) != size:
            _refuse(f"a box of {list(sizes)} at {starts!r:.80}")
        place.append(runs)
    return tuple(place)


def _require_numbers(*numbers: Any) -> None:
    # type(), because isinstance(True, int) holds.
    if any(type(n) is not int or not 0 <= n < _LIMIT for n in numbers):
        _refuse(f"the numbers {numbers!r:.80}")


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the table of boxes has {what}, which cannot be")


def _lattice(ranks: Sequence[int]) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Describe ranks in ascending order by one lattice; ``None`` if they are none."""
    firsts, steps = list(ranks), []
    while len(firsts) > 1:
        (start, taken), *_ = _runs(firsts)
        if not taken:
            return None
        ((count, step),) = taken
        blocks = [firsts[at : at + count] for at in range(0, len(firsts), count)]
        shape = [rank - start for rank in blocks[0]]
        if any([rank - block[0] for rank in block] != shape for block in blocks):
            return None
        firsts = [block[0] for block in blocks]
        steps.append((count, step))
    return firsts[0], tuple(steps)


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Yield evenly spaced ranks, as many at a time as there are in a row."""
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 0
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        count = end - at
        yield ranks[at], ((count, step),) if count > 1 else ()
        at = end


def _last(lattice: tuple[int, tuple[tuple[int, int], ...]]) -> int:
    first, steps = lattice
    return first + sum((count - 1) * step for count, step in steps)


def _holds(lattice: tuple[int, tuple[tuple[int, int], ...]], rank: int) -> bool:
    first, steps = lattice
    if (left := rank - first) < 0:
        return False
    # The outermost direction first: what the others reach is less than one of its steps.
    for count, step in reversed(steps):
        taken = min(left // step, count - 1)
        left -= taken * step
    return left == 0
