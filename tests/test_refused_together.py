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
from tests.managers.jobs import assert_same, cliques, error_of, make_manager, state_of
from tests.managers.own_managers import DictManager
from tests.ranks import node_store, on_ranks

# Far more than an answer takes, far less than the waits of the ranks that were refused nothing.
_AT_ONCE_S = 8.0
_TIMEOUT_S = 60.0


def _use(manager: Any) -> None:
    with manager:
        manager.find_latest()


def _local(root: Path | None = None, repl: Any = None, **options: Any) -> None:
    _use(make_manager("disk", root or node_store(), "job", repl, timeout=_TIMEOUT_S, **options))


def _protected(strategy: Any) -> None:
    with strategy:
        _local(repl=strategy)


def _in_group_of_others(wrap: Callable[[Any], Any]) -> None:
    # Of ranks 0 to 2 the refused one gives the group of the two others.
    group = dist.new_group([rank for rank in range(3) if rank != _refused_rank()])
    _protected(localckpt.CliqueReplicationStrategy(wrap(group), timeout_s=_TIMEOUT_S))


def _refused_rank() -> int:
    return int(os.environ["LOCALCKPT_TEST_REFUSED"])


_Clique = partial(localckpt.CliqueReplicationStrategy, timeout_s=_TIMEOUT_S)
_from_params = localckpt.CliqueReplicationStrategy.from_replication_params
_Lazy = partial(localckpt.LazyCliqueReplicationStrategy, timeout_s=_TIMEOUT_S)
_of_lists = partial(localckpt.GroupWrapper.from_list_of_groups, timeout_s=_TIMEOUT_S)
# What makes an object, bad or not, and what the error says.
_CONSTRUCTORS: list[tuple[Callable[[bool], Any], str]] = [
    (lambda bad: _local(Path("/proc/nothing") if bad else None), "/proc/nothing"),
    (lambda bad: _local(keep_last=0 if bad else 2), "keep_last is 0"),
    (
        lambda bad: _use(
            DictManager({}, session_id="job", timeout=_TIMEOUT_S, check_replicas=1 - bad)
        ),
        "check_replicas is 0",
    ),
    (
        lambda bad: _use(manager_on(node_store(), timeout=_TIMEOUT_S, thread_count=1 - bad)),
        "thread_count",
    ),
    (lambda bad: _protected(_Clique(replication_factor=2 - bad)), "=1 keeps no replica"),
    (lambda bad: _protected(_from_params(1, 2, rate_limit=0 if bad else 2**30)), "rate_limit is 0"),
    (lambda bad: _protected(_Lazy(replication_factor=2 - 2 * bad)), "must be an integer of"),
    (
        lambda bad: _protected(localckpt.ParityReplicationStrategy(1 - bad, group_size=3)),
        "parity is 0",
    ),
    (lambda bad: _in_group_of_others(lambda group: group), "is not a member"),
    (lambda bad: _in_group_of_others(localckpt.GroupWrapper), "is not a member"),
    (lambda bad: _of_lists([[0, 1, 2], [3]] if bad else [[0, 1, 2]]), "not in the job: [3]"),
]


@pytest.mark.parametrize("refused", [0, 2])
@on_ranks(3, nodes=3)
def test_what_one_rank_refuses_is_an_error_on_all_at_once(rank: int, refused: int) -> None:
    os.environ["LOCALCKPT_TEST_REFUSED"] = str(refused)
    for number, (construct, expected) in enumerate(_CONSTRUCTORS):
        began = time.monotonic()
        text = error_of(partial(construct, rank == refused), CheckpointingException)
        assert time.monotonic() - began < _AT_ONCE_S, number
        assert expected in text, number
        assert rank == refused or f"rank {refused}: " in text, number
        # The ranks are in step, so what they make next works.
        with make_manager("disk", node_store() / f"{number}", "job", cliques(1, 2)) as manager:
            manager.save(state_of(rank, 1), 1)
            assert_same(manager.load()[0], state_of(rank, 1))
    # What all refuse is each one's own error.
    with pytest.raises(CheckpointingException, match=r"^rate_limit is 0"):
        localckpt.CliqueReplicationStrategy(rate_limit=0)
    with pytest.raises(CheckpointingException, match=r"^keep_last is 0"):
        make_manager("disk", node_store(), "job", keep_last=0)
    _local()
