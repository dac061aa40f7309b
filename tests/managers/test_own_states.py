"""Values with states of their own in a state, and loading into a part of what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt.errors import MismatchError
from tests.managers.jobs import make_manager


class Counter:
    """Has a state of its own, as a data loader has."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    # Tied, as an embedding and the last layer are.
    model[1].weight = model[0].weight
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
        "loader": Counter(seed),
        "step": seed,
    }


def _train(job: dict[str, Any]) -> torch.Tensor:
    loss = job["model"](torch.ones(2, 3)).pow(2).sum()
    loss.backward()
    job["optimizer"].step()
    job["optimizer"].zero_grad()
    return torch.nn.utils.parameters_to_vector(job["model"].parameters()).detach().clone()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A store, and the job that was saved there."""
    job = _job(5)
    _train(job)
    with make_manager("disk", tmp_path, "run") as manager:
        manager.save(job, 1)
    return tmp_path, job


def test_models_and_optimizers_are_saved_as_their_states_and_take_them_again(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    root, job = saved
    other = _job(6)
    weight = other["model"][0].weight

    with make_manager("disk", root, "run") as manager:
        manager.find_latest()
        loaded, _ = manager.load(into=other)

    assert loaded["model"] is other["model"]
    assert loaded["optimizer"] is other["optimizer"]
    assert other["loader"].count == 5
    assert loaded["step"] == 5
    assert other["model"][0].weight is weight
    assert torch.equal(_train(other), _train(job))


def test_without_into_the_states_themselves_come_back(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    root, job = saved

    with make_manager("disk", root, "run") as manager:
        manager.find_latest()
        loaded, _ = manager.load()

    assert loaded["loader"] == {"count": 5}
    other = _job(7)
    other["model"].load_state_dict(loaded["model"])
    other["optimizer"].load_state_dict(loaded["optimizer"])
    assert torch.equal(_train(other), _train(job))


def test_a_part_of_a_state_is_filled_in_place_and_the_rest_comes_back_new(tmp_path: Path) -> None:
    whole = {
        "model": torch.nn.Linear(2, 2).state_dict(),
        "averages": {"a": torch.arange(3.0), "b": torch.arange(4.0)},
    }
    whole["tied"] = whole["model"]["weight"].view(4)
    part = {"averages": {"b": torch.zeros(4)}}

    with make_manager("disk", tmp_path, "run") as manager:
        manager.save(whole, 1)
        manager.find_latest()
        with pytest.raises(MismatchError, match=r"averages\.a: saved, not given"):
            manager.load(into=part)
        loaded, _ = manager.load(into=part, partial=True)

    assert loaded["averages"]["b"] is part["averages"]["b"]
    assert part["averages"]["b"].tolist() == [0, 1, 2, 3]
    assert loaded["averages"]["a"].tolist() == [0, 1, 2]
    assert torch.equal(loaded["model"]["weight"], whole["model"]["weight"])
    assert loaded["tied"].data_ptr() == loaded["model"]["weight"].data_ptr()


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"b": torch.zeros(5)}, r"b: saved as float32 \[4\], given as float32 \[5\]"),
        ({"c": torch.zeros(4)}, "c: given, not saved"),
    ],
    ids=["another shape", "another name"],
)
def test_a_part_that_was_not_saved_so_is_refused_and_left_as_it_is(
    part: dict[str, torch.Tensor], why: str, tmp_path: Path
) -> None:
    with make_manager("disk", tmp_path, "run") as manager:
        manager.save({"a": torch.ones(3), "b": torch.ones(4)}, 1)
        manager.find_latest()

        with pytest.raises(MismatchError, match=why):
            manager.load(into=part, partial=True)

    assert not any(tensor.any() for tensor in part.values())


def _compiled(module: torch.nn.Module) -> Any:
    module[0] = torch.compile(module[0], backend="eager")  # type: ignore[operator]
    return torch.compile(module, backend="eager")


def _in_data_parallel(module: torch.nn.Module) -> Any:
    module[0] = torch.nn.DataParallel(module[0])  # type: ignore[index, operator]
    return torch.nn.DataParallel(module)


@pytest.mark.parametrize("first", [lambda m: m, _compiled, _in_data_parallel])
@pytest.mark.parametrize("second", [lambda m: m, _compiled, _in_data_parallel])
def test_modules_take_states_that_were_saved_with_other_wrappers(
    first: Any, second: Any, tmp_path: Path
) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    saved, other = first(model()), second(model())

    with make_manager("disk", tmp_path) as manager:
        manager.save({"model": saved}, 1)
        manager.load(into={"model": other})

    for one, same in zip(saved.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
