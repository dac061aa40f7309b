"""Options of managers, under which names they are taken and what is refused; and the platform."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localckpt
from tests.managers.jobs import error_of
from tests.programs import run_python
from tests.ranks import on_ranks

MAKE: dict[str, Callable[..., Any]] = {
    "nodes": localckpt.LocalCheckpointManager,
    "shared storage": localckpt.GlobalCheckpointManager,
}


@pytest.mark.parametrize("where", MAKE)
def test_an_option_is_taken_under_either_name_and_refused_twice_or_unknown(
    where: str, tmp_path: Path
) -> None:
    for name in ("timeout", "timeout_s"):
        error = error_of(lambda name=name: MAKE[where](tmp_path, **{name: 0}))
        assert "timeout is 0 s; it must be above" in error
    with pytest.raises(TypeError, match="timeout= and timeout_s= are one option"):
        MAKE[where](tmp_path, timeout=5.0, timeout_s=5.0)
    with pytest.raises(TypeError, match=r"no such option: retries; there are .*, timeout_s"):
        MAKE[where](tmp_path, retries=3)

    assert not [*tmp_path.iterdir()]
    for name in ("timeout", "timeout_s"):
        MAKE[where](tmp_path, **{name: 5.0}).close()


@pytest.mark.parametrize("where", MAKE)
# Half of what it waits for them by default.
@on_ranks(2, timeout_s=15.0)
def test_a_constructor_that_is_refused_waits_no_longer_for_others_than_it_is_told(
    rank: int, where: str, tmp_path: Path
) -> None:
    if rank == 0:
        text = error_of(lambda: MAKE[where](tmp_path, retries=3, timeout_s=1.0), TypeError)
        assert "no such option: retries" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"elastic": True, "private": {"rng": "loose"}}, "'rng' in private= is 'loose'"),
        ({"elastic": True, "private": {"": "drop"}}, "none for"),
        ({"private": {"rng": "drop"}}, "give elastic=True"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(localckpt.CheckpointingException, match=told):
        MAKE["nodes"](tmp_path, **options)


def test_another_platform_is_refused_in_one_sentence() -> None:
    code = "import sys; sys.platform = 'darwin'; import localckpt"
    done = run_python(code)

    told = "ImportError: localckpt runs on Linux only, and this is darwin"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, told)
