"""The layout is computed once, and again only when the structure of the state changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from localckpt.state_dict.image import ImagePlanner, pack, unpack
from tests.state_dict.states import IDENTITY, assert_same, source_of, written


def state() -> dict[str, Any]:
    storage = torch.rand(20)
    return {
        "weight": torch.rand(3, 4),
        "tied": storage[:10],
        "view": storage[5:15],
        "step": torch.tensor(1.0),
        "note": {"iteration": 1},
    }


def save(planner: ImagePlanner, given: Any) -> None:
    """Saves, and checks that what was saved is what was given."""
    assert_same(unpack(pack(given, IDENTITY, planner)), given)


def test_one_layout_serves_while_only_values_change(layouts: list[Any]) -> None:
    planner, given = ImagePlanner(), state()
    for iteration in range(5):
        given["weight"].add_(1)
        given["note"] = {"iteration": 10**iteration, "text": "x" * iteration}

        save(planner, given)

    assert len(layouts) == 1


def test_one_layout_serves_new_tensors_of_the_same_structure(layouts: list[Any]) -> None:
    planner = ImagePlanner()

    for _ in range(3):
        save(planner, state())

    assert len(layouts) == 1


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a new tensor": lambda s: s.update(extra=torch.ones(1)),
    "a tensor less": lambda s: s.pop("weight"),
    "another name": lambda s: s.update(renamed=s.pop("step")),
    "another shape": lambda s: s.update(weight=torch.rand(4, 3)),
    "another dtype": lambda s: s.update(weight=torch.rand(3, 4).half()),
    "the same bytes as another dtype": lambda s: s.update(step=torch.tensor(1, dtype=torch.int32)),
    "other strides": lambda s: s.update(weight=torch.rand(4, 3).t()),
    "other order": lambda s: s.update(weight=s.pop("weight")),
    "tied no more": lambda s: s.update(tied=s["tied"].clone()),
    "tied anew": lambda s: s.update(weight=s["tied"][:6]),
    "another offset": lambda s: s.update(view=s["tied"]._base[3:13]),
    "another stride": lambda s: s.update(tied=s["tied"]._base[::2]),
    "a tensor twice": lambda s: s.update(again=s["weight"]),
    "requires grad": lambda s: s["weight"].requires_grad_(),
    "a parameter": lambda s: s.update(weight=torch.nn.Parameter(s["weight"])),
    "a buffer": lambda s: s.update(weight=torch.nn.Buffer(s["weight"])),
    "another device": lambda s: s.update(weight=torch.empty(3, 4, device="meta")),
    "a conjugated view": lambda s: s.update(weight=torch.ones(3, 4, dtype=torch.complex64).conj()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_new_structure_is_saved_right_with_one_new_layout_and_so_is_the_old_one_after_it(
    layouts: list[Any], name: str
) -> None:
    planner, given = ImagePlanner(), state()
    save(planner, given)

    CHANGES[name](given)
    save(planner, given)
    save(planner, given)
    made = len(layouts)
    save(planner, state())

    # A tensor in another place as well has no bytes of its own.
    assert (made, len(layouts)) == ((1, 1) if name == "a tensor twice" else (2, 3))


def test_a_capture_outlives_the_plan_it_was_made_by() -> None:
    planner, given = ImagePlanner(), state()
    first = planner.capture(given)

    planner.capture({"other": torch.ones(7)})

    assert_same(unpack(source_of(written(first))), given)
