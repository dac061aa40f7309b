"""Captured states are judged behind training, and bad ones are not resumed from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.state_dict.replica_digests import find_not_finite
from tests.checkpointer.loops import stores
from tests.cli.commands import call
from tests.managers.jobs import MAX_S, error_of
from tests.ranks import node_store, run_ranks

_NAN, _INF = math.nan, math.inf


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
        # Masks have infinite values.
        self.register_buffer("mask", torch.full((4,), -_INF))


def _run(
    local: Path, steps: int, bad: Mapping[int, float], *, rank: int = 0, **options: Any
) -> tuple[int, list[int]]:
    """A start whose weight gets a value in some steps on rank 0; its first, and what there is."""
    model = _Model()
    state = {"model": model}
    usual = {"every": localckpt.Every(steps=2), "finite": True, "timeout_s": MAX_S}
    with localckpt.Checkpointer(state, local=local, **(usual | options)) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, first + steps):
            with torch.no_grad():
                model.layer.weight.fill_(1.0)
                if rank == 0:
                    model.layer.weight[3, 5] = bad.get(step, 1.0)
            checkpointer.step(step)
            checkpointer.wait_until_finished()
        return first, checkpointer.manager.all_iterations()


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_a_single_value_that_is_not_finite_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    good = torch.ones(3, 5)
    values = [_NAN] if dtype == torch.float8_e4m3fn else [_NAN, _INF, -_INF]

    for value in values:
        spoiled = good.clone()
        spoiled[2, 4] = value
        told = find_not_finite({"good": good.to(dtype), "spoiled": spoiled.to(dtype)})
        assert told == f"spoiled has the value {value}"
    assert find_not_finite({"good": good.to(dtype), "none": torch.empty(0, dtype=dtype)}) is None
    assert find_not_finite({"numbers": torch.tensor([1, 2]), "flags": torch.tensor([True])}) is None


def test_a_value_beyond_the_first_piece_is_found() -> None:
    large = torch.zeros(5_000_000)
    large[-1] = _INF

    assert find_not_finite({"large": large}) == "large has the value inf"


def test_a_bad_checkpoint_is_marked_and_an_older_one_is_taken_however_many_are_bad(
    tmp_path: Path, caplog: Any
) -> None:
    first, there = _run(tmp_path, 12, dict.fromkeys(range(5, 12), _NAN), keep_last=2)
    shown = call("explain", tmp_path).out

    # Of 1 to 11, the last two that are sound, and the newest of the others as the last resort.
    assert (first, there) == (0, [3, 1, 11])
    assert "iteration 5 is marked bad: rank 0: model.layer.weight has the value nan" in caplog.text
    assert "A restart loads iteration 3 " in shown
    assert "Iteration 11 is marked bad: rank 0: model.layer.weight has the value nan." in shown
    assert "1 rank) is newer, and would be taken only if there were no other." in shown
    assert "lacks" not in shown
    # A sound one that is newer makes it go.
    assert _run(tmp_path, 8, {}, keep_last=2) == (4, [11, 9])


def test_a_bad_checkpoint_is_taken_if_there_is_no_other(tmp_path: Path, caplog: Any) -> None:
    _run(tmp_path, 2, {1: _INF})

    assert _run(tmp_path, 0, {})[0] == 2
    assert "the nodes have none that is not" in caplog.text


def test_a_bad_state_does_not_go_to_shared_storage_and_gives_way_to_what_is_there(
    tmp_path: Path,
) -> None:
    shared = {"shared": tmp_path / "shared", "shared_every": localckpt.Every(steps=4)}
    _run(tmp_path / "a", 4, {}, **shared)

    _run(tmp_path / "b", 8, dict.fromkeys(range(12), _NAN), **shared)

    assert _run(tmp_path / "b", 0, {}, **shared)[0] == 4


def test_the_caller_has_a_check_of_its_own_and_its_error_fails_the_save(tmp_path: Path) -> None:
    def check(tensors: Mapping[str, torch.Tensor]) -> str | None:
        assert tensors["model.layer.weight"].shape == (8, 8)
        return "too large" if tensors["model.layer.weight"].max() > 1e6 else None

    def broken(tensors: Mapping[str, torch.Tensor]) -> str | None:
        raise ValueError("no such tensor")

    assert _run(tmp_path, 4, {3: 1e7}, check=check) == (0, [1, 3])
    assert "is marked bad: rank 0: too large." in call("explain", tmp_path).out
    told = error_of(lambda: _run(tmp_path, 2, {}, check=broken, on_error="raise"))
    assert "the check of the state raised ValueError: no such tensor" in told


def _on_rank(rank: int, world_size: int, steps: int, bad: dict[int, float]) -> Any:
    return _run(node_store(), steps, bad, rank=rank)


def test_what_one_rank_finds_holds_on_all_also_without_its_node(tmp_path: Path) -> None:
    nodes = stores(tmp_path, 2)
    run_ranks(_on_rank, 2, 6, {5: _NAN}, store_per_node=nodes)

    # Rank 0 comes back on a node that has lost its notes.
    for note in nodes[0].rglob(".notes"):
        note.unlink()
    found = run_ranks(_on_rank, 2, 0, {}, store_per_node=nodes)

    assert found == [(4, [3, 1, 5])] * 2
