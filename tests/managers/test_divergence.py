"""Tensors that ranks should have in common and have not are found, and named by rank and key."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import localckpt
from localckpt import DivergenceError, MismatchError, SaveFailedError
from localckpt.errors import PeerLostError
from localckpt.events.stream import EventStream
from localckpt.managers.replica_check import divergence_error
from tests.managers.jobs import MAX_S, assert_same, error_of, iterations_on, make_manager
from tests.managers.own_managers import DictManager
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

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
    if way == "at once":
        manager.save(state, iteration)
        return
    request = manager.save(state, iteration, is_async=True)
    if way == "queue":
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        return
    # As a queue of another library does, but for its process.
    frozen = request.freeze()
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
    iteration = 0
    with (
        make_manager("memory", node_store(), check_replicas=1, num_buffers=3) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        manager.save(_state(rank, parts), iteration)
        for trial in range(trials):
            where, key = chosen.randrange(world_size), chosen.choice(sorted(tensors))
            bit = chosen.randrange(8 * tensors[key].nbytes)
            way = ("at once", "queue", "foreign")[trial % 3]
            iteration += 1
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
def test_a_bit_that_is_flipped_in_one_replica_is_found_a_hundred_times_of_a_hundred(
    shm_roots: Dirs, record_property: Any
) -> None:
    told = run_ranks(_flip_everywhere, 4, 100, store_per_node=shm_roots(4), timeout_s=240.0)

    assert len(told[0]) == 100
    assert told[0] == told[1] == told[2] == told[3], "the same on all ranks"
    record_property("cases", 100)


def _two_ranks(rank: int, world_size: int) -> tuple[str, Any]:
    parts = {"model": _model()}
    options = {"check_replicas": 1}
    with (
        make_manager("disk", node_store(), **options) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        _save(manager, _state(rank, parts), 1, "queue", queue)
        if rank == 1:
            _flip(parts["model"]["layer3.weight"], 5)
            _flip(parts["model"]["layer0.weight"], 0)
        with pytest.raises(DivergenceError) as raised:
            _save(manager, _state(rank, parts), 2, "queue", queue)
        assert iterations_on(node_store()) == {1}
        # A state that differs still is refused again, and one that does not is saved.
        with pytest.raises(SaveFailedError):
            _save(manager, _state(rank, parts), 2, "at once", queue)
        if rank == 0:
            _flip(parts["model"]["layer3.weight"], 5)
            _flip(parts["model"]["layer0.weight"], 0)
        _save(manager, _state(rank, parts), 2, "foreign", queue)
        assert manager.find_latest() == 2
        assert_same(manager.load()[0]["model"], parts["model"])
    error = raised.value
    assert not error.is_minority
    assert [difference.groups for difference in error.differences] == [((0,), (1,))] * 2
    return str(error), (error.keys, error.ranks)


def test_of_two_ranks_both_are_named(node_dirs: Dirs) -> None:
    told = run_ranks(_two_ranks, 2, store_per_node=node_dirs(2))

    assert told[0] == told[1]
    text, (keys, ranks) = told[0]
    assert keys == ("model.layer0.weight", "model.layer3.weight")
    assert ranks == (0, 1)
    assert "'model.layer0.weight' differs between rank 0 and rank 1" in text
    assert "It cannot be told which are right: rank 0 on " in text
    assert "It was not kept, and older checkpoints are as they were" in text


def _hybrid(rank: int, world_size: int) -> Any:
    """HSDP: two replicas of two parts each."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole, scale = torch.arange(35.0).reshape(7, 5), torch.ones(3)
    parameter = DTensor.from_local(
        whole.chunk(2)[rank % 2].clone(), mesh, [Replicate(), Shard(0)], shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip
    everywhere = DTensor.from_local(scale, mesh, [Replicate(), Replicate()])
    state = {"model": {"weight": parameter, "scale": everywhere}, "rank": torch.tensor(rank)}
    told = []
    with make_manager("memory", node_store(), check_replicas=1) as manager:
        manager.save(state, 1)
        for local in (parameter.to_local(), everywhere.to_local()):
            if rank == 3:
                _flip(local, 77)
            with pytest.raises(DivergenceError) as raised:
                manager.save(state, 2)
            if rank == 3:
                _flip(local, 77)
            error = raised.value
            told.append((error.keys, error.ranks, error.is_minority))
        manager.save(state, 2)
    return told


def test_replicas_of_sharded_tensors_are_compared_part_by_part(shm_roots: Dirs) -> None:
    told = run_ranks(_hybrid, 4, store_per_node=shm_roots(4))

    part = "model.weight [4:7, 0:5] of [7, 5]"
    assert told == [[((part,), (1, 3), False), (("model.scale",), (3,), True)]] * 4


def _equal_in_bytes(rank: int, world_size: int) -> Any:
    """Nothing here is a difference but what is flipped at the end."""
    group = dist.new_group([0, 2])
    lonely = dist.new_group([1])
    nan = torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    model = {"nan": nan, "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}
    model["repeated"] = torch.ones(1).expand(4, 3)
    if rank == 2:
        model = {key: model[key] for key in reversed(model)}
        model["repeated"] = torch.ones(4, 3)
    model["tied"] = model["scalar"]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.full((rank + 2,), 1.0 + rank))])
    optimizer.param_groups[0]["params"][0].sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    shared = {"of_two": localckpt.replicated({"a": torch.ones(3)}, group)} if rank != 1 else {}
    alone = {"alone": localckpt.replicated({"b": torch.ones(3)}, lonely)} if rank == 1 else {}
    state = {
        "model": localckpt.replicated(model),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "steps": localckpt.replicated({"count": rank, "name": f"rank {rank}"}),
        **shared,
        **alone,
    }
    with make_manager("memory", node_store(), check_replicas=1) as manager:
        for iteration in (1, 2, 3):
            manager.save(state, iteration)
        if rank == 2:
            # Another number that is none: equal for whoever compares values.
            _flip(nan, 3)
        assert torch.isnan(nan).all()
        with pytest.raises(DivergenceError) as raised:
            manager.save(state, 4)
    return raised.value.keys, raised.value.ranks


def test_what_is_private_or_only_lies_otherwise_is_no_difference(shm_roots: Dirs) -> None:
    told = run_ranks(_equal_in_bytes, 3, store_per_node=shm_roots(3))

    assert told == [(("model.nan",), (2,))] * 3


def _every_third(rank: int, world_size: int) -> list[str]:
    parts = {"model": _model()}
    told = []
    with make_manager("memory", node_store(), check_replicas=3, keep_last=9) as manager:
        for iteration in range(1, 10):
            if rank == 0 and iteration in (2, 5):
                _flip(parts["model"]["layer0.weight"], 9)
            try:
                manager.save(_state(rank, parts), iteration)
                told.append("saved")
            except DivergenceError:
                told.append("refused")
        assert [state.iteration for state in manager.status()] == [9, 8, 7, 6, 5, 2, 1]
    return told


def test_every_nth_save_compares_and_after_a_difference_every_one(shm_roots: Dirs) -> None:
    told = run_ranks(_every_third, 2, store_per_node=shm_roots(2))

    # From the second to the fifth the ranks differ, and the third is the first to look.
    assert told == [["saved", "saved", "refused", "refused", *["saved"] * 5]] * 2


class _Sink:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def write(self, event: Any) -> None:
        self.events.append(event)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _warn(rank: int, world_size: int) -> Any:
    parts, sink = {"model": _model()}, _Sink()
    stream = EventStream([sink])
    options = {"check_replicas": 1, "on_divergence": "warn", "events": stream, "keep_last": 3}
    with make_manager("disk", node_store(), **options) as manager:
        manager.save(_state(rank, parts), 1)
        if rank == 2:
            _flip(parts["model"]["layer1.weight"], 1)
        manager.save(_state(rank, parts), 2)
        assert manager.is_bad(2)
        assert not manager.is_bad(1)
        assert [state.iteration for state in manager.status()] == [2, 1]
    stream.close()
    with make_manager("disk", node_store()) as manager:
        # What differs is taken only if there is nothing else.
        assert manager.find_latest() == 1
        assert manager.all_iterations() == [1, 2]
        text = str(manager.explain())
    (event,) = [event for event in sink.events if event.name == "diverged"]
    return event.step, event.error_class, event.details, "of rank 2 is not that of" in text


def test_with_a_warning_the_checkpoint_is_complete_and_marked_bad(node_dirs: Dirs) -> None:
    told = run_ranks(_warn, 3, store_per_node=node_dirs(3))

    for step, error_class, details, is_explained in told:
        assert (step, error_class) == (2, "DivergenceError")
        assert details["keys"] == ["model.layer1.weight"]
        assert details["ranks"] == [2]
        assert len(details["nodes"]) == 1
        assert details["minority"]
        assert is_explained


def _save_doubtful(rank: int, world_size: int, *, differs: bool) -> None:
    weight = torch.arange(12.0)
    if differs and rank == 2:
        _flip(weight, 1)
    options: dict[str, Any] = {"check": lambda _: "the loss is too high"}
    if differs:
        options = {"check_replicas": 1, "on_divergence": "warn"}
    with make_manager("disk", node_store(), **options) as manager:
        manager.save({"model": localckpt.replicated({"w": weight})}, 1)
        assert manager.is_bad(1)


def _load_doubtful(rank: int, world_size: int) -> str:
    given = torch.zeros(12)
    with make_manager("disk", node_store(), elastic=True) as manager:
        try:
            manager.load(into={"model": localckpt.replicated({"w": given})}, iteration=1)
        except MismatchError as error:
            assert not given.any()
            return str(error)
    assert torch.equal(given, torch.arange(12.0))
    return ""


@pytest.mark.parametrize("differs", [False, True])
def test_another_number_of_ranks_gets_a_checkpoint_marked_bad_if_its_replicas_are_equal(
    node_dirs: Dirs, differs: bool
) -> None:
    dirs = node_dirs(1)
    run_ranks(partial(_save_doubtful, differs=differs), 3, store_per_node=dirs)

    told = run_ranks(_load_doubtful, 2, store_per_node=dirs)

    expected = "model.w: differs between the shards of ranks 0 and 2" if differs else ""
    assert all(expected in text if differs else not text for text in told)


def _own_hooks(rank: int, world_size: int) -> tuple[str, ...]:
    parts = {"model": _model()}
    with DictManager({}, timeout=MAX_S, check_replicas=1) as manager:
        manager.save(_state(rank, parts), 1)
        if rank == 0:
            _flip(parts["model"]["layer4.weight"], 3)
        with pytest.raises(DivergenceError) as raised:
            manager.save(_state(rank, parts), 2)
        assert manager.find_latest() == 1
    return raised.value.keys


def test_managers_with_hooks_of_their_own_compare_as_well(node_dirs: Dirs) -> None:
    told = run_ranks(_own_hooks, 2, store_per_node=node_dirs(2))

    assert told == [("model.layer4.weight",)] * 2


class _LostRanks:
    """Ranks of which one does not come any more."""

    rank, world_size = 0, 2

    def decide(self, *args: Any, **options: Any) -> Any:
        raise PeerLostError("rank 1 did not come")


def test_a_rank_that_is_lost_while_the_tensors_are_named_hides_no_difference() -> None:
    from localckpt.availability.divergence import compare_replicas

    ranks: Any = _LostRanks()
    divergence = compare_replicas([[(7, 1)], [(7, 2)]])
    assert divergence is not None

    error = divergence_error(ranks, EventStream(), 5, divergence, [], is_kept=False)

    assert (error.iteration, error.keys, error.ranks) == (5, (), (0, 1))
    assert "what rank 0 and rank 1 have in common differs" in str(error)
    assert "It cannot be told which are right: ranks 0 and 1." in str(error)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"check_replicas": 0}, "check_replicas is 0; it is a number of saves"),
        ({"check_replicas": True}, "check_replicas is True"),
        ({"on_divergence": "ignore"}, "on_divergence is 'ignore'; it can be 'error' or 'warn'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    assert told in error_of(lambda: make_manager("disk", tmp_path, **options))
