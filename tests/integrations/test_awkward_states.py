"""States of torchao are resumed bit for bit, with no class to be allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import node_store, run_ranks
from tests.upstream.environment import import_upstream, needs

Dirs = Callable[[int], list[Path]]

# What these libraries take to be imported on a busy machine is within it.
_LONGEST_S = 200.0

pytestmark = [
    pytest.mark.framework,
    needs("torchao"),
    pytest.mark.timeout(_LONGEST_S + 40.0),
]


def _resume_each(rank: int, world_size: int, cases: str) -> dict[str, bool]:
    module = import_upstream("tests.integrations.awkward_states")
    found = {}
    for name, make in getattr(module, cases).items():
        found[name] = module.is_resumed(make, node_store() / name)
    return found


@pytest.mark.long
def test_states_of_low_precision_and_sparse_models_are_resumed(
    node_dirs: Dirs,
) -> None:
    (found,) = run_ranks(
        *(_resume_each, 1, "CASES"), store_per_node=node_dirs(1), timeout_s=_LONGEST_S
    )

    assert len(found) == 7
    assert [name for name, is_resumed in found.items() if not is_resumed] == []


def test_sharded_states_of_low_precision_optimizers_are_resumed(node_dirs: Dirs) -> None:
    by_rank = run_ranks(
        *(_resume_each, 2, "RANKS_CASES"), store_per_node=node_dirs(2), timeout_s=_LONGEST_S
    )

    for found in by_rank:
        assert len(found) == 2
        assert [name for name, is_resumed in found.items() if not is_resumed] == []
