"""Tensors that the ranks of a node have equal are saved once a node, and come back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from tests.managers.jobs import assert_same, on_node, save
from tests.ranks import on_ranks
from tests.scenarios import Begin


def _common(iteration: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(iteration)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    embedding = normal(1009, 37)
    return {
        "embedding": embedding,
        "head": embedding.detach(),
        "seven": normal(7, 9001),
        "one_row": normal(1, 40_000),
        "half": normal(3, 40_000).to(torch.bfloat16),
        "transposed": normal(150, 300).t(),
        "channels_last": normal(33, 5, 16, 16).to(memory_format=torch.channels_last),
        "complex": torch.complex(normal(99, 150), normal(99, 150)),
        "parameter": torch.nn.Parameter(normal(64, 1000)),
        "small": normal(5),
        "scalar": torch.tensor(float(iteration)),
        "empty": torch.zeros(0, 7),
    }


def _state(rank: int, iteration: int) -> dict[str, Any]:
    own = torch.Generator().manual_seed(1000 * iteration + rank)
    common = _common(iteration)
    # A view that is computed when it is read.
    common["complex"] = common["complex"].conj().resolve_conj().conj()
    return {
        "model": localckpt.replicated(common),
        "private": torch.randn(200 + rank, 100, generator=own),
        "rank": rank,
    }


def _expected(rank: int, iteration: int) -> dict[str, Any]:
    return {**_state(rank, iteration), "model": _common(iteration)}


def _zeros(rank: int) -> dict[str, Any]:
    state = _state(rank, 1)
    model = {
        key: torch.zeros_like(value, requires_grad=value.requires_grad)
        for key, value in _common(1).items()
    }
    model["parameter"] = torch.nn.Parameter(model["parameter"].detach())
    model["head"] = model["embedding"].detach()
    return {**state, "model": model, "private": torch.zeros_like(state["private"]), "rank": -1}


def _nbytes(state: Any) -> int:
    # Tied to another one.
    tensors = [t for key, t in state["model"].items() if key != "head"]
    return sum(t.numel() * t.itemsize for t in tensors)


def _require_loads(manager: Any, rank: int, iteration: int) -> str:
    """Load into new tensors and in place; where the shard came from."""
    state, _ = manager.load()
    assert_same(state, _expected(rank, iteration))
    assert state["model"]["head"].data_ptr() == state["model"]["embedding"].data_ptr()
    source = str(manager.last_load.source)
    into = _zeros(rank)
    kept = into["model"]["seven"]
    filled, _ = manager.load(into=into)
    assert filled["model"]["seven"] is kept
    assert_same(filled["model"], _common(iteration))
    assert_same(filled["private"], _expected(rank, iteration)["private"])
    return source


def _save_once(rank: int, world_size: int) -> None:
    with (
        on_node("once", divide_replicated=True) as manager,
        localckpt.AsyncCallsQueue() as queue,
    ):
        save(manager, _state(rank, 3), 3)
        _require_loads(manager, rank, 3)
        save(manager, _state(rank, 4), 4, queue)
        _require_loads(manager, rank, 4)
        nbytes = int(manager.last_save.nbytes)
    with on_node("once") as manager:
        # It need not divide what it saves itself.
        assert manager.find_latest() == 4
        assert _require_loads(manager, rank, 4) == "own node"
        save(manager, _state(rank, 5), 5)
        _require_loads(manager, rank, 5)
        assert int(manager.last_save.nbytes) > 2 * nbytes
    written, private = torch.tensor([nbytes, _expected(rank, 4)["private"].nbytes])
    for total in (written, private):
        dist.all_reduce(total)
    least = _nbytes(_expected(0, 4)) + private
    assert least < written < 1.1 * least


@on_ranks(3, nodes=1, after=(_save_once, 4))
def test_four_ranks_of_a_node_write_what_they_have_equal_once_and_others_put_it_together(
    rank: int,
) -> None:
    model = _zeros(rank)["model"]
    into = {"model": localckpt.replicated(model), "private": None, "rank": 0}
    rules = {"private": "drop", "rank": "drop"}
    with on_node("once", elastic=True, private=rules) as manager:
        manager.load(into=into, iteration=4)
    assert_same(model, _common(4))


def _load_with_lost(manager: Any, lost: int, told: str) -> None:
    assert manager.find_latest() == 3
    source = _require_loads(manager, manager.rank, 3)
    assert (told if manager.rank // 2 == lost else "own node") in source
    # What is saved next descends from it.
    save(manager, _state(manager.rank, 4), 4)
    _require_loads(manager, manager.rank, 4)


@pytest.mark.parametrize(
    ("nodes", "redundancy", "told"), [(2, (2, 2), "peer"), (3, "parity 1 of 3", "parity")]
)
def test_what_a_lost_node_held_comes_from_its_peers(
    nodes: int, redundancy: Any, told: str, job: Begin
) -> None:
    options = {"ranks": 2 * nodes, "redundancy": redundancy, "divide_replicated": True}
    saved = job(nodes=nodes, timeout=120.0, state=_state, **options).save(3)

    saved.lose(nodes - 1).call(_load_with_lost, nodes - 1, told).run()


@on_ranks(2, nodes=1)
def test_parts_that_do_not_fit_together_are_never_a_checkpoint(rank: int) -> None:
    def state(width: int) -> dict[str, Any]:
        return {"model": localckpt.replicated({"weight": torch.ones(200 + width, 100)})}

    odd = int(rank == 1)
    with on_node("first", divide_replicated=True) as manager:
        # What does not fit together is seen before anything is saved: each rank saves it whole.
        save(manager, state(odd), 1)
        loaded, _ = manager.load()
        assert loaded["model"]["weight"].shape == (200 + odd, 100)
    with on_node("later", divide_replicated=True) as manager:
        save(manager, state(0), 1)
        with pytest.raises(localckpt.SaveFailedError, match=r"ranks 0 and 1 were to divide"):
            save(manager, state(odd), 2)
        save(manager, state(odd), 3)
        loaded, _ = manager.load()
        assert loaded["model"]["weight"].shape == (200 + odd, 100)
