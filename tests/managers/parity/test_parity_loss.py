"""Every set of nodes of parity groups is lost, on disk and in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import localckpt
from localckpt import NoReplicasAvailableError
from tests.faults.lives import Lives
from tests.managers.jobs import KINDS, Dirs, error_of, resume, state_of
from tests.ranks import run_ranks
from tests.scenarios import Begin

_OLDER, _NEWEST = 6, 7


def _lose(
    rank: int,
    world_size: int,
    kind: str,
    base: Path,
    parity: int,
    sets: Sequence[tuple[int, ...]],
) -> list[tuple[str, str]]:
    """For each set of nodes: what happens when they come back empty, and with older files."""
    strategy = localckpt.ParityReplicationStrategy(parity, world_size)
    lives = Lives(kind, base, rank, None, strategy=strategy)
    with lives.life(None, keep_last=2) as manager:
        manager.save(state_of(rank, _OLDER), _OLDER)
        lives.keep("older")
        manager.save(state_of(rank, _NEWEST), _NEWEST)
        assert str(manager.status()[0]) == (
            f"iteration 7 is replicated, {1 + parity} of {1 + parity}"
        )
    lives.keep("newest")
    told = []
    for lost in sets:
        with lives.life(None if rank in lost else "newest", keep_last=2) as manager:
            if len(lost) > parity:
                assert manager.find_latest() == -1
                empty = error_of(manager.load, NoReplicasAvailableError)
            else:
                empty = resume(manager, rank, _NEWEST)
        with lives.life("older" if rank in lost else "newest", keep_last=2) as manager:
            older = resume(manager, rank, _OLDER if len(lost) > parity else _NEWEST)
        told.append((empty, older))
    lives.close()
    return told


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize(
    ("kind", "world_size", "parity"),
    [
        *(("disk", 3, 1), ("memory", 4, 2)),
        # Large groups differ in what is computed alone, not in what is read and sent.
        *(
            pytest.param(KINDS[g % 2], g, m, marks=pytest.mark.long)
            for g in range(4, 9)
            for m in (1, 2)
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_any_nodes_up_to_the_parities_may_be_lost_and_no_more(
    kind: str,
    world_size: int,
    parity: int,
    node_dirs: Dirs,
    shm_roots: Dirs,
    long_form: bool,
    record_property: Any,
) -> None:
    base = (node_dirs if kind == "disk" else shm_roots)(1)[0]
    sets = [s for size in range(parity + 2) for s in combinations(range(world_size), size)]
    sets = sets[:: 1 if long_form or world_size == 3 else 2]

    told = run_ranks(_lose, world_size, kind, base, parity, sets, timeout_s=1200.0)

    for rank in range(world_size):
        for lost, (empty, older) in zip(sets, told[rank], strict=True):
            source = "parity" if rank in lost else "own node"
            if len(lost) > parity:
                ranks = ", ".join(map(str, lost))
                lacking = f"({world_size} ranks) lacks the shards of ranks {ranks}"
                assert lacking.replace("(", "iteration 7 (generation 1.2, ") in empty
                assert older == "own node"
            else:
                assert empty == older == source
    record_property("cases", 2 * len(sets))


def test_shards_are_computed_where_no_node_has_any_and_all_parity_is_left(
    job: Begin,
) -> None:
    saved = job(nodes=4, redundancy="parity 2 of 4").save(_OLDER)
    saved.remove("*[0-9].safetensors", count=4)

    saved.restart(redundancy=None).expect(_OLDER, dict.fromkeys(range(4), "parity")).run()
