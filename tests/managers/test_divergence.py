"""Tensors that ranks should have in common and have not are found, and named by rank and key."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
import torch

import localckpt
from localckpt import DivergenceError, MismatchError, PeerLostError
from localckpt.availability.divergence import compare_replicas
from localckpt.events.stream import EventStream
from localckpt.managers.replica_check import divergence_error
from tests.managers.jobs import MAX_S, Dirs, make_manager, save
from tests.ranks import node_store, on_ranks, run_ranks

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float8_e5m2)


def _model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Parameters of many dtypes, of whatever bytes, one of them not contiguous; all ranks alike."""
    generator = torch.Generator().manual_seed(seed)
    model = {}
    for number in range(10):
        dtype = _DTYPES[number % len(_DTYPES)]
        shape = (3 + number, 5)
        nbytes = 5 * shape[0] * dtype.itemsize
        # Among them are numbers that are none, which only their bytes tell apart.
        values = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        model[f"layer{number}.weight"] = values.view(dtype).view(shape)
    model["conv"] = torch.randn(2, 3, 4, 4, generator=generator).to(
        memory_format=torch.channels_last
    )
    return model


def _flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of a tensor in memory; the same call flips it back."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory[bit // 8] ^= 1 << (bit % 8)


def _save(manager: Any, state: Any, iteration: int, way: str, queue: Any) -> None:
    if way != "foreign":
        save(manager, state, iteration, queue if way == "queue" else None)
        return
    # As a queue of another library does, but for its process.
    frozen = manager.save(state, iteration, is_async=True).freeze()
    frozen.async_fn(*frozen.async_fn_args, **frozen.async_fn_kwargs)
    frozen.execute_finalize_fns()


def _state(rank: int, parts: dict[str, Any]) -> dict[str, Any]:
    own = torch.Generator().manual_seed(rank)
    # What is private comes in another order, and takes another room, on each rank.
    private = {f"own{n}": torch.randn(7 * rank + n, generator=own) for n in range(rank + 1)}
    marked = {key: localckpt.replicated(part) for key, part in parts.items()}
    mixed = {"rng": own.get_state(), **private}
    return {**mixed, **marked} if rank % 2 else {**marked, **mixed}


def _flip_everywhere(rank: int, world_size: int, trials: int) -> list[tuple[Any, ...]]:
    """Flip one bit after another; return what was told of each."""
    socket.gethostname = lambda: f"host{rank}"
    chosen = random.Random(36)
    parts = {"model": _model(), "optimizer": {"state": {0: _model(1), 1: _model(2)}}}
    tensors = {f"model.{key}": value for key, value in parts["model"].items()}
    for number in (0, 1):
        state = parts["optimizer"]["state"][number]
        tensors |= {f"optimizer.state.{number}.{key}": value for key, value in state.items()}
    if rank == 1:
        # The same values, in another order in memory.
        tensors["model.conv"] = parts["model"]["conv"] = parts["model"]["conv"].contiguous()
    told = []
    with (
        make_manager("memory", node_store(), check_replicas=1, num_buffers=3) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        manager.save(_state(rank, parts), 0)
        for iteration in range(1, trials + 1):
            where, key = chosen.randrange(world_size), chosen.choice(sorted(tensors))
            bit = chosen.randrange(8 * tensors[key].nbytes)
            way = ("at once", "queue", "foreign")[iteration % 3]
            if rank == where:
                _flip(tensors[key], bit)
            with pytest.raises(DivergenceError) as raised:
                _save(manager, _state(rank, parts), iteration, way, queue)
            if rank == where:
                _flip(tensors[key], bit)
            error = raised.value
            assert manager.find_latest() == iteration - 1, "an older checkpoint is kept"
            _save(manager, _state(rank, parts), iteration, way, queue)
            told.append((str(error), error.keys, error.ranks))
            assert (error.iteration, error.keys, error.ranks) == (iteration, (key,), (where,))
            assert error.nodes == (f"host{where}",)
            assert error.is_minority
            assert f"{key!r} of rank {where} is not that of the others" in str(error)
            assert f"In the minority: rank {where} on host{where}." in str(error)
    return told


@pytest.mark.fault("divergent-replica")
@pytest.mark.timeout(300)
def test_a_bit_that_is_flipped_in_one_replica_is_found_each_time(
    shm_roots: Dirs, long_form: bool, record_property: Any
) -> None:
    trials = 100 if long_form else 15

    told = run_ranks(_flip_everywhere, 4, trials, store_per_node=shm_roots(4), timeout_s=240.0)

    assert len(told[0]) == trials
    assert told[0] == told[1] == told[2] == told[3], "the same on all ranks"
    record_property("cases", trials)


class _LostRanks:
    """Ranks of which one does not come any more."""

    rank, world_size = 0, 2

    def decide(self, *args: Any, **options: Any) -> Any:
        raise PeerLostError("rank 1 did not come")


def test_a_rank_that_is_lost_while_the_tensors_are_named_hides_no_difference() -> None:
    ranks: Any = _LostRanks()
    divergence = compare_replicas([[(7, 1)], [(7, 2)]])
    assert divergence is not None

    error = divergence_error(ranks, EventStream(), 5, divergence, [], is_kept=False)

    assert (error.iteration, error.keys, error.ranks) == (5, (), (0, 1))
    assert "what rank 0 and rank 1 have in common differs" in str(error)
    assert "It cannot be told which are right: ranks 0 and 1." in str(error)


@on_ranks(2, nodes=1)
def test_every_nth_save_compares_and_after_a_difference_every_one(rank: int) -> None:
    parts = {"model": _model()}
    told = []
    with make_manager("disk", node_store(), check_replicas=3, keep_last=9) as manager:
        for iteration in range(1, 10):
            if rank == 0 and iteration in (2, 5):
                _flip(parts["model"]["layer0.weight"], 9)
            try:
                manager.save(_state(rank, parts), iteration)
                told.append("saved")
            except DivergenceError:
                told.append("refused")
        assert [state.iteration for state in manager.status()] == [9, 8, 7, 6, 5, 2, 1]
    # From the second to the fifth the ranks differ, and the third is the first to look.
    assert told == ["saved", "saved", "refused", "refused", *["saved"] * 5]


_DOUBTFUL: dict[str, dict[str, Any]] = {
    "equal": {"check": lambda _: "the loss is too high"},
    "differing": {"check_replicas": 1, "on_divergence": "warn"},
}


def _save_doubtful(rank: int, world_size: int) -> None:
    weight = torch.arange(12.0)
    for session, options in _DOUBTFUL.items():
        with make_manager("disk", node_store(), session, **options) as manager:
            manager.save({"model": localckpt.replicated({"w": weight})}, 1)
            assert manager.is_bad(1)
        if rank == 2:
            _flip(weight, 1)


@on_ranks(2, nodes=1, after=(_save_doubtful, 3))
def test_another_number_of_ranks_gets_a_checkpoint_marked_bad_if_its_replicas_are_equal(
    rank: int,
) -> None:
    given = torch.zeros(12)
    into = {"model": localckpt.replicated({"w": given})}
    with make_manager("disk", node_store(), "differing", elastic=True) as manager:
        with pytest.raises(MismatchError, match=r"model\.w: differs .* of ranks 0 and 2"):
            manager.load(into=into, iteration=1)
        assert not given.any()
    with make_manager("disk", node_store(), "equal", elastic=True) as manager:
        manager.load(into=into, iteration=1)
    assert torch.equal(given, torch.arange(12.0))
