"""Jobs that ran with NVRx's manager and go on with ours."""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import Any

import pytest

import localckpt
from localckpt.integrations.nvrx.manager import LocalCheckpointManager
from tests.managers.jobs import Dirs, assert_same, error_of, state_of
from tests.ranks import node_store
from tests.upstream.environment import needs_upstream, run_upstream_ranks

pytestmark = [pytest.mark.framework, needs_upstream]

_LOCAL = "nvidia_resiliency_ext.checkpointing.local"


def _their_state(rank: int, iteration: int) -> Any:
    """NVRx's class, whose constructor asks for tensors on a GPU."""
    basic = import_module(f"{_LOCAL}.basic_state_dict").BasicTensorAwareStateDict
    state = basic.__new__(basic)
    state.state_dict, state._is_hollow = state_of(rank, iteration), False
    return state


def _save_with_theirs(rank: int, world_size: int) -> None:
    managers = import_module(f"{_LOCAL}.ckpt_managers.local_manager")
    strategies = import_module(f"{_LOCAL}.replication.strategies")
    repl = strategies.CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = managers.LocalCheckpointManager(node_store(), repl_strategy=repl)
    for iteration in (3, 7):
        manager.save(_their_state(rank, iteration), iteration)
    # On one node only.
    if rank == 0:
        last = manager._local_ckpt_path_from_id((7, 0, ""))
        last.with_name("iter_0000009_0_local.pt").write_bytes(last.read_bytes())


def _go_on_with_ours(rank: int, world_size: int) -> None:
    with LocalCheckpointManager(node_store(), timeout=60.0) as manager:
        assert manager.find_latest() == 7
        state, ckpt_id = manager.load()
        assert_same(state.state_dict, state_of(rank, 7))
        assert tuple(ckpt_id) == (7, rank, "")
        assert manager.last_load is not None
        assert manager.last_load.source == "NVRx's file"
        manager.save(localckpt.BasicTensorAwareStateDict(state_of(rank, 8)), 8)
        # Not NVRx's again, with or without looking.
        assert tuple(manager.load()[1]) == (8, rank, "")
        assert manager.find_latest() == 8
        assert_same(manager.load()[0].state_dict, state_of(rank, 8))


def _refuse(rank: int, world_size: int) -> str:
    if rank == 1:
        (path,) = (node_store() / "1").glob("iter_0000007_1_local.pt")
        path.write_bytes(path.read_bytes()[:-1000])
    with LocalCheckpointManager(node_store(), timeout=60.0) as manager:
        assert manager.find_latest() == 7
        return error_of(manager.load)


def test_what_nvrx_has_saved_is_loaded_until_there_is_one_of_ours_and_damage_is_told_to_all(
    node_dirs: Dirs,
) -> None:
    nodes = node_dirs(2)
    run_upstream_ranks(_save_with_theirs, 2, store_per_node=nodes)
    damaged = [shutil.copytree(node, node.with_name(f"{node.name} damaged")) for node in nodes]

    run_upstream_ranks(_go_on_with_ours, 2, store_per_node=nodes)
    told, also_told = run_upstream_ranks(_refuse, 2, store_per_node=damaged)

    assert told == also_told
    assert "CorruptShardError: could not load NVRx's iteration 7: rank 1" in told
    assert "rank 0" not in told


def _keep_theirs(rank: int, world_size: int) -> None:
    state_class = type(_their_state(rank, 1))
    with localckpt.LocalCheckpointManager(node_store(), timeout=60.0) as manager:
        manager.save(_their_state(rank, 1), 1)
        assert manager.find_latest() == 1
        state, _ = manager.load()
        assert type(state) is state_class
        assert_same(state.state_dict, state_of(rank, 1))


def test_states_of_nvrx_own_class_are_saved_and_loaded_as_they_are(node_dirs: Dirs) -> None:
    run_upstream_ranks(_keep_theirs, 2, store_per_node=node_dirs(2))
