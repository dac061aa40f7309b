"""The front door goes on from the nodes with another number of ranks, one node lost or not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt import Checkpointer, Every
from tests.checkpointer.loops import full_weights, stores, train
from tests.ranks import node_store, run_ranks

_S = 120.0


@pytest.mark.fault("world-size")
def test_another_number_of_ranks_goes_on_from_the_nodes_with_one_of_them_lost(
    tmp_path: Path,
) -> None:
    nodes, options = stores(tmp_path, 4), {"every": Every(steps=2)}
    run_ranks(train, 4, "fsdp2", 10, options, store_per_node=nodes, timeout_s=_S)

    as_saved = run_ranks(full_weights, 4, options, store_per_node=nodes, timeout_s=_S)
    refused = run_ranks(full_weights, 3, options, store_per_node=nodes[1:], timeout_s=_S)
    dropping = {**options, "on_resize": "drop"}
    found = run_ranks(full_weights, 3, dropping, store_per_node=nodes[1:], timeout_s=_S)

    for text in refused:
        assert "'loader.order', 'loader.generator' is a place in the data" in text
        assert "on_resize='drop'" in text
    assert found == [as_saved[0]] * 3
    assert found[0].startswith("10 ")


class _Position:
    """A loader without a tensor when it is made, which takes a whole state only."""

    def __init__(self) -> None:
        self.at = self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor([self.at]), "parts": {"epoch": self.at}} if self.at else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.calls = int(state["at"][0]), self.calls + 1
        assert state["parts"] == {"epoch": self.at}


def _dropping(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts of a job, each value of which is read from and put into a dict."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    parts: dict[str, Any] = {
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        **{name: _Position() for name in ("own", "alike")},
        "number": (lambda: values["number"], lambda value: values.update(number=value)),
    }
    return parts, values


def _save_positions(rank: int, world_size: int) -> None:
    parts, _ = _dropping({"number": 5})
    parts["own"].at, parts["alike"].at = 3 + rank, 3
    with Checkpointer(parts, local=node_store(), timeout_s=_S) as checkpointer:
        checkpointer.resume()
        parts["schedule"].optimizer.step()
        parts["schedule"].step()
        checkpointer.step(0)
        checkpointer.save(0)
        dist.barrier()


def _load_positions(rank: int, world_size: int) -> tuple[Any, ...]:
    parts, values = _dropping({"number": 0})
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("localckpt.managers.elastic").addHandler(handler)
    marked = parts | {"schedule": localckpt.replicated(parts["schedule"])}
    options: dict[str, Any] = {"timeout_s": _S, "on_resize": "drop"}
    with Checkpointer(marked, local=node_store(), **options) as checkpointer:
        assert checkpointer.resume() == 1
    assert parts["schedule"].get_last_lr() == [0.5]
    assert (parts["alike"].at, parts["alike"].calls, values["number"]) == (3, 1, 5)
    return parts["own"].at, parts["own"].calls, lines


@pytest.mark.parametrize(
    ("saved_by", "at", "dropped"),
    [(2, 0, ["which differ in 'own': dropped"]), (1, 3, [])],
    ids=["differs", "of a single rank"],
)
def test_only_what_differs_is_dropped_by_name_and_its_part_is_not_called(
    saved_by: int, at: int, dropped: list[str], tmp_path: Path
) -> None:
    run_ranks(_save_positions, saved_by, store_per_node=[tmp_path], timeout_s=_S)

    found = run_ranks(_load_positions, 3, store_per_node=[tmp_path], timeout_s=_S)

    assert [outcome[:2] for outcome in found] == [(at, int(at > 0))] * 3
    lines = found[0][2]
    assert len(lines) == len(dropped)
    assert all(text in line for text, line in zip(dropped, lines, strict=True))
    assert not any("alike" in line for line in lines)
