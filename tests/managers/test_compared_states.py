"""States of modules and optimizers; what only one side of a load has, or in another dtype."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from localckpt import LocalCheckpointManager, MismatchError
from tests.managers.jobs import Dirs, error_of, in_job, make_manager, on_node
from tests.ranks import run_ranks


def _state(fill: float, **changed: Any) -> dict[str, Any]:
    """A state in which parts have other names, or are gone (None)."""
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, fill)
    optimizer = torch.optim.SGD(model.parameters(), lr=fill)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": StepLR(optimizer, 2),
        "epoch": int(fill),
        "run": {"best": {"loss": fill}, "names": ["a"]},
    }
    state |= {name: state.pop(old) for name, old in changed.items() if isinstance(old, str)}
    return {name: value for name, value in state.items() if changed.get(name, 0) is not None}


_OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "renamed parts": (
        _state(7.0, sched="schedule", epochs="epoch"),
        [
            *("schedule: saved, not given", "epoch: saved, not given"),
            *("sched: given, not saved", "epochs: given, not saved"),
        ],
    ),
    "a part less": (_state(7.0, schedule=None), ["schedule: saved, not given"]),
    "a value less": (_state(7.0, epoch=None), ["epoch: saved, not given"]),
    "a value more": (_state(7.0) | {"seed": 1}, ["seed: given, not saved"]),
    "a renamed value within": (
        _state(7.0) | {"run": {"best": {"score": 7.0}, "names": []}},
        ["run.best.loss: saved, not given", "run.best.score: given, not saved"],
    ),
    "a module in place of another": (
        _state(7.0) | {"model": torch.nn.Linear(2, 1, bias=False)},
        ["model.bias: saved, not given"],
    ),
}


def _save(rank: int, world_size: int) -> None:
    with on_node() as manager:
        manager.save(_state(3.0), 1)


def _load_others(rank: int, world_size: int) -> None:
    with on_node(elastic=True) as manager:
        for name, (state, told) in _OTHERS.items():
            weights = state["model"].weight.clone()

            text = error_of(lambda s=state: manager.load(into=s), MismatchError)  # type: ignore[misc]

            assert all(line in text for line in told), (name, text)
            assert torch.equal(state["model"].weight, weights), name
            assert state["optimizer"].param_groups[0]["lr"] == 7.0, name


@pytest.mark.fault("world-size")
@pytest.mark.parametrize("loaded_by", [1, 2])
def test_names_that_only_one_side_has_are_listed_and_nothing_is_changed(
    loaded_by: int, tmp_path: Path
) -> None:
    run_ranks(_save, 2, store_per_node=[tmp_path])

    run_ranks(_load_others, loaded_by, store_per_node=[tmp_path])


def test_an_empty_dict_gets_all_values_and_values_within_parts_are_returned(
    tmp_path: Path,
) -> None:
    with LocalCheckpointManager(tmp_path) as manager:
        manager.save(_state(3.0), 1)

        for run in ({}, {"best": {}, "names": [1]}, {"names": None}, None):
            loaded, _ = manager.load(into=_state(7.0) | {"run": run})

            assert loaded["run"] == {"best": {"loss": 3.0}, "names": ["a"]}


def test_partial_lets_go_of_what_is_not_given_and_logs_its_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCheckpointManager(tmp_path) as manager:
        manager.save(_state(3.0), 1)
        part = _state(7.0, schedule=None, epoch=None)
        caplog.clear()

        manager.load(into=part, partial=True)

        assert part["optimizer"].param_groups[0]["lr"] == 3.0
        (line,) = [r.getMessage() for r in caplog.records if "partial" in r.getMessage()]
        assert line.endswith(": epoch, schedule")
        with pytest.raises(MismatchError, match="seed: given, not saved"):
            manager.load(into=part | {"seed": 1}, partial=True)


def _typed(dtype: torch.dtype, fill: float) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2).to(dtype)
    torch.nn.init.constant_(model.weight, fill)
    tied = torch.full((3,), fill, dtype=dtype)
    return {
        "model": model,
        "scalar": torch.tensor(fill, dtype=dtype),
        "tied": [tied, tied],
        "free": torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters()), lambda _: 1),
    }


def _save_float32(rank: int, world_size: int) -> None:
    with on_node() as manager:
        manager.save(_typed(torch.float32, 1.0009765625), 1)


def _load_bfloat16(rank: int, world_size: int) -> None:
    state = _typed(torch.bfloat16, 7.0)
    weight, tied = state["model"].weight, state["tied"][0]
    with on_node(elastic=True) as manager:
        text = error_of(lambda: manager.load(into=state), MismatchError)
        assert re.search(r"model.weight: saved as float32 \[2, 2\], given as bfloat16", text)
        assert re.search(r"scalar: saved as float32 \[\], given as bfloat16", text)
        assert torch.equal(weight, torch.full_like(weight, 7.0))

        loaded, _ = manager.load(into=state, allow_dtype_change=True)

    assert state["model"].weight is weight
    assert loaded["tied"][0] is tied
    for tensor in (weight, loaded["scalar"], *loaded["tied"]):
        assert torch.equal(tensor, torch.full_like(tensor, 1.0))
        assert tensor.dtype is torch.bfloat16


@pytest.mark.fault("world-size")
@pytest.mark.parametrize("loaded_by", [1, 2])
def test_another_dtype_is_an_error_unless_it_is_allowed(loaded_by: int, tmp_path: Path) -> None:
    run_ranks(_save_float32, 2, store_per_node=[tmp_path])

    run_ranks(_load_bfloat16, loaded_by, store_per_node=[tmp_path])


def _save_on_nodes(rank: int, world_size: int) -> None:
    with in_job() as (manager, _):
        manager.save({"w": torch.ones(4)}, 1)


def _load_where_several_do_not_fit(rank: int, world_size: int) -> str:
    # The first node has lost its disk, so ranks send to each other what they compare.
    with in_job() as (manager, _):
        state = {"w": torch.zeros(5 if rank in (0, 2) else 4)}
        text = error_of(lambda: manager.load(into=state), MismatchError)
        assert not state["w"].any()
    return text


def test_states_that_do_not_fit_on_several_ranks_are_one_mismatch_on_all(node_dirs: Dirs) -> None:
    nodes = node_dirs(4)
    run_ranks(_save_on_nodes, 4, store_per_node=nodes)
    shutil.rmtree(nodes[0])
    nodes[0].mkdir()

    told = run_ranks(_load_where_several_do_not_fit, 4, store_per_node=nodes)

    for text in told:
        assert text.startswith("MismatchError: ")
        assert "saved as float32 [4], given as float32 [5]" in text
        # Nothing of torch's own, such as the frames of its C++ code.
        assert not re.search(r"\.cpp|frame #|Connection closed", text)


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


def _compiled(module: torch.nn.Module) -> Any:
    module[0] = torch.compile(module[0], backend="eager")  # type: ignore[operator]
    return torch.compile(module, backend="eager")


def _in_data_parallel(module: torch.nn.Module) -> Any:
    module[0] = torch.nn.DataParallel(module[0])  # type: ignore[index, operator]
    return torch.nn.DataParallel(module)


@pytest.mark.parametrize(
    ("first", "second"),
    [(lambda m: m, _compiled), (_compiled, _in_data_parallel), (_in_data_parallel, lambda m: m)],
)
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
