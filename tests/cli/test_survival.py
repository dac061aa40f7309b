"""What schemes cost and survive: closed forms and enumeration agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.cli.survival import Scheme, Survival, survivability, usual_schemes
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.replication.groups import parse_group_sequence

_REPLICAS = st.integers(2, 6).map(lambda copies: Scheme("replicas", copies))
_PARITY = st.integers(1, 2).flatmap(
    lambda parity: st.integers(parity + 2, 8).map(lambda size: Scheme("parity", size, parity))
)
_SCHEMES = st.one_of(st.just(Scheme("none")), _REPLICAS, _PARITY)


def _group_sizes(survival: Survival) -> list[int]:
    return [size for size, count in survival.groups for _ in range(count)]


def _groups_of_nodes(survival: Survival) -> list[range]:
    """The same groups, with their nodes."""
    return [range(*ends) for ends in pairwise([0, *accumulate(_group_sizes(survival))])]


def _enumerated(groups: Sequence[Collection[int]], tolerated: Sequence[int], lost: int) -> float:
    """Chance of losing data, by trying all sets of lost nodes."""
    nodes = sorted({node for group in groups for node in group})
    losing = sum(
        any(len(set_ & set(g)) > most for g, most in zip(groups, tolerated, strict=True))
        for set_ in map(set, combinations(nodes, lost))
    )
    return losing / comb(len(nodes), lost)


@st.composite
def _jobs(draw: st.DrawFn) -> Survival:
    scheme = draw(_SCHEMES)
    nodes = draw(st.integers(scheme.group_size, 14))
    return survivability(nodes, draw(st.integers(1, 8)), scheme, most_lost=nodes)


@given(_jobs())
def test_the_closed_form_and_enumeration_agree(survival: Survival) -> None:
    groups = _groups_of_nodes(survival)
    tolerated = [survival.scheme.tolerated(len(group)) for group in groups]

    for lost in range(1, min(survival.nodes, 5) + 1):
        assert survival.loss[lost - 1] == _enumerated(groups, tolerated, lost)


@given(_jobs())
def test_what_survives_any_loss_is_never_lost_and_one_more_may_be(survival: Survival) -> None:
    limit = survival.survives_any

    assert all(probability == 0 for probability in survival.loss[:limit])
    assert all(probability > 0 for probability in survival.loss[limit:])
    assert all(a <= b for a, b in pairwise(survival.loss))
    assert survival.loss[-1] == 1


@given(_jobs())
def test_groups_are_as_many_as_there_can_be_and_differ_by_one(survival: Survival) -> None:
    sizes = _group_sizes(survival)

    assert sum(sizes) == survival.nodes
    assert len(sizes) == survival.nodes // survival.scheme.group_size
    assert sizes == sorted(sizes)
    assert survival.scheme.group_size <= sizes[0] <= sizes[-1] <= sizes[0] + 1


@given(_jobs())
def test_costs_are_those_of_the_ranks_of_all_groups(survival: Survival) -> None:
    scheme, sizes = survival.scheme, _group_sizes(survival)
    kept, sent = {
        "none": (lambda size: Fraction(0), lambda size: 0),
        "replicas": (lambda size: Fraction(size - 1), lambda size: size - 1),
        "parity": (
            lambda size: Fraction(scheme.parity, size - scheme.parity),
            lambda size: scheme.parity,
        ),
    }[scheme.kind]

    for cost, of_group in ((survival.extra_memory, kept), (survival.bytes_sent, sent)):
        of_nodes = [of_group(size) for size in sizes for _ in range(size)]
        assert cost.mean == pytest.approx(float(sum(of_nodes)) / survival.nodes)
        assert cost.largest == float(max(of_nodes))


@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 12), st.integers(1, 4))
def test_the_cliques_that_a_job_makes_are_those_that_are_counted(
    factor: int, ranks_per_node: int, nodes: int, lost: int
) -> None:
    if nodes < max(factor, lost):
        return
    cliques = parse_group_sequence(ranks_per_node, factor, nodes * ranks_per_node)
    of_nodes = [[rank // ranks_per_node for rank in clique] for clique in cliques]

    told = survivability(nodes, ranks_per_node, Scheme("replicas", factor))

    made = _enumerated(of_nodes, [len(clique) - 1 for clique in cliques], lost)
    assert made == told.loss[lost - 1]
    memory = [len(clique) - 1 for clique in cliques for _ in clique]
    assert told.extra_memory.mean == pytest.approx(sum(memory) / len(memory))


def test_cliques_across_racks_survive_a_rack_and_any_node() -> None:
    ranks, nodes_of_rack, racks = 2, 4, 6
    cliques = parse_group_sequence(ranks * nodes_of_rack, 2, ranks * nodes_of_rack * racks)
    on_nodes = [[rank // ranks for rank in clique] for clique in cliques]
    on_racks = [[node // nodes_of_rack for node in members] for members in on_nodes]

    limits = [1] * len(cliques)
    assert _enumerated(on_racks, limits, 1) == 0
    assert _enumerated(on_nodes, limits, 2) == survivability(24, 2, "replicas:2").loss[1]
    assert _enumerated(on_racks, limits, 2) == survivability(6, 8, "replicas:2").loss[1]


def test_a_job_of_very_many_nodes_is_counted_at_once() -> None:
    nodes = 10**9

    told = survivability(nodes, 8, "replicas:2")

    assert told.loss[1] == 1 / (nodes - 1)


def test_costs_in_bytes_are_rounded() -> None:
    told = survivability(7, 8, "parity:1/3", 100)

    # Groups of 3 and 4 nodes, which keep a half and a third of a shard.
    assert told.extra_memory.in_bytes(100) == (40, 50)
    assert told.to_json()["extra_memory"] == {
        "mean": pytest.approx((3 / 2 + 4 / 3) / 7),
        "largest": 0.5,
        "mean_nbytes": 40,
        "largest_nbytes": 50,
    }


@given(_SCHEMES)
def test_a_scheme_is_read_from_its_own_text(scheme: Scheme) -> None:
    assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is no redundancy scheme: give none, replicas:K"),
        ("replicas:2\n", "is no redundancy scheme"),
        ("replicas:٢", "is no redundancy scheme"),
        ("replicas:" + 5000 * "9", "is no redundancy scheme"),
        ("parity:1", "is no redundancy scheme"),
        ("replicas:1", "replicas:1: K counts the owner's shard too.*2 or more; or use none"),
        ("parity:0/4", "1 or 2 parities"),
        ("parity:3/8", "1 or 2 parities"),
        ("parity:1/2", "parity:1/2: .*at least 3 nodes.*use replicas:2"),
        ("parity:2/3", "at least 4 nodes.*use replicas:3"),
    ],
)
def test_texts_that_are_no_scheme_are_refused(text: str, told: str) -> None:
    with pytest.raises(CheckpointingException, match=told):
        Scheme.parse(text)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("mirror", 2), "kind must be one of none, replicas, parity"),
        (("none", 2), "in no groups"),
        (("replicas", 2, 1), "no parity"),
        (("replicas", 2.0), "group_size must be an integer"),
        (("parity", 4, True), "parity must be an integer"),
    ],
)
def test_schemes_that_make_no_sense_are_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(CheckpointingException, match=told):
        Scheme(*arguments)


@pytest.mark.parametrize(
    ("ask", "error", "told"),
    [
        (lambda: survivability(0, 8, "none"), CheckpointingException, "nodes must be an integer"),
        (lambda: survivability(4, 0, "none"), CheckpointingException, "ranks_per_node must be"),
        (lambda: survivability(4, 1, "none", 0), CheckpointingException, "shard_nbytes must be"),
        (lambda: survivability(4, 1, "twice"), CheckpointingException, "no redundancy scheme"),
        (lambda: survivability(1, 8, "replicas:2"), MismatchError, "use none, or more nodes"),
        (lambda: survivability(2, 8, "parity:1/8"), MismatchError, "K up to 2 in replicas:K$"),
        (lambda: survivability(3, 8, "replicas:4"), MismatchError, "at least 4 nodes, .* has 3"),
        (lambda: survivability(3, 8, "none", most_lost=4), MismatchError, "4 nodes cannot be lost"),
        (lambda: survivability(3, 8, "none", most_lost=0), CheckpointingException, "at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    ask: Callable[[], object], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        ask()


@pytest.mark.parametrize("nodes", range(1, 10))
def test_the_usual_schemes_are_those_that_fit(nodes: int) -> None:
    told = [str(scheme) for scheme in usual_schemes(nodes)]

    needed = {"none": 1, "replicas:2": 2, "replicas:3": 3}
    needed |= {"parity:1/4": 4, "parity:1/8": 8, "parity:2/8": 8}
    assert told == [scheme for scheme, least in needed.items() if nodes >= least]


def test_chances_are_given_up_to_four_lost_nodes_or_all_of_them() -> None:
    assert [len(survivability(nodes, 1, "none").loss) for nodes in (1, 3, 64)] == [1, 3, 4]
    assert len(survivability(64, 1, "none", most_lost=9).loss) == 9
