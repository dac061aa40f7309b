"""Which of the tests a run has: the lanes, and the rows that are drawn of a large product.

A plain run is what a newcomer waits for. It has one example of each framework
(``@pytest.mark.example``) of all that starts one (``@pytest.mark.framework``), and of a test that is
marked ``@pytest.mark.rows(n)`` n of its rows. The commit draws them, so that another commit runs
others; rows that once failed (``@pytest.mark.kept``) are always among them. ``--faults`` runs all.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.faults.results import version_of

__all__ = ["Choice", "drawn"]

_DRAW = "LOCALCKPT_TEST_DRAW"


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
        self._draw = os.environ.setdefault(_DRAW, version_of(Path(__file__).parent))

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
        rows = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            if item.get_closest_marker("rows") is not None:
                rows[item.nodeid.partition("[")[0]].append(item)
        left_out = set[str]()
        for of_one_test in rows.values():
            mark = of_one_test[0].get_closest_marker("rows")
            assert mark is not None
            free = {item.nodeid for item in of_one_test if item.get_closest_marker("kept") is None}
            left_out |= free - drawn(free, *mark.args, self._draw)
        return left_out


def _is_of_a_framework(item: pytest.Item) -> bool:
    is_example = item.get_closest_marker("example") is not None
    return item.get_closest_marker("framework") is not None and not is_example
