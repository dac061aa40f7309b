"""Every way in which the file of a shard is damaged here, as functions of its bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch

from localckpt.ids import Generation
from localckpt.memory.digests import BLOCK_NBYTES
from tests.faults.images import Parts, blocks_of, regions

__all__ = ["cut", "exchanged", "flip", "flips", "foreign", "mixed_state", "zeroed"]

_DIGEST_NBYTES = 8


def mixed_state(rank: int, iteration: int) -> dict[str, object]:
    """Four blocks of many dtypes and shapes, no two of which are alike."""
    random_bits = torch.Generator().manual_seed(1000 * iteration + rank)

    def noise(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        bits = torch.randint(0, 256, (nbytes,), generator=random_bits, dtype=torch.uint8)
        return bits.view(dtype)

    large = noise(300_000, torch.float32)
    return {
        "model": {
            "large": large.view(300, 1000),
            "of it": large[1000:2000],
            "half": noise(400_001, torch.bfloat16),
            "eight": noise(3001, torch.float8_e4m3fn),
            "turned": noise(60_000, torch.float64).view(200, 300).t(),
            "flags": noise(99_999, torch.uint8) > 99,
        },
        "optimizer": {
            "step": torch.tensor(float(iteration)),
            "exp_avg": [noise(123_457, torch.float16), noise(5, torch.complex64)],
            "counts": noise(50_000, torch.int64),
            "bytes": noise(77_777 + rank, torch.uint8),
            "empty": torch.zeros(0, 3),
        },
        "iteration": iteration,
        "text": f"rank {rank} at {iteration}",
    }


def flip(content: bytes, position: int, bit: int) -> bytes:
    """One bit turned over."""
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def flips(content: bytes, every: bool) -> list[tuple[str, int, int]]:
    """Bits in all parts of a file: ``(part, position, bit)``.

    Args:
        every: Each byte of whatever describes the data; otherwise some.
    """
    dense = {"header", "table", "pickle", "__digests__"}
    found = [("length", position, bit) for position in range(8) for bit in range(8)]
    for name, (start, stop) in regions(content).items():
        if start == stop:
            continue
        chosen = {start, (start + stop) // 2, stop - 1}
        if name in dense:
            chosen |= set(range(start, stop, 1 if every else 31))
        elif every:
            chosen |= set(range(start, stop, max(1, (stop - start) // 30)))
        found += [(name, position, (position * 5 + 3) % 8) for position in sorted(chosen)]
    for block in range(1, blocks_of(len(content))):
        found += [("border", block * BLOCK_NBYTES + side, 7) for side in (-1, 0)]
    if every:
        chance = random.Random(1)
        found += [("any", chance.randrange(len(content)), chance.randrange(8)) for _ in range(500)]
    return found


def cut(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Ends too early: at every border of a block and of a part, one byte before and after."""
    borders = {block * BLOCK_NBYTES for block in range(blocks_of(len(content)))}
    borders |= {border for region in regions(content).values() for border in region}
    lengths = {border + side for border in borders for side in (-1, 0, 1)}
    for length in sorted(lengths):
        if 0 <= length < len(content):
            yield f"cut at {length}", content[:length]


def zeroed(content: bytes, older: bytes) -> Iterator[tuple[str, bytes]]:
    """The right length, but not all was written; or more was written than there should be."""
    size = len(content)
    for block in range(blocks_of(size)):
        start, stop = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, size)
        yield f"zeros from {start} on", content[:start] + bytes(size - start)
        hole = content[:start] + bytes(stop - start) + content[stop:]
        yield f"zeros from {start} to {stop}", hole
        # A file that is used again, and was not written to its end.
        if start:
            yield f"an older file from {start} on", content[:start] + older[start:]
    for count in (1, 8, 512, 4096):
        yield f"{count} zeros at the end", content[:-count] + bytes(count)
    for count in (1, 7, 8, 4096, BLOCK_NBYTES):
        yield f"{count} zeros behind the end", content + bytes(count)
    yield "an older file behind the end", content + older
    yield "nothing but zeros", bytes(size)


def exchanged(content: bytes, older: bytes) -> Iterator[tuple[str, bytes]]:
    """Good blocks in the place of others, with and without their digests.

    The files must be equally long.
    """
    for digests_too in (False, True):
        how = "with their digests" if digests_too else "without their digests"
        # The last block is shorter than the others.
        for one, other in combinations(range(blocks_of(len(content)) - 1), 2):
            swapped = _put(content, one, content, other, digests_too)
            swapped = _put(swapped, other, content, one, digests_too)
            yield f"blocks {one} and {other} swapped, {how}", swapped
        for block in range(digests_too, blocks_of(len(content))):
            mixed = _put(content, block, older, block, digests_too)
            yield f"block {block} of an older file, {how}", mixed


def foreign(content: bytes, older: bytes) -> Iterator[tuple[str, bytes]]:
    """Files that are good, and are not the one that belongs there."""
    # Its header makes it a copy of the older one, though a bad one.
    yield "that begins as an older one does", _put(content, 0, older, 0, True)
    parts = Parts.of(content)
    who = parts.identity
    epoch, sequence = who.generation
    yield "of another iteration", older
    for what, other in (
        ("rank", replace(who, rank=who.rank + 1, world_size=who.world_size + 1)),
        ("number of ranks", replace(who, world_size=who.world_size + 1)),
        ("session", replace(who, session_id="another")),
        ("attempt", replace(who, generation=Generation(epoch - 1, sequence))),
    ):
        yield f"of another {what}", parts.replace(identity=other).image()


def _put(content: bytes, block: int, source: bytes, number: int, digest_too: bool) -> bytes:
    """A file with one block, and perhaps its digest, out of another file."""
    result = bytearray(content)
    result[_span(content, block)] = source[_span(source, number)]
    if digest_too:
        result[_digest(content, block)] = source[_digest(source, number)]
    assert len(result) == len(content)
    return bytes(result)


def _span(content: bytes, block: int) -> slice:
    covered = len(content) - _DIGEST_NBYTES * blocks_of(len(content))
    return slice(block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, covered))


def _digest(content: bytes, block: int) -> slice:
    start = len(content) - _DIGEST_NBYTES * (blocks_of(len(content)) - block)
    return slice(start, start + _DIGEST_NBYTES)
