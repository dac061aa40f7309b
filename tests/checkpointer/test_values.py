"""``Values``: plain values of a loop, saved and resumed by their names on both tiers."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException, MismatchError, Values

_TIERS = ["nodes", "shared"]


def _options(place: Path, tier: str) -> dict[str, Any]:
    if tier == "nodes":
        return {"local": place / "nodes"}
    shutil.rmtree(place / "nodes", ignore_errors=True)
    return {"local": place / "nodes", "shared": place / "shared", "shared_every": 1}


def _save(place: Path, tier: str, run: Values) -> None:
    with Checkpointer({"run": run}, every=1, **_options(place, tier)) as checkpointer:
        assert checkpointer.resume() == 0
        checkpointer.step(0)


@pytest.mark.parametrize("tier", _TIERS)
def test_values_come_back_whatever_class_they_have_become(tier: str, tmp_path: Path) -> None:
    saved = Values(epoch=0, best=math.inf, seen=(), hidden=None)
    saved.epoch, saved.best = 3, torch.tensor(0.25)
    saved.seen, saved.hidden = ("a", 1), {"h": torch.ones(2, dtype=torch.bfloat16)}
    _save(tmp_path, tier, saved)

    run = Values(epoch=0, best=math.inf, seen=(), hidden=None)
    with Checkpointer({"run": run}, **_options(tmp_path, tier)) as checkpointer:
        assert checkpointer.resume() == 1

    assert (run.epoch, run.best.item(), run.seen) == (3, 0.25, ("a", 1))
    assert run.hidden["h"].dtype is torch.bfloat16


@pytest.mark.parametrize("tier", _TIERS)
def test_a_value_that_was_renamed_added_or_removed_is_an_error_that_names_it(
    tier: str, tmp_path: Path
) -> None:
    _save(tmp_path, tier, Values(epoch=5, best=1.0))

    for given in ({"epoch": 0, "top": 2.0}, {"epoch": 0}, {"epoch": 0, "best": 2.0, "new": 1}):
        run = Values(**given)
        with (
            Checkpointer({"run": run}, **_options(tmp_path, tier)) as checkpointer,
            pytest.raises(MismatchError) as caught,
        ):
            checkpointer.resume()
        assert run.state_dict() == given
        for name in {"epoch", "best"} ^ given.keys():
            assert name in str(caught.value)
    run = Values(epoch=0, top=2.0)
    with Checkpointer({"run": run}, **_options(tmp_path, tier)) as checkpointer:
        assert checkpointer.resume(partial=True) == 1
    assert run.state_dict() == {"epoch": 5, "top": 2.0}


def test_names_are_fixed_and_none_hides_a_method() -> None:
    run = Values(epoch=0)

    with pytest.raises(AttributeError, match=r"no value 'epohc' \(there are epoch\)"):
        run.epohc = 1
    with pytest.raises(CheckpointingException, match=r"state_dict=\.\.\.\): a method"):
        Values(state_dict=1)
    assert repr(run) == "Values(epoch=0)"
