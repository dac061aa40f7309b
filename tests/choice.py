"""Which of the tests a run has: the lanes, and the rows that are drawn of a large product.

A plain run is what a newcomer waits for. Of all tests that start a framework
(``@pytest.mark.framework``) it has one example for each (``@pytest.mark.example``), and of a test
that is marked ``@pytest.mark.rows(n)`` n of its rows. The commit draws them, so that another commit
runs others. The two kinds of stores, disk and memory, are crossed with all that a store does in
``tests/storage``; elsewhere a row runs with one of the two. ``--faults`` runs all.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.programs import run

__all__ = ["Choice", "drawn"]

_DRAW = "LOCALCKPT_TEST_DRAW"
_KINDS = ("disk", "memory")
_STORAGE = Path(__file__).parent / "storage"


def drawn(rows: Iterable[str], count: int, draw: str) -> set[str]:
    """Draw rows by their names; every process draws the same."""

    def place(row: str) -> bytes:
        return hashlib.sha256(f"{draw} {row}".encode()).digest()

    return set(sorted(rows, key=place)[:count])


class Choice:
    """A pytest plugin that leaves out the tests which a run does not have.

    Args:
        is_all: Every row and every test of a framework is run.
    """

    def __init__(self, is_all: bool) -> None:
        self._is_all = is_all
        # Set for the workers, which collect the tests anew.
        self._draw = os.environ.setdefault(_DRAW, _version_of(Path(__file__).parent))

    def pytest_report_header(self) -> str:
        return "rows: all" if self._is_all else f"rows: {_DRAW}={self._draw!r} draws them again"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._is_all:
            return
        run = [item for item in items if not _is_of_a_framework(item)]
        left_out = self._left_out(run)
        run = [item for item in run if item.nodeid not in left_out]
        if others := [item for item in items if item not in set(run)]:
            config.hook.pytest_deselected(items=others)
            items[:] = run

    def _left_out(self, items: list[pytest.Item]) -> set[str]:
        of_one_row = defaultdict[tuple[str, ...], list[pytest.Item]](list)
        for item in items:
            of_one_row[_row_whatever_the_kind(item)].append(item)
        left_out = set[str]()
        for kinds in of_one_row.values():
            left_out |= self._but(1, kinds)
        rows = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            if item.nodeid not in left_out and item.get_closest_marker("rows") is not None:
                rows[_test(item)].append(item)
        for of_one_test in rows.values():
            mark = of_one_test[0].get_closest_marker("rows")
            assert mark is not None
            left_out |= self._but(mark.args[0], of_one_test)
        return left_out

    def _but(self, count: int, items: list[pytest.Item]) -> set[str]:
        names = {item.nodeid for item in items}
        return names - drawn(names, count, self._draw)


def _version_of(root: Path) -> str:
    """The commit that is checked out, and whether something was changed."""
    command = "git", "describe", "--always", "--dirty"
    try:
        done = run(*command, cwd=root)
    except FileNotFoundError:
        return "an unknown commit"
    return done.stdout.strip() or "an unknown commit"


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _row_whatever_the_kind(item: pytest.Item) -> tuple[str, ...]:
    call = getattr(item, "callspec", None)
    if call is None or call.params.get("kind") not in _KINDS or _STORAGE in item.path.parents:
        return (item.nodeid,)
    others = [(name, value) for name, value in call.params.items() if name != "kind"]
    return (_test(item), *(f"{name}={value!r}" for name, value in sorted(others)))


def _is_of_a_framework(item: pytest.Item) -> bool:
    is_example = item.get_closest_marker("example") is not None
    return item.get_closest_marker("framework") is not None and not is_example
