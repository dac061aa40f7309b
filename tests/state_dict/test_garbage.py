"""Large states do not make Python look through all objects of the trainer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from localckpt.errors import CheckpointingException
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from tests.state_dict.states import IDENTITY


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations of the collections that have run."""
    run: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            run.append(info["generation"])

    gc.callbacks.append(note)
    yield run
    gc.callbacks.remove(note)


def test_saving_and_loading_many_tensors_collects_no_garbage(collections: list[int]) -> None:
    planner = ImagePlanner()
    state = {f"tensor.{n}": torch.tensor(n) for n in range(3000)}
    assert gc.isenabled()
    gc.collect()
    collections.clear()

    planner.capture(state)
    at_capture = len(collections)
    image = pack(state, IDENTITY, planner)
    collections.clear()
    loaded = unpack(image)

    # Thousands of objects set off a collection each 700; here it is once, when all are there.
    assert at_capture <= 1
    assert len(collections) <= 2
    assert gc.isenabled()
    assert [int(tensor) for tensor in loaded.values()] == list(range(3000))


def test_the_collector_is_as_it_was_also_after_an_error() -> None:
    with pytest.raises(CheckpointingException):
        ImagePlanner().capture({"cannot be pickled": lambda: None})
    assert gc.isenabled()

    gc.disable()
    try:
        ImagePlanner().capture({"tensor": torch.zeros(1)})
        assert not gc.isenabled()
    finally:
        gc.enable()
