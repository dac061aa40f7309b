"""Arguments that one rank's constructor refuses: an error on all ranks at once, with its text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt import CheckpointingException
from tests.global_tier.models import manager_on
from tests.managers.jobs import MAX_S, assert_same, cliques, error_of, make_manager, state_of
from tests.managers.own_managers import DictManager
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

# Far more than an answer takes, far less than the waits of the ranks that were refused nothing.
_AT_ONCE_S = 8.0
_TIMEOUT_S = 60.0


def _use(manager: Any) -> None:
    with manager:
        manager.find_latest()


def _local(refused: bool, **options: Any) -> None:
    _use(make_manager("disk", node_store(), "job", timeout=_TIMEOUT_S, **options))


def _group(members: list[int]) -> Any:
    return dist.new_group(members)


def _protected(strategy: Any) -> None:
    with strategy:
        _local(False, repl_strategy=strategy)


def _clique(refused: bool, **options: Any) -> Any:
    return localckpt.CliqueReplicationStrategy(timeout_s=_TIMEOUT_S, **options)


def _in_group_of_others(refused: bool, wrap: Callable[[Any], Any] = lambda group: group) -> None:
    # Of ranks 0 to 2 the refused one gives the group of the two others.
    both = [rank for rank in range(3) if rank != _refused_rank()]
    group = _group(both)
    _protected(localckpt.CliqueReplicationStrategy(wrap(group), timeout_s=_TIMEOUT_S))


def _refused_rank() -> int:
    return int(os.environ["LOCALCKPT_TEST_REFUSED"])


_CONSTRUCTORS: dict[str, tuple[Callable[[bool], Any], str]] = {
    "LocalCheckpointManager, its directory": (
        lambda refused: _use(
            make_manager(
                *("disk", Path("/proc/nothing") if refused else node_store(), "job"),
                timeout=_TIMEOUT_S,
            )
        ),
        "/proc/nothing",
    ),
    "LocalCheckpointManager, a value": (
        lambda refused: _local(refused, keep_last=0 if refused else 2),
        "keep_last is 0",
    ),
    "InMemoryCheckpointManager, a value": (
        lambda refused: _use(
            localckpt.InMemoryCheckpointManager(
                *("job", None),
                root=node_store(),
                timeout=_TIMEOUT_S,
                num_buffers=0 if refused else 2,
            )
        ),
        "num_buffers is 0",
    ),
    "InMemoryCheckpointManager without a session, a value": (
        lambda refused: _use(
            localckpt.InMemoryCheckpointManager(
                timeout=_TIMEOUT_S, max_attempts=0 if refused else None
            )
        ),
        "max_attempts is 0",
    ),
    "BaseCheckpointManager, a value": (
        lambda refused: _use(
            DictManager(
                {}, session_id="job", timeout=_TIMEOUT_S, check_replicas=0 if refused else None
            )
        ),
        "check_replicas is 0",
    ),
    "GlobalCheckpointManager, a value": (
        lambda refused: _use(
            manager_on(node_store(), timeout=_TIMEOUT_S, thread_count=0 if refused else 1)
        ),
        "thread_count",
    ),
    "CliqueReplicationStrategy, a value": (
        lambda refused: _protected(_clique(refused, rate_limit=0 if refused else 1 << 30)),
        "rate_limit is 0",
    ),
    "CliqueReplicationStrategy, one copy": (
        lambda refused: _protected(_clique(refused, replication_factor=1 if refused else 2)),
        "replication_factor=1 keeps no replica",
    ),
    "from_replication_params, a value": (
        lambda refused: _protected(
            localckpt.CliqueReplicationStrategy.from_replication_params(
                1, 2, timeout_s=_TIMEOUT_S, rate_limit=0 if refused else None
            )
        ),
        "rate_limit is 0",
    ),
    "LazyCliqueReplicationStrategy, a value": (
        lambda refused: _protected(
            localckpt.LazyCliqueReplicationStrategy(
                replication_factor=0 if refused else 2, timeout_s=_TIMEOUT_S
            )
        ),
        "replication_factor must be an integer of at least 1",
    ),
    "ParityStrategy, a value": (
        lambda refused: _protected(
            localckpt.ParityReplicationStrategy(parity=0 if refused else 1, group_size=3)
        ),
        "parity is 0",
    ),
    "CliqueReplicationStrategy, a group of others": (_in_group_of_others, "is not a member"),
    "GroupWrapper, a group of others": (
        lambda refused: _in_group_of_others(refused, localckpt.GroupWrapper),
        "is not a member",
    ),
    "from_list_of_groups, other lists": (
        lambda refused: localckpt.GroupWrapper.from_list_of_groups(
            [[0, 1, 2], [3]] if refused else [[0, 1, 2]], timeout_s=_TIMEOUT_S
        ),
        "not in the job: [3]",
    ),
}


def _refuse(rank: int, world_size: int) -> dict[str, tuple[str, float]]:
    told = {}
    for number, (what, (construct, _)) in enumerate(_CONSTRUCTORS.items()):
        began = time.monotonic()
        text = error_of(partial(construct, rank == _refused_rank()), CheckpointingException)
        told[what] = text, time.monotonic() - began
        # The ranks are in step, so what they make next works.
        with make_manager("disk", node_store() / f"{number}", "job", cliques(1, 2)) as manager:
            manager.save(state_of(rank, 1), 1)
            assert_same(manager.load()[0], state_of(rank, 1))
    return told


@pytest.mark.parametrize("refused", [0, 2])
def test_what_one_rank_refuses_is_an_error_on_all_at_once(refused: int, node_dirs: Dirs) -> None:
    told = run_ranks(
        *(_refuse, 3),
        store_per_node=node_dirs(3),
        env={"LOCALCKPT_TEST_REFUSED": str(refused)},
    )

    for what, (_, expected) in _CONSTRUCTORS.items():
        for rank, (text, took_s) in enumerate(of_rank[what] for of_rank in told):
            assert expected in text, (what, rank)
            assert rank == refused or f"rank {refused}: " in text, what
            assert took_s < _AT_ONCE_S, what


def _refuse_on_all(rank: int, world_size: int) -> float:
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(CheckpointingException, match=r"^rate_limit is 0"):
            localckpt.CliqueReplicationStrategy(rate_limit=0)
        with pytest.raises(CheckpointingException, match=r"^keep_last is 0"):
            make_manager("disk", node_store(), "job", keep_last=0)
    took_s = time.monotonic() - began
    with make_manager("disk", node_store(), "job", cliques(1, 2), timeout=MAX_S) as manager:
        manager.save(state_of(rank, 1), 1)
    return took_s


def test_what_all_ranks_refuse_is_each_ones_own_error_at_once(node_dirs: Dirs) -> None:
    took_s = run_ranks(_refuse_on_all, 2, store_per_node=node_dirs(2))

    assert max(took_s) < _AT_ONCE_S
