"""No clock but the one that only counts seconds decides anything."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import localckpt
from tests.managers.jobs import iterations_on, make_manager, resume, state_of

pytestmark = pytest.mark.fault("clock")

_YEAR_S = 365 * 86_400


@pytest.mark.parametrize("times", ["equal", "reversed", "long ago", "to come"])
def test_the_times_of_files_have_no_effect(times: str, tmp_path: Path) -> None:
    now = 1_800_000_000
    for iteration in (1, 2, 3):
        # Each in a life of its own, so that all of the next one's decisions are made from files.
        with make_manager("disk", tmp_path, keep_last=2) as manager:
            if iteration > 1:
                resume(manager, 0, iteration - 1)
            manager.save(state_of(0, iteration), iteration)
        for path in tmp_path.rglob("*"):
            seconds = {
                "equal": now,
                "reversed": now - iteration * _YEAR_S,
                "long ago": 0,
                "to come": now + 50 * _YEAR_S,
            }[times]
            os.utime(path, (seconds, seconds))

    with make_manager("disk", tmp_path, keep_last=2) as manager:
        resume(manager, 0, 3)
    assert iterations_on(tmp_path) == {2, 3}


# Commands show ages to people: files' times come from the listings, and now is asked where they are
# shown. The record of events says when each began, and resume() how old a checkpoint is.
_SHOW_TIMES = {
    *("storage/catalog.py", "global_tier/places.py", "cli/output.py"),
    *("events/stream.py", "checkpointer/epochs.py", "checkpointer/resume.py"),
}


def test_nothing_asks_what_time_it_is_but_to_show_it() -> None:
    package = Path(localckpt.__file__).parent
    asked = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("time", "time_ns", "now", "today", "utcnow", "st_mtime", "st_mtime_ns")
    }

    assert asked == _SHOW_TIMES
