"""Parts of a state: what can be one, and what a load does to tensors that are there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import localckpt
from localckpt import CheckpointingException, MismatchError
from localckpt.checkpointer.parts import ModulePart, RandomPart


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "there is nothing to save"),
        ({"epoch": 3}, "'epoch' of the training state is a int"),
        ({"epoch": localckpt.replicated(3)}, "'epoch' of the training state is a int"),
        ({"epoch": (1, 2)}, "'epoch' of the training state is a tuple"),
        ({"m": None}, "'m' of the training state is None: leave it out"),
        ({"m": torch.nn.Linear(1, 1).state_dict()}, "give the module or the optimizer itself"),
        ({"localckpt": torch.nn.Linear(1, 1)}, "choose another name"),
        ([torch.nn.Linear(1, 1)], "the training state is a list: give a dict of parts by name"),
        (torch.nn.Linear(1, 1), "the training state is a Linear: give a dict of parts by name"),
        ({3: torch.nn.Linear(1, 1)}, "must be a name"),
        ({"rng": torch.nn.Linear(1, 1)}, "rng=False leaves them out"),
    ],
)
def test_what_is_no_part_is_refused_by_name(state: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=told):
        localckpt.Checkpointer(state, local=tmp_path)


def _blocks() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), torch.nn.Linear(2, 2)
    )


def _compiled_by_blocks() -> torch.nn.Sequential:
    module = _blocks()
    module[0][0] = torch.compile(module[0][0], backend="eager")
    module[0] = torch.compile(module[0], backend="eager")
    return module


def _compiled_in_place() -> torch.nn.Sequential:
    module = _blocks()
    module[0].compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_blocks, _compiled_by_blocks),
        (_compiled_in_place, lambda: torch.compile(_compiled_by_blocks(), backend="eager")),
    ],
)
def test_blocks_may_be_compiled_otherwise_at_the_next_start(
    first: Callable[[], Any], second: Callable[[], Any], tmp_path: Path
) -> None:
    model = first()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with localckpt.Checkpointer({"model": model, "optimizer": optimizer}, local=tmp_path) as made:
        made.resume()
        model(torch.eye(2)).square().sum().backward()
        optimizer.step()
        made.step(0)
        made.save(0)
    other = second()
    again = torch.optim.AdamW(other.parameters(), lr=0.1)

    with localckpt.Checkpointer({"model": other, "optimizer": again}, local=tmp_path) as made:
        assert made.resume() == 1

    pairs = zip(model.parameters(), other.parameters(), strict=True)
    for one, same in pairs:
        assert torch.equal(one, same)
        assert torch.equal(optimizer.state[one]["exp_avg"], again.state[same]["exp_avg"])


def test_a_value_that_only_the_checkpoint_has_is_an_error_that_names_it() -> None:
    part = ModulePart(torch.nn.Linear(2, 2))

    with pytest.raises(MismatchError, match="1 values that Linear has not: scale"):
        part.load_state_dict({**part.state_dict(), "scale": torch.ones(1)})


class _Counting(torch.nn.Module):
    """A module with an extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_tensors_are_filled_where_they_are_and_extra_states_are_taken(tmp_path: Path) -> None:
    module = _Counting()
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        module.weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        module.count += 1

    with localckpt.Checkpointer({"model": module, "optimizer": optimizer}, local=tmp_path) as made:
        made.resume()
        step()
        made.save(0)
    saved, moments = module.weight.detach().clone(), optimizer.state[module.weight]["exp_avg"]
    expected = moments.clone()
    step()
    weight_at, moments_at = module.weight.data_ptr(), moments.data_ptr()

    with localckpt.Checkpointer({"model": module, "optimizer": optimizer}, local=tmp_path) as made:
        assert made.resume() == 1

    assert torch.equal(module.weight, saved)
    assert torch.equal(optimizer.state[module.weight]["exp_avg"], expected)
    assert module.weight.data_ptr() == weight_at
    assert optimizer.state[module.weight]["exp_avg"].data_ptr() == moments_at
    assert module.count == 1


def test_all_generators_go_on_as_they_were() -> None:
    part = RandomPart()
    saved = part.state_dict()
    drawn = (random.random(), torch.rand(3).tolist(), numpy.random.rand(3).tolist())

    part.load_state_dict(saved)

    assert drawn == (random.random(), torch.rand(3).tolist(), numpy.random.rand(3).tolist())


def test_generators_are_rewound_to_what_was_loaded(tmp_path: Path) -> None:
    values = torch.nn.Linear(1, 1)
    with localckpt.Checkpointer({"values": values}, local=tmp_path) as made:
        made.rewind_random()
        made.resume()
        made.step(0)
        made.save(0)
        drawn = torch.rand(3)

    with localckpt.Checkpointer({"values": values}, local=tmp_path) as made:
        made.resume()
        # As the iterator of a data loader does.
        torch.rand(1)
        made.rewind_random()

        assert torch.equal(torch.rand(3), drawn)


# Values by name.


def _save_values(place: Path, run: localckpt.Values) -> None:
    with localckpt.Checkpointer({"run": run}, local=place, every=1) as checkpointer:
        assert checkpointer.resume() == 0
        checkpointer.step(0)


def test_a_value_that_was_renamed_added_or_removed_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    _save_values(tmp_path, localckpt.Values(epoch=5, best=1.0))

    for given in ({"epoch": 0, "top": 2.0}, {"epoch": 0}, {"epoch": 0, "best": 2.0, "new": 1}):
        run = localckpt.Values(**given)
        with (
            localckpt.Checkpointer({"run": run}, local=tmp_path) as checkpointer,
            pytest.raises(MismatchError) as caught,
        ):
            checkpointer.resume()
        assert run.state_dict() == given
        for name in {"epoch", "best"} ^ given.keys():
            assert name in str(caught.value)
    run = localckpt.Values(epoch=0, top=2.0)
    with localckpt.Checkpointer({"run": run}, local=tmp_path) as checkpointer:
        assert checkpointer.resume(partial=True) == 1
    assert run.state_dict() == {"epoch": 5, "top": 2.0}


def test_names_are_fixed_and_none_hides_a_method() -> None:
    run = localckpt.Values(epoch=0)

    with pytest.raises(AttributeError, match=r"no value 'epohc' \(there are epoch\)"):
        run.epohc = 1
    with pytest.raises(CheckpointingException, match=r"state_dict=\.\.\.\): a method"):
        localckpt.Values(state_dict=1)
