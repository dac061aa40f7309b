"""``docs/guarantees.md`` says of the faults and of the tests what is so."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.table import FAULTS, GUARANTEES, rows_below

_ROOT = Path(__file__).parents[2]
_TEXT = GUARANTEES.read_text()


def test_the_faults_of_the_document_are_those_of_the_tests() -> None:
    rows = rows_below("| fault |")

    assert [row[0] for row in rows] == list(FAULTS.values())
    assert all(then for _, then, _ in rows)
    counts = [count for _, _, count in rows]
    assert all(re.fullmatch(r"\d{1,3}(,?\d{3})*", count) for count in counts), counts


def test_every_test_that_the_document_names_is_there() -> None:
    names = re.findall(r"`((?:\w+/)*test_\w+\.py)`", _TEXT)

    assert len(names) > 8
    paths = [_ROOT / "tests" / name.removeprefix("tests/") for name in names]
    assert [str(path) for path in paths if not path.is_file()] == []
