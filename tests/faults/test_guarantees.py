"""``docs/guarantees.md`` says of the faults and of the tests what is so."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.table import FAULTS

_ROOT = Path(__file__).parents[2]
_TEXT = (_ROOT / "docs" / "guarantees.md").read_text()


def _rows_below(header: str) -> list[list[str]]:
    """Cells of the table whose first row begins so."""
    lines = iter(_TEXT.splitlines())
    columns = next(line for line in lines if line.startswith(header)).count("|")
    assert set(next(lines)) <= set("|-: ")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        assert line.count("|") == columns, line
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_faults_of_the_document_are_those_of_the_tests() -> None:
    rows = _rows_below("| fault |")

    assert [row[0] for row in rows] == list(FAULTS.values())
    assert all(then for _, then, _ in rows)
    counts = [count for _, _, count in rows]
    assert all(re.fullmatch(r"\d{1,3}(,?\d{3})*", count) for count in counts), counts


def test_every_test_that_the_document_names_is_there() -> None:
    names = re.findall(r"`((?:\w+/)*test_\w+\.py)`", _TEXT)

    assert len(names) > 8
    paths = [_ROOT / "tests" / name.removeprefix("tests/") for name in names]
    assert [str(path) for path in paths if not path.is_file()] == []
