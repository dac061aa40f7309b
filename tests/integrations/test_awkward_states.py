"""States of torchao are resumed bit for bit, with no class to be allowed."""

from __future__ import annotations

import pytest

from tests.managers.jobs import Dirs
from tests.ranks import run_ranks
from tests.upstream.environment import import_upstream, needs

# What these libraries take to be imported on a busy machine is within it.
_LONGEST_S = 200.0

pytestmark = [pytest.mark.framework, needs("torchao"), pytest.mark.timeout(_LONGEST_S + 40.0)]


def _resume_each(rank: int, world_size: int) -> None:
    import_upstream("tests.integrations.awkward_states").resume_each(rank, world_size)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_states_of_low_precision_sparse_and_sharded_models_are_resumed(
    ranks: int, node_dirs: Dirs
) -> None:
    run_ranks(_resume_each, ranks, store_per_node=node_dirs(ranks), timeout_s=_LONGEST_S)
