"""A read-only manager loads beside a job that lives, also weights alone, and leaves no trace."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from localckpt import GlobalCheckpointManager, NoReplicasAvailableError
from localckpt.managers.load import Load
from tests.global_tier.models import manager_on
from tests.managers.jobs import (
    KINDS,
    assert_same,
    damage,
    error_of,
    everything,
    make_manager,
    state_of,
)
from tests.programs import run_python
from tests.ranks import node_store, run_ranks
from tests.scenarios import Begin


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_left_out_and_keeps_its_name(kind: str, tmp_path: Path) -> None:
    with make_manager(kind, tmp_path, "job", keep_last=2) as writer:
        for iteration in (1, 2):
            writer.save(state_of(0, iteration), iteration)
    for path in tmp_path.rglob("*2.0.*.safetensors"):
        damage(path, 0.5)
    before = everything(tmp_path)

    with make_manager(kind, tmp_path, "job", read_only=True) as manager:
        assert_same(manager.load()[0], state_of(0, 1))
        assert str(manager.explain()).startswith("A ")
        for call, args in (("save", ({}, 9)), ("warm_up", ({},)), ("begin", (1,))):
            assert "read_only=True" in error_of(partial(getattr(manager, call), *args))

    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("redundancy", "told"), [((1, 2), "peer rank 1"), ("parity 1 of 3", "parity")]
)
def test_what_is_on_other_nodes_is_fetched_or_computed_and_not_kept(
    redundancy: Any, told: str, job: Begin
) -> None:
    saved = job(nodes=3, redundancy=redundancy).save(5).lose(0)
    before = [everything(node) for node in saved.nodes]

    reading = saved.restart(redundancy=None, read_only=True).expect(5, {0: told})
    reading.expect(5, {0: told}).expect(5, {0: told}).run()

    assert [everything(node) for node in saved.nodes] == before


def _make(tier: str, root: Path, **options: Any) -> Any:
    if tier == "shared":
        return manager_on(root, "job", **options)
    return make_manager(tier, root, "job", **options)


@pytest.mark.parametrize("tier", ["disk", "shared"])
def test_at_the_deadline_the_error_says_that_a_job_prunes(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = GlobalCheckpointManager if tier == "shared" else Load
    name = "_reader_of" if tier == "shared" else "load"
    choose, iterations = getattr(owner, name), count(2)

    def prune_and_choose(self: Any, *args: Any) -> Any:
        writer.save({"w": torch.zeros(1000)}, next(iterations))
        return choose(self, *args)

    monkeypatch.setattr(owner, name, prune_and_choose)
    with (
        _make(tier, tmp_path, keep_last=1) as writer,
        _make(tier, tmp_path, read_only=True, timeout=0.3) as reader,
    ):
        writer.save({"w": torch.zeros(1000)}, 1)
        assert reader.find_latest() == 1
        with pytest.raises(NoReplicasAvailableError, match=r"keep more of them"):
            reader.load(into={"w": torch.zeros(1000)})


_NOTEBOOK = """
import sys, torch, localckpt
assert "torch.distributed.tensor" not in sys.modules
model = torch.nn.Linear(4, 6)
manager = localckpt.LocalCheckpointManager(sys.argv[1], "job", elastic=True, read_only=True)
loaded, _ = manager.load(into={"model": model}, partial=True)
assert loaded["model"] is model and set(loaded) == {"model"}, loaded
print(model.weight.tolist(), model.bias.tolist())
manager.close()
"""


def _weights() -> list[Any]:
    return [torch.arange(24.0).view(6, 4).tolist(), torch.arange(6.0).tolist()]


def _save_sharded(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(4, 6)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), _weights(), strict=True):
            parameter.copy_(torch.tensor(values))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    # The loaders of the ranks differ, and their positions are no part of the weights.
    state = {"model": model, "optimizer": optimizer, "loader": {"position": rank}}
    with make_manager("disk", node_store(), "job") as manager:
        manager.save(state, 3)


def test_one_process_gets_the_weights_of_two_ranks_and_imports_nothing_for_it(
    tmp_path: Path,
) -> None:
    run_ranks(_save_sharded, 2, store_per_node=[tmp_path])

    ran = run_python(_NOTEBOOK, tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == f"{_weights()[0]} {_weights()[1]}"
    assert "left out, as partial=True allows: loader, optimizer" in ran.stderr
