"""Values beside plain tensors: what load would refuse, save refuses; the rest comes back."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import CheckpointingException
from tests.global_tier.models import blank, manager_on
from tests.global_tier.states import assert_same


class OwnTensor(torch.Tensor):
    """A tensor of a class of the user's."""


class Fails:
    """Allowed, and cannot be rebuilt."""

    def __setstate__(self, state: object) -> None:
        raise KeyError("a field that was renamed")

    def __getstate__(self) -> dict[str, int]:
        return {"old": 1}


_OF_OWN_CLASS = torch.ones(3).as_subclass(OwnTensor)


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(lambda: collections.deque([1, 2]), "deque", id="deque"),
        pytest.param(lambda: 1 << 3000, "more than 255 bytes", id="integer"),
        pytest.param(lambda: (1, 1 << 3000), "more than 255 bytes", id="integer in a tuple"),
        pytest.param(Fails, "a field that was renamed", id="object that cannot be rebuilt"),
        pytest.param(_quantized, "dequantize", id="quantized tensor"),
        pytest.param(lambda: _OF_OWN_CLASS, "OwnTensor", id="tensor of a class"),
    ],
)
def test_what_load_would_refuse_is_refused_when_it_is_saved(
    make: Callable[[], object], told: str, tmp_path: Path
) -> None:
    allowed = [collections.deque, Fails]
    with manager_on(tmp_path, safe_globals=allowed) as manager:
        manager.save({"w": torch.ones(2)}, 1, is_async=False)

        with pytest.raises(CheckpointingException, match=told):
            manager.save({"w": torch.ones(2), "it": make()}, 2, is_async=False)

        assert manager.find_latest() == 1
        manager.save({"w": torch.ones(2)}, 2, is_async=False)
        assert manager.find_latest() == 2


def test_values_under_keys_that_are_no_text_come_back_under_them(tmp_path: Path) -> None:
    def state() -> dict[Any, Any]:
        return {
            "steps": {5: 1.5, 0: "first", -3: None, True: 7, 2.5: [1], (1, 2): (3, 4)},
            "state": {12: {"step": 3, "moment": torch.arange(4.0)}, 7: {"step": 4}},
            "list": [{3: {4: "deep"}}, torch.ones(1)],
            9: "at the top",
        }

    with manager_on(tmp_path) as manager:
        manager.save(state(), 1, is_async=False)
        found = blank(state())
        manager.load(into=found)

    assert_same(found, state())


def test_a_tensor_of_an_allowed_class_comes_back_and_the_program_has_allowed_no_more_by_that(
    tmp_path: Path,
) -> None:
    with torch.serialization.safe_globals([Path, collections.deque]):
        before = set(torch.serialization.get_safe_globals())
        with manager_on(tmp_path, safe_globals=[collections.deque, OwnTensor]) as manager:
            manager.save({"it": _OF_OWN_CLASS, "pair": (1, 2)}, 1, is_async=False)
            state = {"it": torch.zeros(3).as_subclass(OwnTensor), "pair": None}
            manager.load(into=state)

        assert torch.equal(state["it"].as_subclass(torch.Tensor), torch.ones(3))
        assert state["pair"] == (1, 2)
        assert set(torch.serialization.get_safe_globals()) == before
