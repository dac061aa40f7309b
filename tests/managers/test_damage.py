"""Bad copies are set aside, and replaced by a replica or an older state; good ones never are."""

from __future__ import annotations

import collections
import enum
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CorruptShardError, NoReplicasAvailableError, RestoreError
from tests.managers.jobs import (
    Dirs,
    assert_same,
    cliques,
    damage,
    error_of,
    files,
    in_job,
    make_manager,
    reads_fail,
)
from tests.ranks import node_store, run_ranks

# Several digest blocks, so that damage can lie where finding the shard does not look.
_NBYTES = 3 << 20
_MIDDLE = 0.6


def _large(rank: int, iteration: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(100 * iteration + rank)
    return {"large": torch.randn(_NBYTES // 4, generator=random), "iteration": iteration}


def _save_iterations(rank: int, world_size: int) -> None:
    with in_job(keep_last=2) as (manager, _):
        for iteration in (7, 8):
            manager.save(_large(rank, iteration), iteration)


def _load(rank: int, world_size: int) -> tuple[int, int, str]:
    """What find_latest said, what was loaded and was right, and where it came from."""
    with in_job(keep_last=2) as (manager, _):
        found = manager.find_latest()
        state, ckpt_id = manager.load()
        assert manager.last_load.iteration == manager.latest_iteration == ckpt_id.iteration
        assert_same(state, _large(rank, ckpt_id.iteration))
        source = manager.last_load.source
        # Loading again gives the same, whatever had to be found out the first time.
        again, same_id = manager.load()
        assert same_id == ckpt_id
        assert_same(again, state)
    return found, ckpt_id.iteration, source


def _copy(node: Path, owner: int, iteration: int) -> Path:
    (found,) = node.rglob(f"{iteration:012d}.{owner}.*.safetensors")
    return found


def _set_aside(*nodes: Path) -> list[tuple[int, int]]:
    names = (n.rpartition("/")[2].split(".") for n in files(*nodes) if n.endswith(".corrupt"))
    return [(int(iteration), int(owner)) for iteration, owner, *_ in names]


def _all_is_bad(rank: int, world_size: int) -> list[str]:
    told = []
    with in_job(keep_last=2) as (manager, _):
        assert manager.find_latest() == 7
        told.append(error_of(manager.load, NoReplicasAvailableError))
        assert manager.find_latest() == -1
        told.append(error_of(manager.load, NoReplicasAvailableError))
        # The job can begin anew.
        manager.save(_large(rank, 1), 1)
        assert manager.find_latest() == 1
        assert_same(manager.load()[0], _large(rank, 1))
    return told


@pytest.mark.fault("bad-copies")
def test_of_bad_copies_a_replica_is_taken_or_an_older_checkpoint_on_all_ranks_or_it_is_an_error(
    node_dirs: Dirs,
) -> None:
    first, second = nodes = node_dirs(2)
    run_ranks(_save_iterations, 2, store_per_node=nodes)
    before = len(files(*nodes))

    # Of one of two copies.
    damage(_copy(second, 1, 8), _MIDDLE)
    assert run_ranks(_load, 2, store_per_node=nodes) == [(8, 8, "own node"), (8, 8, "peer rank 0")]
    assert (_set_aside(first), _set_aside(second)) == ([], [(8, 1)])
    # Nothing is deleted by a restart, and the copy is made again.
    assert len(files(*nodes)) == before + 1
    assert _copy(second, 1, 8).read_bytes() == _copy(first, 1, 8).read_bytes()

    # Of both copies.
    for node in nodes:
        damage(_copy(node, 1, 8), _MIDDLE)
    assert run_ranks(_load, 2, store_per_node=nodes) == [(8, 7, "own node")] * 2
    assert (_set_aside(first), _set_aside(second)) == ([(8, 1)], [(8, 1)] * 2)

    # Of both iterations.
    for node in nodes:
        damage(_copy(node, 1, 7), _MIDDLE)
    told = run_ranks(_all_is_bad, 2, store_per_node=nodes)
    assert told[0] == told[1]
    for text in told[0]:
        assert "iteration 8 (generation 1.2, 2 ranks) lacks the shards of ranks 1" in text
        assert "iteration 7 (generation 1.1, 2 ranks) lacks the shards of ranks 1" in text
        assert "Looked for on the node of rank 0, the node of rank 1." in text
        for node in ("the node of rank 0", "the node of rank 1"):
            for iteration in (7, 8):
                name = rf"{node}: {iteration:012d}\.1\.\d+\.\d+\.safetensors[.\d]*\.corrupt[.\d]*: "
                assert re.findall(rf"{name}iteration {iteration} of rank 1", text)
        assert "is damaged: the 1048576 bytes from" in text


def _read_from_a_node_whose_disk_fails(rank: int, world_size: int) -> str:
    with in_job(cliques(1, 3)) as (manager, _):
        manager.save(_large(rank, 3), 3)
        if rank == 2:
            _copy(node_store(), 2, 3).unlink()
        assert manager.find_latest() == 3
        with reads_fail(_copy(node_store(), 2, 3)) if rank == 0 else nullcontext():
            state, _ = manager.load()
        assert_same(state, _large(rank, 3))
        return str(manager.last_load.source)


@pytest.mark.fault("refused-io")
@pytest.mark.usefixtures("can_attach")
def test_a_disk_that_fails_while_its_node_sends_costs_that_copy_and_not_the_load(
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(3)

    told = run_ranks(_read_from_a_node_whose_disk_fails, 3, store_per_node=nodes)

    assert told == ["own node", "own node", "peer rank 1"]
    # What could not be read now may be read the next time.
    assert _set_aside(*nodes) == []


# A state that cannot be rebuilt is an error of the program: every file stays as it is.


class Step(collections.namedtuple("Step", "step")):
    """A named tuple that gets a field more."""


class Color(enum.Enum):
    """An enumeration that loses a member."""

    RED = 1


class Restless:
    """An object whose ``__setstate__`` raises what it is told to raise."""

    raises: Exception | None = None

    def __getstate__(self) -> dict[str, int]:
        return {"value": 5}

    def __setstate__(self, state: dict[str, int]) -> None:
        if type(self).raises is not None:
            raise type(self).raises
        self.__dict__.update(state)


_ALLOWED = (Step, Color, Restless)
_OWN = __name__


@contextmanager
def _one_field_more() -> Iterator[None]:
    before = Step.__new__
    Step.__new__ = lambda cls, step, loss: before(cls, step)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Step.__new__ = before  # type: ignore[method-assign]


@contextmanager
def _one_member_less() -> Iterator[None]:
    members = Color._value2member_map_
    red = members.pop(1)
    try:
        yield
    finally:
        members[1] = red


def _raises(error: Exception) -> Callable[[], Any]:
    @contextmanager
    def broken() -> Iterator[None]:
        Restless.raises = error
        try:
            yield
        finally:
            Restless.raises = None

    return broken


# The object, what breaks it, and what the error names of it.
_BREAKS: dict[str, tuple[Any, Callable[[], Any], str, str]] = {
    "field": (Step(3), _one_field_more, f"{_OWN}.Step", "missing 1 required positional"),
    "member": (Color.RED, _one_member_less, f"{_OWN}.Color", "1 is not a valid Color"),
    "key": (Restless(), _raises(KeyError("lr")), f"{_OWN}.Restless", "KeyError: 'lr'"),
    "memory": (Restless(), _raises(MemoryError()), f"{_OWN}.Restless", "MemoryError"),
    # Whoever raises it: the bytes were verified before.
    "ours": (Restless(), _raises(CorruptShardError("no")), f"{_OWN}.Restless", "no"),
}


def _manager(root: Path) -> Any:
    return make_manager("disk", root, "job", keep_last=2, safe_globals=_ALLOWED)


def _state(value: Any, rank: int, iteration: int) -> dict[str, Any]:
    weight = torch.full((300_000,), float(10 * iteration + rank))
    return {"model": {"weight": weight}, "progress": [0, {"state": value}]}


@pytest.mark.fault("not-rebuilt")
@pytest.mark.parametrize("what", _BREAKS)
def test_an_object_that_cannot_be_rebuilt_costs_no_checkpoint(what: str, tmp_path: Path) -> None:
    value, broken, class_name, told = _BREAKS[what]
    with _manager(tmp_path / "node") as manager:
        for iteration in (1, 2):
            manager.save(_state(value, 0, iteration), iteration)
    before = files(tmp_path / "node")

    with _manager(tmp_path / "node") as manager:
        assert manager.find_latest() == 2
        with broken(), pytest.raises(RestoreError) as raised:
            manager.load()
        assert files(tmp_path / "node") == before
        # Once the class is mended, the same manager can go on.
        state, ckpt_id = manager.load()

    assert ckpt_id.iteration == 2
    assert type(state["progress"][1]["state"]) is type(value)
    error = raised.value
    assert (error.class_name, error.path) == (class_name, "progress.1.state")
    assert f"{class_name} at 'progress.1.state' raised" in str(error)
    assert told in str(error)
    assert "nothing was renamed" in str(error)
    # The rank that it happened on shows where.
    assert told in repr(error.__cause__) + repr(error.__cause__.__cause__)
    assert error.__cause__.__cause__.__traceback__ is not None


def _in_job(world_size: int) -> Any:
    repl = localckpt.ParityReplicationStrategy(1, world_size)
    return in_job(repl, keep_last=2, safe_globals=_ALLOWED)


def _save_restless(rank: int, world_size: int) -> None:
    with _in_job(world_size) as (manager, _):
        for iteration in (1, 2):
            manager.save(_state(Restless(), rank, iteration), iteration)


def _load_restless(rank: int, world_size: int) -> tuple[str, str | None, str | None, str]:
    """The error while rank 1 cannot rebuild its state, and where the state comes from then."""
    with _in_job(world_size) as (manager, _):
        assert manager.find_latest() == 2
        before = files(node_store())
        Restless.raises = KeyError("lr") if rank == 1 else None
        with pytest.raises(RestoreError) as raised:
            manager.load()
        assert files(node_store()) == before
        Restless.raises = None
        state, ckpt_id = manager.load()
        assert ckpt_id.iteration == 2
        assert torch.equal(state["model"]["weight"], _state(None, rank, 2)["model"]["weight"])
    error = raised.value
    return str(error), error.class_name, error.path, str(manager.last_load.source)


@pytest.mark.fault("not-rebuilt")
@pytest.mark.parametrize("source", ["own node", "parity"])
def test_it_is_the_same_error_on_all_ranks_wherever_the_shard_came_from(
    source: str, node_dirs: Dirs
) -> None:
    nodes = node_dirs(3)
    run_ranks(_save_restless, 3, store_per_node=nodes)
    if source == "parity":
        (path,) = nodes[1].rglob("000000000002.1.*[0-9].safetensors")
        path.unlink()

    told = run_ranks(_load_restless, 3, store_per_node=nodes)

    assert told[0][:3] == told[1][:3] == told[2][:3]
    text, class_name, path, _ = told[0]
    assert (class_name, path) == (f"{_OWN}.Restless", "progress.1.state")
    assert "could not load iteration 2: rank 1: " in text
    assert [came_from for *_, came_from in told] == ["own node", source, "own node"]
