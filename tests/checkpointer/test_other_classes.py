"""Optimizers and parts of other classes than were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, MismatchError
from tests.checkpointer.loops import Part


class _Adam(torch.optim.AdamW):
    """A class of the program's own, with the groups of torch's."""


class _Momentum(torch.optim.SGD):
    pass


class _Counting(torch.optim.Optimizer):
    """An optimizer whose groups get a key while it trains."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class _Part(Part):
    def __init__(self) -> None:
        super().__init__(1)


class _RenamedPart(_Part):
    pass


class _OtherPart(_Part):
    def state_dict(self) -> dict[str, Any]:
        return {"other": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["other"]


def _run(place: Path, optimizer: type[Any], part: type[_Part], steps: int) -> int:
    """Train some steps from where the nodes have them; returns the first one."""
    model = torch.nn.Linear(2, 2)
    made = optimizer(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": made, "part": part()}
    weights = [p.detach().clone() for p in model.parameters()]
    with Checkpointer(state, local=place, every=1) as checkpointer:
        try:
            first = checkpointer.resume()
        except MismatchError:
            # Nothing was changed.
            assert all(map(torch.equal, weights, model.parameters()))
            assert state["part"].value == 1
            raise
        for step in range(first, steps):
            model(torch.ones(2)).sum().backward()
            made.step()
            checkpointer.step(step)
    return first


@pytest.mark.parametrize(
    ("saved", "given"),
    [(_Adam, _Momentum), (_Momentum, _Counting), (torch.optim.AdamW, torch.optim.Adam)],
)
def test_an_optimizer_of_another_class_is_an_error_that_names_both(
    saved: type[Any], given: type[Any], tmp_path: Path
) -> None:
    _run(tmp_path, saved, _Part, 2)

    with pytest.raises(MismatchError) as caught:
        _run(tmp_path, given, _Part, 4)

    for kind in (saved, given):
        assert f"as optimizer {kind.__module__}.{kind.__qualname__}" in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "given"),
    [(_Momentum, torch.optim.SGD), (torch.optim.AdamW, _Adam), (_Counting, _Counting)],
)
def test_an_optimizer_that_was_renamed_goes_on(
    saved: type[Any], given: type[Any], tmp_path: Path
) -> None:
    _run(tmp_path, saved, _Part, 2)

    assert _run(tmp_path, given, _Part, 4) == 2


def test_a_part_of_another_class_is_an_error_unless_its_state_has_the_same_keys(
    tmp_path: Path,
) -> None:
    _run(tmp_path, _Momentum, _Part, 2)

    with pytest.raises(MismatchError) as caught:
        _run(tmp_path, _Momentum, _OtherPart, 4)
    assert _run(tmp_path, _Momentum, _RenamedPart, 4) == 2

    assert "_Part, given as part" in str(caught.value)
    assert "saved, not given: value; given, not saved: other" in str(caught.value)
