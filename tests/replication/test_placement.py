"""Cliques that are formed from what is lost together."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import MismatchError, SameMachineReplicationException
from localckpt.replication.groups import check_failure_domains
from localckpt.replication.placement import keepers_in, place_cliques

_FACTORS = st.integers(2, 4)


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[list[str], int]:
    """For each rank its node, and a factor that the nodes are enough for."""
    factor = draw(_FACTORS)
    counts = draw(st.lists(st.integers(1, 6), min_size=factor, max_size=9))
    nodes = [f"node {number}" for number, count in enumerate(counts) for _ in range(count)]
    return draw(st.permutations(nodes)), factor


def _names(cliques: list[list[int]], domains: list[str]) -> list[list[str]]:
    return [[domains[rank] for rank in clique] for clique in cliques]


@given(_jobs())
def test_every_shard_is_kept_in_as_many_domains_as_asked_for_whatever_nodes_there_are(
    job: tuple[list[str], int],
) -> None:
    nodes, factor = job

    cliques = place_cliques(nodes, factor)

    assert sorted(rank for clique in cliques for rank in clique) == list(range(len(nodes)))
    assert cliques == sorted(map(sorted, cliques))
    for clique in cliques:
        keepers = keepers_in(clique, nodes)
        assert keepers.keys() == set(clique)
        for owner, ranks in keepers.items():
            kept_in = [nodes[owner], *(nodes[rank] for rank in ranks)]
            assert set(ranks) <= set(clique)
            assert len(set(kept_in)) == len(kept_in) >= factor
            assert set(kept_in) == {nodes[rank] for rank in clique}


@given(_jobs())
def test_no_two_members_share_a_domain_where_that_is_possible(job: tuple[list[str], int]) -> None:
    nodes, factor = job

    cliques = place_cliques(nodes, factor)

    largest, most = max(Counter(nodes).values()), len(nodes) // factor
    apart = all(len(set(names)) == len(names) for names in _names(cliques, nodes))
    if largest <= most:
        # Else the ranks of that node cannot all be in cliques of their own.
        check_failure_domains(cliques, nodes)
        assert max(map(len, cliques)) < 2 * factor
    assert apart or largest > most


@given(_FACTORS, st.integers(2, 12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_nodes_of_equally_many_ranks_are_put_together_whole(
    factor: int, count: int, ranks: int, random: Random
) -> None:
    nodes = [f"node {number}" for number in range(count) for _ in range(ranks)]
    random.shuffle(nodes)
    if count < factor:
        with pytest.raises(
            SameMachineReplicationException, match=f"replication_factor={count}|one"
        ):
            place_cliques(nodes, factor)
        return

    cliques = place_cliques(nodes, factor)

    together = Counter(frozenset(names) for names in _names(cliques, nodes))
    # So each node has partners, all its ranks the same ones.
    assert set(together.values()) == {ranks}
    assert sum(map(len, together)) == count
    assert len(together) == count // factor
    sizes = [len(names) for names in together]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 4), st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 3))
def test_with_racks_no_copy_is_in_the_rack_of_its_shard(
    factor: int, nodes_in: list[int], ranks: int
) -> None:
    where = [(rack, node) for rack, count in enumerate(nodes_in) for node in range(count)]
    nodes = [f"{rack}.{node}" for rack, node in where for _ in range(ranks)]
    racks = [f"rack {rack}" for rack, _ in where for _ in range(ranks)]
    if len(nodes_in) < factor:
        with pytest.raises(SameMachineReplicationException, match="outer failure domains"):
            place_cliques(nodes, factor, racks)
        return

    cliques = place_cliques(nodes, factor, racks)

    for clique in cliques:
        for owner, keepers in keepers_in(clique, racks).items():
            kept_in = [racks[owner], *(racks[rank] for rank in keepers)]
            assert len(set(kept_in)) == len(kept_in) >= factor
    if max(nodes_in) <= len(where) // factor:
        check_failure_domains(cliques, racks)


def test_one_node_is_refused_with_what_to_do() -> None:
    with pytest.raises(SameMachineReplicationException, match="pass repl_strategy=None"):
        place_cliques(["a"] * 4, 2)


def test_a_node_in_two_racks_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"ranks \[0, 1\] share a node.*'x' on rank 0"):
        place_cliques(list("aabb"), 2, list("xyzz"))
