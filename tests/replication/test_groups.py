"""Cliques, failure domains, and what a group says of itself."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    SameMachineReplicationException,
)
from localckpt.replication.groups import (
    GroupWrapper,
    _devices_of,
    check_failure_domains,
    default_replication_jump,
    parse_group_sequence,
)
from tests.ranks import run_ranks


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


def test_nodes_of_eight_ranks_pair_up() -> None:
    cliques = parse_group_sequence(replication_jump=8, replication_factor=2, world_size=32)

    assert cliques[:2] == [[0, 8], [1, 9]]
    assert cliques[7:9] == [[7, 15], [16, 24]]
    assert cliques[-1] == [23, 31]


def test_the_last_cliques_of_a_lane_that_does_not_divide_are_larger() -> None:
    assert parse_group_sequence(1, 2, 5) == [[0, 1], [2, 3, 4]]
    assert parse_group_sequence(2, 3, 16) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]  # fmt: skip # noqa: E501


@given(st.integers(1, 9), st.integers(2, 9), st.integers(2, 40))
def test_what_an_error_proposes_does_fit(jump: int, factor: int, world_size: int) -> None:
    try:
        parse_group_sequence(jump, factor, world_size)
    except MismatchError as error:
        said = str(error).split("What fits: ")[1]
    else:
        return

    jumps = re.search(r"replication_jump up to (\d+)", said)
    factors = re.search(r"replication_factor up to (\d+) \(", said)
    both = re.search(r"replication_jump=1 with replication_factor up to (\d+)", said)
    assert jumps or factors or both
    if jumps:
        parse_group_sequence(int(jumps[1]), factor, world_size)
    if factors:
        parse_group_sequence(jump, int(factors[1]), world_size)
    if both:
        parse_group_sequence(1, int(both[1]), world_size)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 2, 4), "replication_jump"),
        ((1, 0, 4), "replication_factor"),
        ((1, 1, 4), "repl_strategy=None"),
        ((1, 2, 1), "repl_strategy=None"),
        ((1.0, 2, 4), "replication_jump must be an integer"),
        ((1, True, 4), "replication_factor must be an integer"),
        ((1, "2", 4), "replication_factor must be an integer"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: tuple[int, int, int], told: str
) -> None:
    with pytest.raises(CheckpointingException, match=told):
        parse_group_sequence(*arguments)


def test_the_default_jump_is_the_number_of_ranks_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_replication_jump() == 8

    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert default_replication_jump() >= 1


def test_cliques_across_domains_are_accepted() -> None:
    check_failure_domains([[0, 2], [1, 3]], ["a", "a", "b", "b"])


def test_ranks_that_share_a_domain_are_named_with_a_jump_that_works() -> None:
    with pytest.raises(SameMachineReplicationException) as raised:
        check_failure_domains([[0, 1], [2, 3]], ["a", "a", "b", "b"])

    assert "ranks [0, 1] of clique [0, 1]; ranks [2, 3] of clique [2, 3]" in str(raised.value)
    assert "replication_jump=2 with replication_factor=2 works" in str(raised.value)


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


def test_many_clashes_are_counted_not_all_listed() -> None:
    domains = [str(rank // 2) for rank in range(64)]

    with pytest.raises(SameMachineReplicationException, match="and 24 more"):
        check_failure_domains(parse_group_sequence(1, 2, 64), domains)


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        ("", {"cpu"}),
        ("cpu:gloo,cuda:gloo", {"cpu"}),
        ("cuda:nccl", {"cuda"}),
        ("cpu:gloo,cuda:nccl", {"cpu", "cuda"}),
    ],
)
def test_devices_are_those_whose_memory_can_be_sent(config: str, devices: set[str]) -> None:
    assert _devices_of(config) == devices


def test_without_torch_distributed_there_is_a_world_of_one() -> None:
    group = GroupWrapper.wrap(None)

    assert (group.group, group.ranks, group.world_size) == (None, [0], 1)
    assert (group.my_group_rank, group.my_global_rank) == (0, 0)
    assert "cpu" in group.supported_devices
    assert "cuda" not in group.supported_devices
    with pytest.raises(CheckpointingException, match="init_process_group"):
        GroupWrapper.from_list_of_groups([[0]])


def _facts_of_groups(rank: int, world_size: int) -> None:
    world = GroupWrapper()
    assert GroupWrapper.wrap(world) is world
    assert GroupWrapper.wrap(dist.group.WORLD).ranks == list(range(world_size))
    assert "cpu:gloo" in world.backend
    assert "cpu" in world.supported_devices

    mine = GroupWrapper.from_list_of_groups([[3, 1], [0, 2]], timeout_s=20)
    assert mine.world_size == 2
    assert mine.ranks == ([0, 2] if rank % 2 == 0 else [1, 3])
    assert mine.my_global_rank == rank
    assert mine.my_group_rank == rank // 2
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


def test_a_group_has_ranks_and_backend_and_refuses_wrong_lists() -> None:
    run_ranks(_facts_of_groups, 4)
