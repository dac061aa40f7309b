"""Options of managers: under which names they are taken, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localckpt

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


@pytest.mark.parametrize("where", MAKE)
def test_an_option_that_is_given_twice_or_unknown_is_refused_by_name(
    where: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="timeout= and timeout_s= are one option"):
        MAKE[where](tmp_path, timeout=5.0, timeout_s=5.0)
    with pytest.raises(TypeError, match=r"no such option: retries; there are .*, timeout_s"):
        MAKE[where](tmp_path, retries=3)

    assert not [*tmp_path.iterdir()]
