"""What is saved is what the state was when ``save`` was called, whatever training does next."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.managers import capture
from localckpt.managers import save as save_module
from localckpt.storage import write
from tests.managers.jobs import KINDS, MAX_S, Dirs, assert_same, cliques, make_manager
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("changed-state")


def _spoil(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.add_(1).mul_(3) if value.dtype.is_floating_point else value.add_(1)
    elif isinstance(value, dict):
        for inner in list(value.values()):
            _spoil(inner)
        value.clear()
    elif isinstance(value, list):
        for inner in value:
            _spoil(inner)
        value.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_while_a_save_is_written_does_not_change_what_is_saved(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An optimizer's first step makes torch's compiler cache, among the temporary files if not here.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()

    step()
    with (
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        make_manager(kind, tmp_path / "node", keep_last=9) as manager,
    ):
        # The second and later saves go into buffers and files that are used again.
        for iteration in range(4):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
                "scalars": [torch.tensor(iteration), torch.tensor(0.5, dtype=torch.float64)],
                "view": model[0].weight.detach()[1::2, ::3],
                "history": [iteration, {"loss": 0.1}],
            }
            steps = [value["step"] for value in state["optimizer"]["state"].values()]
            assert len(steps) == 4
            assert all(one == iteration + 1 for one in steps)
            expected = copy.deepcopy(state)

            request = manager.save(state, iteration, is_async=True)

            # Before anything of the request has been carried out.
            step()
            _spoil([state["random"], state["scalars"], state["history"]])
            queue.schedule_async_request(request)
            step()
            state["optimizer"]["param_groups"][0]["lr"] = 7.0
            queue.maybe_finalize_async_calls(blocking=True)
            optimizer.param_groups[0]["lr"] = 0.1
            for one in steps:
                one.fill_(iteration + 2)
            manager.find_latest()
            found, _ = manager.load()

            assert_same(found["optimizer"]["state"], expected["optimizer"]["state"])
            assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
            for key in ("model", "random", "scalars", "history", "view"):
                assert_same(found[key], expected[key])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_can_be_changed_without_changing_the_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    with make_manager(kind, tmp_path) as manager:
        manager.save({"a": torch.arange(1000)}, 0)
        manager.find_latest()
        first, _ = manager.load()
        first["a"].zero_()
        second, _ = manager.load()

    assert_same(second, {"a": torch.arange(1000)})


_READERS: dict[str, tuple[Any, str]] = {
    "comparison": (save_module, "replica_digests"),
    "check": (save_module, "tensor_views"),
    "writer's digests": (write, "_finish_digests"),
    "replication": (capture._CapturedImage, "read"),
}
_LATE_S = 0.1


def _read_late(rank: int, world_size: int, kind: str, readers: tuple[str, ...]) -> list[str]:
    """Save more often than there are buffers, with one reader after another late on rank 1."""
    failed = []
    state = {"model": localckpt.replicated({"w": torch.zeros(1 << 16)})}
    for reader in readers:
        owner, name = _READERS[reader]
        options = {"check_replicas": 1, "keep_last": 9}
        checked = []

        def check(tensors: Any, checked: list[float] = checked) -> None:
            (weight,) = tensors.values()
            checked.append(float(weight.unique()))

        options["check"] = check
        on_time = getattr(owner, name)

        def late(*args: Any, on_time: Any = on_time) -> Any:
            time.sleep(_LATE_S)
            return on_time(*args)

        if rank == 1:
            setattr(owner, name, late)
        with (
            cliques(1, 2) as repl,
            make_manager(kind, node_store(), reader, repl, **options) as manager,
            localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        ):
            for iteration in range(1, 5):
                state["model"].value["w"].fill_(float(iteration))
                try:
                    queue.schedule_async_request(manager.save(state, iteration, is_async=True))
                    queue.maybe_finalize_async_calls()
                except localckpt.CheckpointingException as error:
                    failed.append(f"{reader}: {error}")
            queue.maybe_finalize_async_calls(blocking=True)
            for iteration in range(1, 5):
                loaded, _ = manager.load(iteration=iteration)
                if not (loaded["model"]["w"] == iteration).all():
                    failed.append(f"{reader}: iteration {iteration} has other values")
        setattr(owner, name, on_time)
        if checked != [1.0, 2.0, 3.0, 4.0]:
            failed.append(f"{reader}: the check saw {checked}")
    return failed


@pytest.mark.parametrize(
    ("kind", "readers"),
    [
        ("disk", tuple(_READERS)),
        ("memory", ("comparison", "replication")),
    ],
)
def test_saves_wait_for_readers_of_older_images(
    kind: str, readers: tuple[str, ...], node_dirs: Dirs, shm_roots: Dirs
) -> None:
    stores = (node_dirs if kind == "disk" else shm_roots)(2)

    assert run_ranks(_read_late, 2, kind, readers, store_per_node=stores) == [[], []]
