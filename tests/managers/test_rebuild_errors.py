"""A state that cannot be rebuilt is an error of the program: every file stays as it is."""

from __future__ import annotations

import collections
import enum
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CorruptShardError, RestoreError
from tests.managers.jobs import Dirs, assert_same, cliques, files, in_job, make_manager
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("not-rebuilt")


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


def _in_job(redundancy: str, world_size: int) -> Any:
    parity = redundancy == "parity"
    repl = localckpt.ParityReplicationStrategy(1, world_size) if parity else cliques(1, world_size)
    return in_job(repl, keep_last=2, safe_globals=_ALLOWED)


def _save(rank: int, world_size: int, redundancy: str) -> None:
    with _in_job(redundancy, world_size) as (manager, _):
        for iteration in (1, 2):
            manager.save(_state(Restless(), rank, iteration), iteration)


def _load(rank: int, world_size: int, redundancy: str) -> tuple[str, str | None, str | None, str]:
    """The error while rank 1 cannot rebuild its state, and where the state comes from then."""
    with _in_job(redundancy, world_size) as (manager, _):
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


@pytest.mark.parametrize(
    ("redundancy", "source"),
    [("replicas", "own node"), ("replicas", "peer rank 0"), ("parity", "parity")],
)
def test_it_is_the_same_error_on_all_ranks_wherever_the_shard_came_from(
    redundancy: str, source: str, node_dirs: Dirs
) -> None:
    nodes = node_dirs(3)
    run_ranks(_save, 3, redundancy, store_per_node=nodes)
    if source != "own node":
        (path,) = nodes[1].rglob("000000000002.1.*[0-9].safetensors")
        path.unlink()

    told = run_ranks(_load, 3, redundancy, store_per_node=nodes)

    assert told[0][:3] == told[1][:3] == told[2][:3]
    text, class_name, path, _ = told[0]
    assert (class_name, path) == (f"{_OWN}.Restless", "progress.1.state")
    assert "could not load iteration 2: rank 1: " in text
    assert [came_from for *_, came_from in told] == ["own node", source, "own node"]


def test_targets_that_others_write_into_cost_no_checkpoint(tmp_path: Path) -> None:
    saved = {"a": torch.arange(40.0), "b": torch.arange(100.0, 140.0)}
    with _manager(tmp_path / "node") as manager:
        manager.save(saved, 1)
        manager.save(saved, 2)
    before = files(tmp_path / "node")
    # The same memory at two addresses.
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(160))
    into = {name: torch.from_file(str(memory), shared=True, size=40) for name in saved}

    with _manager(tmp_path / "node") as manager:
        assert manager.find_latest() == 2
        with pytest.raises(RestoreError, match="Something else writes into the tensors"):
            manager.load(into=into)
        assert files(tmp_path / "node") == before
        assert_same(manager.load()[0], saved)


def _load_with_little_memory(rank: int, world_size: int) -> str:
    with _manager(node_store()) as manager:
        manager.save({"large": torch.ones(64 << 20)}, 1)
    before = files(node_store())
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with _manager(node_store()) as manager:
        assert manager.find_latest() == 1
        # Enough for threads, and not for the tensor.
        limit = pages * resource.getpagesize() + (160 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        try:
            with pytest.raises(RestoreError) as raised:
                manager.load()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        assert files(node_store()) == before
        assert manager.load()[1].iteration == 1
    return str(raised.value)


def test_memory_that_runs_out_at_a_load_costs_no_checkpoint(tmp_path: Path) -> None:
    (told,) = run_ranks(_load_with_little_memory, 1, init_group=False, store_per_node=[tmp_path])

    assert "could not load iteration 1: rank 0: " in told
