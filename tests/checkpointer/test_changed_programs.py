"""A program that changed since it saved says by name what is resumed, and what is let go."""

from __future__ import annotations

import collections
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from localckpt import (
    Checkpointer,
    Elsewhere,
    MismatchError,
    NoReplicasAvailableError,
)
from tests.checkpointer.loops import Part, resume_once, save_once
from tests.managers.jobs import error_of
from tests.ranks import node_store, on_ranks, same_on_all

_S = 20.0


def _net(
    fill: float, *, head: bool = False, sharded: int = 0, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    net = torch.nn.Sequential()
    net.add_module("body", torch.nn.Linear(4, 4))
    net.add_module("tied", torch.nn.Linear(4, 4, bias=False))
    net.tied.weight = net.body.weight
    if head:
        net.add_module("head", torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(fill)
    _shard(net.to(dtype), sharded)
    return net


def _shard(net: torch.nn.Module, ranks: int) -> None:
    if ranks:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))


def _fill(parameter: Any) -> float:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    (value,) = set(whole.flatten().tolist())
    return float(value)


def _state(rank: int, fill: float, *, sharded: int = 0, **of_net: Any) -> dict[str, Any]:
    net = _net(fill, sharded=sharded, **of_net)
    return {"net": net, "optimizer": _sgd(net, fill), "loader": Part(100 * rank + 7)}


def _sgd(net: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)


def _saved(rank: int, world_size: int) -> None:
    places: dict[str, Any] = {name: node_store() / name for name in ("local", "shared")}
    save_once(_state(rank, 3.0, sharded=world_size), **places, timeout_s=_S, rng=False)


def _now(rank: int, sharded: int, **of_net: Any) -> dict[str, Any]:
    return _state(rank, 5.0, sharded=sharded, **of_net)


def _renamed(rank: int, sharded: int) -> dict[str, Any]:
    state = _now(rank, sharded)
    return {"model": state.pop("net"), **state}


def _with_more(rank: int, sharded: int) -> dict[str, Any]:
    net = _net(5.0, head=True, sharded=sharded)
    return {"net": net, "loader": Part(1), "ema": Part(2)}


def _with_all_changed(rank: int, sharded: int) -> dict[str, Any]:
    state = _now(rank, sharded)
    net = torch.nn.Sequential(collections.OrderedDict(body=torch.nn.Linear(6, 4).double()))
    torch.nn.init.constant_(net.body.weight, 5.0)
    torch.nn.init.constant_(net.body.bias, 5.0)
    _shard(net, sharded)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5.0)
    return {"net": net, "optimizer": optimizer, "place": state["loader"], "loader": Part(1)}


def _look(state: dict[str, Any]) -> list[Any]:
    net = state.get("net", state.get("model"))
    fills = [_fill(parameter) for parameter in net.parameters()]
    optimizer = state.get("optimizer")
    rate = None if optimizer is None else optimizer.param_groups[0]["lr"]
    return [fills, rate, *(state[key].value for key in ("loader", "ema") if key in state)]


_Make = Callable[[int, int], dict[str, Any]]
# The program, the arguments of resume, and what a rank has then.
_RESUMED: dict[str, tuple[_Make, dict[str, Any], Callable[[int], list[Any]]]] = {
    "only a part": (_now, {"only": ["net"]}, lambda n: [[3.0, 3.0], 5.0, 100 * n + 7]),
    "without a part that is no more": (
        lambda *of: {key: part for key, part in _now(*of).items() if key != "optimizer"},
        {"skip": ["optimizer", "loader"]},
        lambda n: [[3.0, 3.0], None, 100 * n + 7],
    ),
    "a renamed part": (
        *(_renamed, {"rename": {"net": "model"}, "skip": ["loader"]}),
        lambda n: [[3.0, 3.0], 3.0, 100 * n + 7],
    ),
    "in another dtype": (
        *(partial(_now, dtype=torch.double), {"skip": ["loader"], "allow_dtype_change": True}),
        lambda n: [[3.0, 3.0], 3.0, 100 * n + 7],
    ),
    "in part": (
        *(_with_more, {"partial": True, "skip": ["loader"]}),
        lambda n: [[3.0, 3.0, 5.0, 5.0], None, 1, 2],
    ),
}
_REFUSED: dict[str, tuple[_Make, tuple[str, ...]]] = {
    "a renamed part": (_renamed, ("net", "model", "rename={'old': 'new'}")),
    "another dtype": (
        partial(_now, dtype=torch.double),
        ("net.body.weight: saved as float32", "allow_dtype_change=True"),
    ),
    "all": (_with_all_changed, ("net.body.weight", "net.body.bias", "SGD", "AdamW", "place")),
}


def _resume(
    rank: int, world_size: int, places: dict[str, Any], make: _Make, arguments: dict[str, Any]
) -> Any:
    """Resume a changed program; returns what became of its state, or the error."""
    state = make(rank, world_size)
    before = _look(state)
    with Checkpointer(state, timeout_s=_S, rng=False, **places) as checkpointer:
        try:
            first = checkpointer.resume(**arguments)
        except MismatchError as error:
            assert _look(state) == before
            return str(error)
    return first, _look(state)


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", [2, 3], ids=["same", "elastic"])
@pytest.mark.parametrize("tier", ["nodes", "shared"])
@on_ranks(nodes=1, after=(_saved, 2))
def test_a_changed_program_resumes_what_it_names_or_is_told_of_all_that_it_changed(
    rank: int, world_size: int, tier: str
) -> None:
    places: dict[str, Any] = {"local": node_store() / "local"}
    if tier == "shared":
        places = {"local": node_store() / "none", "shared": node_store() / "shared"}

    for name, (make, arguments, expected) in _RESUMED.items():
        assert _resume(rank, world_size, places, make, arguments) == (1, expected(rank)), name

    for name, (make, words) in _REFUSED.items():
        text = _resume(rank, world_size, places, make, {})
        assert all(word in text for word in words), text
        if name == "all":
            assert ("values of 'loader' differ between the ranks" in text) == (world_size == 3)
        else:
            assert not any(word in text for word in ("load()", "manager")), text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"skip": ["optimzer"]}, "'optimzer': neither a part of the"),
        ({"only": ["nett"]}, "only= has 'nett', and no part of the training state is called so"),
        ({"rename": {"nett": "net"}, "partial": True}, "'nett': neither a part of the"),
        ({"only": "net"}, "only='net': give a list of names of parts"),
        ({"only": ["net"], "skip": ["loader"]}, "give only= or skip=, not both"),
        ({"rename": ["net"]}, "rename=['net']: give the name of each part now"),
        ({"only": []}, "names no part"),
        ({"step": -1}, "step=-1: give the number of a step"),
    ],
)
def test_wrong_names_are_an_error_that_lists_what_is_there(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save_once(_state(0, 3.0), local=tmp_path, rng=False)

    with Checkpointer(_state(0, 5.0), local=tmp_path, rng=False) as checkpointer:
        text = error_of(lambda: checkpointer.resume(**arguments))

    assert words in text
    if words.endswith(("neither a part of the", "called so")):
        assert all(name in text for name in ("net", "loader", "optimizer"))


@on_ranks(2, nodes=1)
def test_ranks_with_other_arguments_load_nothing(rank: int) -> None:
    state = {"net": torch.nn.Linear(1, 1), "other": Part(1)}
    texts = []
    with Checkpointer(state, local=node_store(), timeout_s=_S) as checkpointer:
        for arguments in (
            {"skip": ["other"] if rank else []},
            {"elsewhere": Elsewhere(rank, lambda: state["other"].load_state_dict({}))},
        ):
            with pytest.raises(MismatchError) as caught:
                checkpointer.resume(**arguments)  # type: ignore[arg-type]
            texts.append(same_on_all(str(caught.value)))
    assert "skip is [] on rank 0 and ['other'] on rank 1" in texts[0]
    assert "rank 0 of step 0, rank 1 of step 1" in texts[1]


@pytest.mark.parametrize("tier", ["nodes", "shared"])
def test_what_is_let_go_is_logged_by_name_and_may_not_be_all(
    tier: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"shared": tmp_path / "shared", "rng": False}
    save_once(_state(0, 3.0), local=tmp_path / "local-nodes", **options)
    options["local"] = tmp_path / f"local-{tier}"

    with pytest.raises(MismatchError, match="nothing of this state is in the checkpoint"):
        resume_once({"nett": torch.nn.Linear(2, 2)}, partial=True, **options)
    with caplog.at_level(logging.WARNING, "localckpt"):
        assert resume_once(_with_more(0, 0), partial=True, only=["net", "ema"], **options) == 1

    texts = "\n".join(caplog.messages)
    for name in ("optimizer", "loader", "ema", "net.head.weight", "net.head.bias"):
        assert name in texts


def _loop(
    local: Path,
    shared: Path | None,
    to: int,
    *,
    fill: float = 0,
    step: int | None = None,
    save_last: bool = True,
) -> tuple[int, float]:
    """Resume, and save each step to both; the first step, and the value that was loaded."""
    state = {"value": torch.nn.Linear(1, 1, bias=False)}
    weight = state["value"].weight
    places: dict[str, Any] = {"local": local, "shared": shared, "keep_last": 4, "timeout_s": _S}
    with Checkpointer(state, **places, save_last=save_last) as checkpointer:
        first = checkpointer.resume(step=step)
        loaded = float(weight)
        for at in range(first, to):
            torch.nn.init.constant_(weight, fill + at)
            checkpointer.step(at)
            checkpointer.save(at, shared=shared is not None and at % 2 == 0)
    return first, loaded


@pytest.mark.parametrize("are_nodes_new", [False, True])
def test_shared_storage_gives_a_step_that_the_nodes_do_not_have_or_an_error_says_what_there_is(
    are_nodes_new: bool, tmp_path: Path
) -> None:
    local, shared = tmp_path / "nodes", tmp_path / "shared"
    _loop(local, shared, 9)
    with pytest.raises(NoReplicasAvailableError) as caught:
        _loop(local, shared, 0, step=7777)
    for told in ("iteration 7777", "Complete are: 8, 7, 6, 5", "has 8, 6, 4, 2, 0"):
        assert told in str(caught.value)
    if are_nodes_new:
        shutil.rmtree(local)

    assert _loop(local, shared, 4, fill=100, step=2, save_last=False) == (3, 2)

    # The nodes have step 3 of the new line; shared storage has step 8 of the old one.
    assert _loop(local, shared, 5, fill=200) == (4, 103)
    shutil.rmtree(local)
    # Step 4 of the new line went there, too.
    assert _loop(local, shared, 0) == (5, 204)


@pytest.mark.parametrize("to", [5, 9])
def test_a_loop_goes_back_after_a_loss_spike(to: int, tmp_path: Path) -> None:
    state = {"value": torch.nn.Linear(1, 1, bias=False)}
    weight = state["value"].weight
    places: dict[str, Any] = {"local": tmp_path / "nodes", "shared": tmp_path / "shared"}
    with Checkpointer(state, **places, keep_last=3, every=2, shared_every=3) as checkpointer:
        for step in range(checkpointer.resume(), 6):
            torch.nn.init.constant_(weight, step)
            checkpointer.step(step)
        first = checkpointer.resume(step=3)
        assert (first, float(weight)) == (4, 3)
        # Up to a step that was saved before.
        for step in range(first, to):
            torch.nn.init.constant_(weight, 100 + step)
            checkpointer.step(step)

    with Checkpointer(state, **places) as checkpointer:
        assert (checkpointer.resume(), float(weight)) == (to, 99 + to)
