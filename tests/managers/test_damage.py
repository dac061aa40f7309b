"""Bad copies are set aside, and replaced by a replica or an older state; good ones never are."""

from __future__ import annotations

import collections
import enum
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from localckpt import CorruptShardError, NoReplicasAvailableError, RestoreError
from tests.managers.jobs import (
    assert_same,
    damage,
    error_of,
    files,
    make_manager,
    reads_fail,
)
from tests.ranks import node_store
from tests.scenarios import Begin

# Several digest blocks, so that damage can lie where finding the shard does not look.
_NBYTES = 3 << 20
_MIDDLE = 0.6


def _large(rank: int, iteration: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(100 * iteration + rank)
    return {"large": torch.randn(_NBYTES // 4, generator=random), "iteration": iteration}


def _load(manager: Any, found: int, loaded: int, of_rank_1: str) -> None:
    assert manager.find_latest() == found
    for number in range(2):
        # Loading again gives the same, whatever had to be found out the first time.
        state, ckpt_id = manager.load()
        assert manager.last_load.iteration == manager.latest_iteration == loaded
        assert ckpt_id.iteration == loaded
        assert_same(state, _large(manager.rank, loaded))
        if number == 0:
            assert manager.last_load.source == (of_rank_1 if manager.rank else "own node")


def _copy(node: Path, owner: int, iteration: int) -> Path:
    (found,) = node.rglob(f"{iteration:012d}.{owner}.*.safetensors")
    return found


def _set_aside(*nodes: Path) -> list[tuple[int, int]]:
    names = (n.rpartition("/")[2].split(".") for n in files(*nodes) if n.endswith(".corrupt"))
    return [(int(iteration), int(owner)) for iteration, owner, *_ in names]


def _all_is_bad(manager: Any) -> None:
    assert manager.find_latest() == 7
    told = [error_of(manager.load, NoReplicasAvailableError)]
    assert manager.find_latest() == -1
    told.append(error_of(manager.load, NoReplicasAvailableError))
    for text in told:
        assert "iteration 8 (generation 1.2, 2 ranks) lacks the shards of ranks 1" in text
        assert "iteration 7 (generation 1.1, 2 ranks) lacks the shards of ranks 1" in text
        assert "Looked for on the node of rank 0, the node of rank 1." in text
        for node in ("the node of rank 0", "the node of rank 1"):
            for iteration in (7, 8):
                name = rf"{node}: {iteration:012d}\.1\.\d+\.\d+\.safetensors[.\d]*\.corrupt[.\d]*: "
                assert re.findall(rf"{name}iteration {iteration} of rank 1", text)
        assert "is damaged: the 1048576 bytes from" in text
    # The job can begin anew.
    manager.save(_large(manager.rank, 1), 1)
    assert manager.find_latest() == 1
    assert_same(manager.load()[0], _large(manager.rank, 1))


@pytest.mark.fault("bad-copies")
def test_of_bad_copies_a_replica_is_taken_or_an_older_checkpoint_on_all_ranks_or_it_is_an_error(
    job: Begin,
) -> None:
    running = job(nodes=2, redundancy=(1, 2), keep_last=2, state=_large).save(7, 8)
    first, second = running.nodes
    before = len(running.files())

    # Of one of two copies.
    damage(_copy(second, 1, 8), _MIDDLE)
    after = running.call(_load, 8, 8, "peer rank 0").files()
    assert (_set_aside(first), _set_aside(second)) == ([], [(8, 1)])
    # Nothing is deleted by a restart, and the copy is made again.
    assert len(after) == before + 1
    assert _copy(second, 1, 8).read_bytes() == _copy(first, 1, 8).read_bytes()

    # Of both copies.
    for node in running.nodes:
        damage(_copy(node, 1, 8), _MIDDLE)
    running.call(_load, 8, 7, "own node").run()
    assert (_set_aside(first), _set_aside(second)) == ([(8, 1)], [(8, 1)] * 2)

    # Of both iterations.
    for node in running.nodes:
        damage(_copy(node, 1, 7), _MIDDLE)
    running.call(_all_is_bad).run()


def _load_from_a_node_whose_disk_fails(manager: Any) -> None:
    assert manager.find_latest() == 8
    with reads_fail(_copy(node_store(), 2, 8)) if manager.rank == 0 else nullcontext():
        state, _ = manager.load()
    assert_same(state, _large(manager.rank, 8))
    assert manager.last_load.source == ("peer rank 1" if manager.rank == 2 else "own node")


@pytest.mark.fault("refused-io")
@pytest.mark.usefixtures("can_attach")
def test_a_disk_that_fails_while_its_node_sends_costs_that_copy_and_not_the_load(
    job: Begin,
) -> None:
    running = job(nodes=3, redundancy=(1, 3), keep_last=2, state=_large).save(7, 8)
    running.remove("000000000008.2.*.safetensors", 2)

    running.call(_load_from_a_node_whose_disk_fails).run()

    # What could not be read now may be read the next time.
    assert _set_aside(*running.nodes) == []


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


def _new_with_a_field_more(cls: Any, step: int, loss: float) -> Any: ...


# The object, what breaks it, and what the error names of it.
_BREAKS: dict[str, tuple[Any, Any, str]] = {
    "field": (
        *(Step(3), mock.patch.object(Step, "__new__", _new_with_a_field_more)),
        "missing 1 required positional",
    ),
    "member": (
        *(Color.RED, mock.patch.dict(Color._value2member_map_, clear=True)),
        "1 is not a valid Color",
    ),
    "key": (Restless(), mock.patch.object(Restless, "raises", KeyError("lr")), "KeyError: 'lr'"),
    "memory": (Restless(), mock.patch.object(Restless, "raises", MemoryError()), "MemoryError"),
    # Whoever raises it: the bytes were verified before.
    "ours": (Restless(), mock.patch.object(Restless, "raises", CorruptShardError("no")), "no"),
}


def _state(value: Any, rank: int, iteration: int) -> dict[str, Any]:
    weight = torch.full((300_000,), float(10 * iteration + rank))
    return {"model": {"weight": weight}, "progress": [0, {"state": value}]}


@pytest.mark.fault("not-rebuilt")
@pytest.mark.parametrize("what", _BREAKS)
def test_an_object_that_cannot_be_rebuilt_costs_no_checkpoint(what: str, tmp_path: Path) -> None:
    value, broken, told = _BREAKS[what]
    class_name = f"{_OWN}.{type(value).__name__}"
    with make_manager("disk", tmp_path, "job", keep_last=2, safe_globals=_ALLOWED) as manager:
        for iteration in (1, 2):
            manager.save(_state(value, 0, iteration), iteration)
        before = files(tmp_path)
        assert manager.find_latest() == 2
        with broken, pytest.raises(RestoreError) as raised:
            manager.load()
        assert files(tmp_path) == before
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


def _load_restless(manager: Any, source: str) -> None:
    """While rank 1 cannot rebuild its state, and when it can."""
    rank = manager.rank
    assert manager.find_latest() == 2
    before = files(node_store())
    Restless.raises = KeyError("lr") if rank == 1 else None
    with pytest.raises(RestoreError, match="could not load iteration 2: rank 1: ") as raised:
        manager.load()
    assert files(node_store()) == before
    told = raised.value.class_name, raised.value.path
    assert told == (f"{_OWN}.Restless", "progress.1.state")
    Restless.raises = None
    state, ckpt_id = manager.load()
    assert ckpt_id.iteration == 2
    assert torch.equal(state["model"]["weight"], _state(None, rank, 2)["model"]["weight"])
    assert manager.last_load.source == (source if rank == 1 else "own node")


@pytest.mark.fault("not-rebuilt")
@pytest.mark.parametrize("source", ["own node", "parity"])
def test_it_is_the_same_error_on_all_ranks_wherever_the_shard_came_from(
    source: str, job: Begin
) -> None:
    options = {"redundancy": "parity 1 of 3", "keep_last": 2, "safe_globals": _ALLOWED}
    running = job(nodes=3, state=partial(_state, Restless()), **options).save(1, 2)
    if source == "parity":
        running.remove("000000000002.1.*[0-9].safetensors", 1)

    running.restart().call(_load_restless, source).run()
