"""Options of managers: under which names they are taken, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localckpt
from tests.managers.jobs import error_of
from tests.ranks import run_ranks

MAKE: dict[str, Callable[..., Any]] = {
    "nodes": localckpt.LocalCheckpointManager,
    "shared storage": localckpt.GlobalCheckpointManager,
}


@pytest.mark.parametrize("where", MAKE)
@pytest.mark.parametrize("name", ["timeout", "timeout_s"])
def test_a_manager_takes_its_deadline_under_either_name(
    where: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(localckpt.CheckpointingException, match="timeout is 0 s; it must be above"):
        MAKE[where](tmp_path, **{name: 0})
    with MAKE[where](tmp_path, **{name: 5.0}):
        pass


def _make_refused(rank: int, world_size: int, where: str, root: Path) -> str:
    if rank == 1:
        return ""
    return error_of(lambda: MAKE[where](root, retries=3, timeout_s=1.0), TypeError)


@pytest.mark.parametrize("where", MAKE)
def test_a_constructor_that_is_refused_waits_no_longer_for_others_than_it_is_told(
    where: str, tmp_path: Path
) -> None:
    # Half of what it waits for them by default.
    text, _ = run_ranks(_make_refused, 2, where, tmp_path, timeout_s=15.0)

    assert "no such option: retries" in text


@pytest.mark.parametrize("where", MAKE)
def test_an_option_that_is_given_twice_or_unknown_is_refused_by_name(
    where: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="timeout= and timeout_s= are one option"):
        MAKE[where](tmp_path, timeout=5.0, timeout_s=5.0)
    with pytest.raises(TypeError, match=r"no such option: retries; there are .*, timeout_s"):
        MAKE[where](tmp_path, retries=3)

    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("private", "told"),
    [({"rng": "loose"}, "'rng' in private= is 'loose'"), ({"": "drop"}, "none for")],
)
def test_a_rule_that_makes_no_sense_is_refused(
    private: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(localckpt.CheckpointingException, match=told):
        MAKE["nodes"](tmp_path, elastic=True, private=private)
    with pytest.raises(localckpt.CheckpointingException, match="give elastic=True"):
        MAKE["nodes"](tmp_path, private={"rng": "drop"})
