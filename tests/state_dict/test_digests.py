"""Whatever happens to the bytes of a shard, it is seen: never a wrong value comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localckpt.errors import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.digests import (
    BLOCK_NBYTES,
    BlockHasher,
    HeldBlocks,
    block_ranges,
    covered_nbytes,
    digests_nbytes,
)
from localckpt.state_dict.image import unpack
from localckpt.state_dict.source import read_header, read_verified_record
from tests.state_dict.states import IDENTITY, image_of, source_of

SMALL = {"weight": torch.arange(20.0), "step": torch.tensor(3)}


def large_state() -> dict[str, Any]:
    """Several blocks, with tensors that begin and end inside of them."""
    generator = torch.Generator().manual_seed(0)
    sizes = [700_000, 300_001, 1 << 20, 5, 1_500_000]
    return {
        f"t{n}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for n, size in enumerate(sizes)
    }


OTHERS = {
    "iteration": dataclasses.replace(IDENTITY, iteration=41),
    "rank": dataclasses.replace(IDENTITY, rank=4),
    "session": dataclasses.replace(IDENTITY, session_id="another session"),
    "epoch": dataclasses.replace(IDENTITY, generation=Generation(3, 7)),
    "sequence": dataclasses.replace(IDENTITY, generation=Generation(2, 8)),
}


@pytest.mark.fault("wrong-place")
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_good_block_of_another_shard_does_not_verify_in_its_place(other: ShardIdentity) -> None:
    state = large_state()
    mine, theirs = image_of(state), image_of({n: t + 1 for n, t in state.items()}, other)
    header = read_header(source_of(mine))
    block = slice(2 * BLOCK_NBYTES, 3 * BLOCK_NBYTES)
    digest = slice(header.digests_start + 16, header.digests_start + 24)

    mine[block], mine[digest] = theirs[block], theirs[digest]

    with pytest.raises(CorruptShardError, match=f"the {BLOCK_NBYTES} bytes from {block.start}"):
        unpack(source_of(mine))


@pytest.mark.fault("flipped-bit")
def test_the_identity_is_read_only_from_a_header_that_is_intact() -> None:
    image = image_of(SMALL)
    position = image.index(b'"iteration": "40"') + len('"iteration": "4')

    image[position] = ord("1")

    assert read_header(source_of(image)).identity.iteration == 41
    with pytest.raises(CorruptShardError, match=r"iteration 41 .* is damaged"):
        read_verified_record(source_of(image))


@given(st.integers(1, 10 * BLOCK_NBYTES) | st.integers(1, 1 << 50))
@example(BLOCK_NBYTES)
@example(BLOCK_NBYTES + 1)
def test_the_size_of_an_image_determines_where_its_digests_begin(covered: int) -> None:
    assert covered_nbytes(covered + digests_nbytes(covered)) == covered


_FEW, _ALL = st.sets(st.integers(0, 31), max_size=8), set(range(32))


@settings(max_examples=20)
@given(_FEW | st.just(_ALL), st.integers(0, 34 * BLOCK_NBYTES), st.sampled_from([0, 1, 4097]))
def test_a_place_that_has_an_older_image_needs_the_changed_blocks_alone(
    indices: set[int], old_nbytes: int, more: int
) -> None:
    covered = 32 * BLOCK_NBYTES + more
    old = memoryview(bytearray(old_nbytes + digests_nbytes(old_nbytes)))
    new = memoryview(bytearray(covered))
    for index in indices:
        new[index * BLOCK_NBYTES + index] = 1
    hasher = BlockHasher(IDENTITY)
    hasher.fill(old, old_nbytes)

    held = HeldBlocks(hasher.seed, old[old_nbytes:])
    told = HeldBlocks.unpacked(memoryview(held.packed(covered)))
    ranges = block_ranges(told.changed(lambda start, stop: new[start:stop], covered), covered)

    place = memoryview(bytearray(old[:old_nbytes]).ljust(covered, b"x")[:covered])
    for start, stop in ranges:
        place[start:stop] = new[start:stop]
    assert place == new
    if old_nbytes >= 32 * BLOCK_NBYTES and len(indices) <= 8:
        assert sum(stop - start for start, stop in ranges) == len(indices) * BLOCK_NBYTES + more
    if indices == _ALL:
        assert ranges == [(0, covered)]
