"""``localckpt survive`` compares schemes: for people, for programs, and as a picture."""

from __future__ import annotations

import doctest
import shlex
from pathlib import Path

import pytest

from localckpt.cli.survival import survivability
from tests.cli.commands import Answer, call

_DOCS = Path(__file__).parents[2] / "docs"
_JOB = ("survive", "--nodes", "64", "--ranks-per-node", "8")


def _rows(answer: Answer) -> dict[str, list[str]]:
    """The cells of each scheme, of all tables."""
    rows: dict[str, list[str]] = {}
    for line in answer.out.splitlines():
        name, *cells = [cell.strip() for cell in line.split("  ") if cell.strip()] or [""]
        if cells:
            rows.setdefault(name, []).extend(cells)
    return rows


def test_only_schemes_that_are_asked_for_are_told_and_each_once() -> None:
    schemes = ("--scheme", "parity:1/4", "--scheme", "none", "--scheme", "parity:1/4")

    told = call(*_JOB, *schemes, "--json").json()["schemes"]

    assert [row["scheme"] for row in told] == ["parity:1/4", "none"]


def test_the_size_of_a_shard_tells_bytes_of_a_rank_and_of_a_node() -> None:
    rows = _rows(call(*_JOB, "--shard-size", "12GB"))

    assert rows["replicas:2"][-4:] == ["12.0 GB", "96.0 GB", "12.0 GB", "96.0 GB"]
    assert rows["replicas:3"][-4] == "24.8 GB (some 36.0 GB)"
    assert rows["parity:1/4"][-4:] == ["4.0 GB", "32.0 GB", "12.0 GB", "96.0 GB"]


def test_what_hardly_ever_happens_is_not_told_as_never() -> None:
    many = ("survive", "--nodes", "100000", "--ranks-per-node", "1")

    rows = _rows(call(*many, "--scheme=replicas:4", "--scheme=parity:1/50000"))

    assert rows["replicas:4"][-4:] == ["never", "never", "never", "<0.001 %"]
    assert rows["parity:1/50000"][-4:] == ["never", "50.0 %", "always", "always"]


def test_programs_are_told_what_the_function_tells() -> None:
    told = call(*_JOB, "--scheme", "replicas:3", "--shard-size", "12GB", "--json").json()

    survival = survivability(64, 8, "replicas:3", 12 * 10**9)
    assert told == {
        "nodes": 64,
        "ranks_per_node": 8,
        "shard_nbytes": 12 * 10**9,
        "schemes": [survival.to_json()],
    }
    assert [row["probability"] for row in told["schemes"][0]["loss"]] == list(survival.loss)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("12GB", 12 * 10**9),
        ("12 gb", 12 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1T", 10**11),
        ("700Mi", 700 * 2**20),
        ("2.5kB", 2500),
        ("7B", 7),
    ],
)
def test_sizes_are_read_with_their_units(text: str, nbytes: int) -> None:
    told = call(*_JOB, "--shard-size", text, "--json").json()

    assert told["shard_nbytes"] == nbytes


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


def _shown(document: str) -> list[tuple[list[str], str]]:
    """Each time a document calls ``survive``: how, and what it says is printed."""
    blocks = (_DOCS / document).read_text().split("```")[1::2]
    calls = [block.split("\n", 2)[1:] for block in blocks if "\n$ localckpt survive " in block]
    return [(shlex.split(command)[2:], out) for command, out in calls]


@pytest.mark.parametrize(("document", "times"), [("choosing.md", 2), ("cli.md", 1)])
def test_documents_show_what_the_command_prints(document: str, times: int) -> None:
    shown = _shown(document)

    assert len(shown) == times
    for arguments, out in shown:
        assert call(*arguments).out == out


def test_what_the_document_asks_python_is_answered_so() -> None:
    failed, attempted = doctest.testfile(str(_DOCS / "choosing.md"), module_relative=False)

    assert attempted > 3
    assert failed == 0
