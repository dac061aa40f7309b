"""Cliques that are formed from what is lost together."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import CheckpointingException, MismatchError, SameMachineReplicationException
from localckpt.replication.groups import GroupWrapper, check_failure_domains, parse_group_sequence
from localckpt.replication.placement import keepers_in, place_cliques
from localckpt.replication.strategies import CliqueReplicationStrategy
from tests.ranks import on_ranks

_FACTORS = st.integers(2, 4)


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[list[str], int]:
    """For each rank its node, and a factor that the nodes are enough for."""
    factor = draw(_FACTORS)
    counts = draw(st.lists(st.integers(1, 6), min_size=factor, max_size=9))
    nodes = [f"node {number}" for number, count in enumerate(counts) for _ in range(count)]
    return draw(st.permutations(nodes)), factor


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


def test_one_node_and_a_node_in_two_racks_are_refused() -> None:
    with pytest.raises(SameMachineReplicationException, match="pass repl_strategy=None"):
        place_cliques(["a"] * 4, 2)
    with pytest.raises(MismatchError, match=r"ranks \[0, 1\] share a node.*'x' on rank 0"):
        place_cliques(list("aabb"), 2, list("xyzz"))


@given(st.integers(1, 12), st.integers(2, 5), st.integers(1, 96))
def test_every_rank_is_in_one_clique_of_enough_ranks_a_jump_apart(
    jump: int, factor: int, world_size: int
) -> None:
    if world_size // jump < factor:
        with pytest.raises(MismatchError):
            parse_group_sequence(jump, factor, world_size)
        return

    cliques = parse_group_sequence(jump, factor, world_size)

    assert sorted(rank for clique in cliques for rank in clique) == list(range(world_size))
    assert cliques == sorted(cliques)
    for clique in cliques:
        assert factor <= len(clique) < 2 * factor
        assert {b - a for a, b in pairwise(clique)} == {jump}
    sizes_in_lane = [
        [len(clique) for clique in cliques if clique[0] % jump == lane] for lane in range(jump)
    ]
    assert all(sizes == sorted(sizes) for sizes in sizes_in_lane)
    assert all(sizes[-1] - sizes[0] <= 1 for sizes in sizes_in_lane)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 2, 4), "replication_jump"),
        ((1, 0, 4), "replication_factor"),
        ((1, 2, 1), "repl_strategy=None"),
        ((1, True, 4), "replication_factor must be an integer"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: tuple[int, int, int], told: str
) -> None:
    with pytest.raises(CheckpointingException, match=told):
        parse_group_sequence(*arguments)


@given(st.integers(2, 3), st.lists(st.sampled_from("abcd"), min_size=2, max_size=24))
def test_a_jump_is_proposed_when_and_only_when_one_works(factor: int, domains: list[str]) -> None:
    everyone_in_pairs = [[rank, rank + 1] for rank in range(0, len(domains) - 1, 2)]
    cliques = (
        parse_group_sequence(1, factor, len(domains))
        if len(domains) >= factor
        else everyone_in_pairs
    )
    factor = min(map(len, cliques))
    try:
        check_failure_domains(cliques, domains)
    except SameMachineReplicationException as error:
        told = str(error)
    else:
        return

    working = []
    for jump in range(1, len(domains) // factor + 1):
        try:
            check_failure_domains(parse_group_sequence(jump, factor, len(domains)), domains)
        except SameMachineReplicationException:
            continue
        working.append(jump)
    proposed = re.search(r"replication_jump=(\d+) with", told)
    assert [int(proposed[1])] == working[:1] if proposed else not working
    assert ("repl_strategy=None" in told) == (len(set(domains)) == 1)


@on_ranks(4)
def test_a_group_has_ranks_and_backend_and_refuses_wrong_lists(rank: int, world_size: int) -> None:
    world = GroupWrapper()
    assert GroupWrapper.wrap(world) is world
    assert GroupWrapper.wrap(dist.group.WORLD).ranks == list(range(world_size))
    assert "cpu:gloo" in world.backend
    assert "cpu" in world.supported_devices

    mine = GroupWrapper.from_list_of_groups([[3, 1], [0, 2]], timeout_s=20)
    assert (mine.world_size, mine.ranks) == (2, [rank % 2, rank % 2 + 2])
    assert (mine.my_global_rank, mine.my_group_rank) == (rank, rank // 2)
    assert mine.get_group_rank(rank) == rank // 2
    assert mine.get_global_rank(rank // 2) == rank
    with pytest.raises(MismatchError, match="not in the group"):
        mine.get_group_rank((rank + 1) % 4)
    with pytest.raises(MismatchError, match="no member"):
        mine.get_global_rank(2)

    not_mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank < 2]
    with pytest.raises(MismatchError, match="not a member"):
        GroupWrapper(not_mine)

    for wrong in ([[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1], [2, 3, 4]], [], [[0, 1, 2, 3, 3]]):
        with pytest.raises(MismatchError, match="each of the job's 4 ranks once"):
            GroupWrapper.from_list_of_groups(wrong)


def test_without_torch_distributed_there_is_a_world_of_one() -> None:
    group = GroupWrapper.wrap(None)

    assert (group.group, group.ranks, group.world_size) == (None, [0], 1)
    assert (group.my_group_rank, group.my_global_rank) == (0, 0)
    assert "cpu" in group.supported_devices
    assert "cuda" not in group.supported_devices
    with pytest.raises(CheckpointingException, match="init_process_group"):
        GroupWrapper.from_list_of_groups([[0]])
    with pytest.raises(CheckpointingException, match="init_process_group"):
        CliqueReplicationStrategy.from_replication_params()
