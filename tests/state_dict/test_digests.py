"""Whatever happens to the bytes of a shard, it is seen: never a wrong value comes back."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from localckpt.errors import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.digests import (
    BLOCK_NBYTES,
    BlockHasher,
    covered_nbytes,
    digests_nbytes,
)
from localckpt.state_dict.header import ImageHeader
from localckpt.state_dict.image import pack, unpack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource, read_header, read_verified_record
from localckpt.state_dict.targets import find_targets
from tests.state_dict.states import IDENTITY, assert_same, image_of, source_of

SMALL = {"weight": torch.arange(20.0), "step": torch.tensor(3), "note": "text", "view": [1, 2]}


def large_state() -> dict[str, Any]:
    """Several blocks, with tensors that begin and end inside of them."""
    generator = torch.Generator().manual_seed(0)
    sizes = [700_000, 300_001, 1 << 20, 5, 1_500_000]
    return {
        f"t{n}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for n, size in enumerate(sizes)
    }


def regions(header: ImageHeader) -> dict[str, tuple[int, int]]:
    return {
        "header": (0, header.data_start),
        "tensors": (header.data_start, header.skeleton_start),
        "skeleton": (header.skeleton_start, header.digests_start),
        "digests": (header.digests_start, header.nbytes),
    }


@pytest.mark.fault("flipped-bit")
def test_a_flipped_bit_in_any_byte_of_a_small_image_is_seen() -> None:
    image = memoryview(bytearray(image_of(SMALL)))
    source = MemorySource(image)

    unseen = []
    for position in range(len(image)):
        image[position] ^= 1 << position % 8
        try:
            unpack(source)
        except CorruptShardError:
            pass
        else:
            unseen.append(position)
        image[position] ^= 1 << position % 8

    assert unseen == []
    assert_same(unpack(source), SMALL)


@pytest.mark.fault("flipped-bit")
def test_a_flipped_bit_is_seen_when_tensors_are_filled_in_place() -> None:
    state = large_state()
    image = memoryview(bytearray(image_of(state)))
    header = read_header(MemorySource(image))
    target = find_targets({name: torch.empty_like(t) for name, t in state.items()})
    for start, stop in regions(header).values():
        position = (start + stop) // 2
        image[position] ^= 16

        with pytest.raises(CorruptShardError):
            ImageReader(MemorySource(image), SafeGlobals()).restore(target)

        image[position] ^= 16


@pytest.mark.fault("flipped-bit")
@pytest.mark.parametrize("region", ["header", "tensors", "skeleton", "digests"])
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_seen_in_each_region_of_an_image_of_many_blocks(
    region: str, seed: int
) -> None:
    image = image_of(large_state())
    start, stop = regions(read_header(source_of(image)))[region]
    chance = random.Random(seed)

    for position in {start, stop - 1, *(chance.randrange(start, stop) for _ in range(3))}:
        damaged = bytearray(image)
        damaged[position] ^= 1 << chance.randrange(8)
        with pytest.raises(CorruptShardError):
            unpack(source_of(damaged))


@pytest.mark.fault("torn-file")
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_a_file_cut_at_any_block_is_seen(around: int) -> None:
    image = image_of(large_state())
    header = read_header(source_of(image))
    borders = [*range(0, len(image), BLOCK_NBYTES), len(image)]
    borders += [b for region in regions(header).values() for b in region]

    for border in borders:
        cut = border + around
        if 0 <= cut < len(image):
            with pytest.raises(CorruptShardError):
                unpack(source_of(image[:cut]))


@pytest.mark.fault("torn-file")
@pytest.mark.parametrize("nbytes", [1, 7, 8, 4096, BLOCK_NBYTES + 1])
def test_zeros_at_the_end_are_seen(nbytes: int) -> None:
    image = image_of(large_state())

    image[-nbytes:] = bytes(nbytes)

    with pytest.raises(CorruptShardError):
        unpack(source_of(image))


@pytest.mark.fault("torn-file")
def test_a_file_of_zeros_is_seen() -> None:
    with pytest.raises(CorruptShardError):
        unpack(source_of(bytes(2 * BLOCK_NBYTES)))


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


@pytest.mark.fault("wrong-place")
def test_a_good_block_in_another_place_of_its_own_shard_does_not_verify() -> None:
    image = image_of(large_state())
    start = read_header(source_of(image)).digests_start
    one, two = (slice(n * BLOCK_NBYTES, (n + 1) * BLOCK_NBYTES) for n in (1, 2))

    image[one], image[two] = image[two], image[one]
    image[start + 8 : start + 16], image[start + 16 : start + 24] = (
        image[start + 16 : start + 24],
        image[start + 8 : start + 16],
    )

    with pytest.raises(CorruptShardError):
        unpack(source_of(image))


def test_blocks_of_equal_bytes_have_different_digests() -> None:
    block = bytes(1000)

    digests = {
        BlockHasher(i).digest(n, block) for i in (IDENTITY, *OTHERS.values()) for n in (0, 1)
    }

    assert len(digests) == 12


@pytest.mark.parametrize(
    "nbytes",
    [1, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 3 * BLOCK_NBYTES],
)
def test_the_digests_say_the_same_wherever_the_parts_of_a_block_lie(nbytes: int) -> None:
    hasher = BlockHasher(IDENTITY)
    image = memoryview(
        bytearray(random.Random(1).randbytes(nbytes) + bytes(digests_nbytes(nbytes)))
    )
    hasher.fill(image, nbytes)
    chance = random.Random(nbytes)

    for _ in range(20):
        cuts = sorted(chance.randrange(nbytes + 1) for _ in range(chance.randrange(6)))
        parts = [image[start:stop] for start, stop in zip([0, *cuts], [*cuts, nbytes], strict=True)]
        hasher.check(0, parts, image[nbytes:])
        image[chance.randrange(nbytes)] ^= 1
        with pytest.raises(CorruptShardError, match="do not match their digest"):
            hasher.check(0, parts, image[nbytes:])
        hasher.fill(image, nbytes)


@pytest.mark.fault("flipped-bit")
def test_the_identity_is_read_only_from_a_header_that_is_intact() -> None:
    image = image_of(SMALL)
    position = image.index(b'"iteration": "40"') + len('"iteration": "4')

    image[position] = ord("1")

    assert read_header(source_of(image)).identity.iteration == 41
    with pytest.raises(CorruptShardError, match=r"iteration 41 .* is damaged"):
        read_verified_record(source_of(image))


def test_the_identity_is_read_from_a_header_of_several_blocks() -> None:
    state = {f"a tensor with a long name {n:0200d}": torch.tensor(n) for n in range(6000)}
    source = pack(state, IDENTITY)
    assert read_header(source).data_start > BLOCK_NBYTES

    identity = read_verified_record(source).identity

    assert identity == IDENTITY
    source.view[BLOCK_NBYTES + 5] ^= 1
    with pytest.raises(CorruptShardError):
        read_verified_record(source)


@given(st.integers(1, 10 * BLOCK_NBYTES) | st.integers(1, 1 << 50))
@example(BLOCK_NBYTES)
@example(BLOCK_NBYTES + 1)
def test_the_size_of_an_image_determines_where_its_digests_begin(covered: int) -> None:
    assert covered_nbytes(covered + digests_nbytes(covered)) == covered


def test_a_damaged_shard_says_which_one_it_is() -> None:
    image = image_of(SMALL)
    image[4100] ^= 1

    with pytest.raises(CorruptShardError, match=r"iteration 40 of rank 3 \(session 'a session'"):
        unpack(source_of(image))
