"""What schemes cost and survive: closed forms and enumeration agree."""

from __future__ import annotations

import doctest
import shlex
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, combinations, pairwise
from math import comb
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.cli.survival import Scheme, Survival, survivability, usual_schemes
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.replication.groups import parse_group_sequence
from tests.cli.commands import call

_REPLICAS = st.integers(2, 6).map(lambda copies: Scheme("replicas", copies))
_PARITY = st.integers(1, 2).flatmap(
    lambda parity: st.integers(parity + 2, 8).map(lambda size: Scheme("parity", size, parity))
)
_SCHEMES = st.one_of(st.just(Scheme("none")), _REPLICAS, _PARITY)


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
def test_the_closed_form_and_enumeration_agree_and_what_survives_any_loss_is_never_lost(
    survival: Survival,
) -> None:
    sizes = [size for size, count in survival.groups for _ in range(count)]
    groups = [range(*ends) for ends in pairwise([0, *accumulate(sizes)])]
    tolerated = [survival.scheme.tolerated(len(group)) for group in groups]

    for lost in range(1, min(survival.nodes, 5) + 1):
        assert survival.loss[lost - 1] == _enumerated(groups, tolerated, lost)
    limit = survival.survives_any
    assert all(probability == 0 for probability in survival.loss[:limit])
    assert all(probability > 0 for probability in survival.loss[limit:])
    assert all(a <= b for a, b in pairwise(survival.loss))
    assert survival.loss[-1] == 1


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


_NO_SCHEMES = {
    "": "'' is no redundancy scheme: give none, replicas:K",
    "twice": "no redundancy scheme",
    "replicas:2\n": "is no redundancy scheme",
    "replicas:٢": "is no redundancy scheme",
    "replicas:" + 5000 * "9": "is no redundancy scheme",
    "parity:1": "is no redundancy scheme",
    "replicas:1": "replicas:1: K counts the owner's shard too.*2 or more; or use none",
    "parity:0/4": "1 or 2 parities",
    "parity:3/8": "1 or 2 parities",
    "parity:1/2": "parity:1/2: .*at least 3 nodes.*use replicas:2",
    "parity:2/3": "at least 4 nodes.*use replicas:3",
}


@pytest.mark.parametrize(
    ("ask", "error", "told"),
    [
        (lambda: survivability(0, 8, "none"), CheckpointingException, "nodes must be an integer"),
        (lambda: survivability(4, 0, "none"), CheckpointingException, "ranks_per_node must be"),
        (lambda: survivability(4, 1, "none", 0), CheckpointingException, "shard_nbytes must be"),
        (lambda: Scheme("mirror"), CheckpointingException, "kind must be one of"),
        (lambda: Scheme("none", 2), CheckpointingException, "are in no groups"),
        (lambda: Scheme("replicas", 2, 1), CheckpointingException, "replicas have no parity"),
        *(
            (lambda text=text: Scheme.parse(text), CheckpointingException, told)
            for text, told in _NO_SCHEMES.items()
        ),
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


def test_the_usual_schemes_are_those_that_fit() -> None:
    needed = {"none": 1, "replicas:2": 2, "replicas:3": 3}
    needed |= {"parity:1/4": 4, "parity:1/8": 8, "parity:2/8": 8}

    for nodes in range(1, 10):
        fitting = [scheme for scheme, least in needed.items() if nodes >= least]
        assert [str(scheme) for scheme in usual_schemes(nodes)] == fitting


_DOCS = Path(__file__).parents[2] / "docs"
_JOB = ("survive", "--nodes", "64", "--ranks-per-node", "8")


def test_sizes_are_read_with_their_units() -> None:
    sizes = {"1": 1, "12GB": 12 * 10**9, "12 gb": 12 * 10**9, "1.5GiB": 3 * 2**29}
    sizes |= {"0.1T": 10**11, "700Mi": 700 * 2**20, "2.5kB": 2500, "7B": 7}

    for text, nbytes in sizes.items():
        told = call(*_JOB, "--shard-size", text, "--json").json()
        assert told["shard_nbytes"] == nbytes, text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--scheme", "raid5"), "'raid5' is no redundancy scheme: give none, replicas:K"),
        (("--scheme", "replicas:65"), "replicas:65 needs at least 65 nodes, and the job has 64"),
        (("--scheme", "parity:1/\x1b[31m"), r"'parity:1/\x1b[31m' is no redundancy scheme"),
        (("--shard-size", "-1GB"), "'-1GB' is no size: give a number of bytes"),
        (("--shard-size", "1e9"), "'1e9' is no size"),
        (("--shard-size", "1iB"), "'1iB' is no size"),
        (("--shard-size", "0GB"), "'0GB' is no size of a shard: give one byte or more"),
    ],
)
def test_what_cannot_be_told_is_one_line_and_nothing_else(
    arguments: tuple[str, str], told: str
) -> None:
    answer = call(*_JOB, *arguments)

    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"localckpt: {told}")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(("document", "times"), [("choosing.md", 2), ("cli.md", 1)])
def test_documents_show_what_the_command_prints(document: str, times: int) -> None:
    blocks = (_DOCS / document).read_text().split("```")[1::2]
    shown = [block.split("\n", 2)[1:] for block in blocks if "\n$ localckpt survive " in block]

    assert len(shown) == times
    for command, out in shown:
        assert call(*shlex.split(command)[2:]).out == out


def test_what_the_document_asks_python_is_answered_so() -> None:
    failed, attempted = doctest.testfile(str(_DOCS / "choosing.md"), module_relative=False)

    assert attempted > 3
    assert failed == 0
