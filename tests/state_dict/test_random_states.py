"""States drawn at random come back as they were: none of thousands is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.targets import find_targets
from tests.state_dict.states import ALLOWED, IDENTITY
from tests.state_dict.zoo import Zoo, assert_same_state, tensors_of

pytestmark = [
    pytest.mark.fault("hard-state"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_SHORT, _BLOCK, _BLOCKS = 120, 300, 10


def _wrong(seed: int, planner: ImagePlanner) -> str | None:
    """What is wrong of the state of a seed: loaded, and loaded into a state like it."""
    state = Zoo(seed).state()
    image = pack(state, IDENTITY, planner)
    try:
        assert_same_state(unpack(image, allowed=ALLOWED), state)
        given = Zoo(seed).state()
        for tensor in tensors_of(given):
            if not tensor.is_meta:
                tensor.untyped_storage().fill_(0)
        loaded = ImageReader(image, ALLOWED).restore(find_targets(given))
        assert_same_state(loaded, state)
    except AssertionError as error:
        return f"seed {seed}: {error!r}"
    return None


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, _BLOCKS))]
)
def test_no_random_state_that_one_planner_saves_comes_back_wrong(
    block: int, long_form: bool, record_property: Any
) -> None:
    seeds = range(block * _BLOCK, (block + 1) * _BLOCK) if long_form else range(_SHORT)

    planner = ImagePlanner(ALLOWED)
    wrong = [told for seed in seeds if (told := _wrong(seed, planner)) is not None]

    record_property("cases", len(seeds))
    assert wrong == []
