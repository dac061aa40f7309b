"""``Values``: plain values of a loop, saved and resumed by their names."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException, MismatchError, Values


def _save(place: Path, run: Values) -> None:
    with Checkpointer({"run": run}, local=place, every=1) as checkpointer:
        assert checkpointer.resume() == 0
        checkpointer.step(0)


def test_values_come_back_whatever_class_they_have_become(tmp_path: Path) -> None:
    saved = Values(epoch=0, best=math.inf, seen=(), hidden=None)
    saved.epoch, saved.best = 3, torch.tensor(0.25)
    saved.seen, saved.hidden = ("a", 1), {"h": torch.ones(2, dtype=torch.bfloat16)}
    _save(tmp_path, saved)

    run = Values(epoch=0, best=math.inf, seen=(), hidden=None)
    with Checkpointer({"run": run}, local=tmp_path) as checkpointer:
        assert checkpointer.resume() == 1

    assert (run.epoch, run.best.item(), run.seen) == (3, 0.25, ("a", 1))
    assert run.hidden["h"].dtype is torch.bfloat16


def test_a_value_that_was_renamed_added_or_removed_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    _save(tmp_path, Values(epoch=5, best=1.0))

    for given in ({"epoch": 0, "top": 2.0}, {"epoch": 0}, {"epoch": 0, "best": 2.0, "new": 1}):
        run = Values(**given)
        with (
            Checkpointer({"run": run}, local=tmp_path) as checkpointer,
            pytest.raises(MismatchError) as caught,
        ):
            checkpointer.resume()
        assert run.state_dict() == given
        for name in {"epoch", "best"} ^ given.keys():
            assert name in str(caught.value)
    run = Values(epoch=0, top=2.0)
    with Checkpointer({"run": run}, local=tmp_path) as checkpointer:
        assert checkpointer.resume(partial=True) == 1
    assert run.state_dict() == {"epoch": 5, "top": 2.0}


def test_names_are_fixed_and_none_hides_a_method() -> None:
    run = Values(epoch=0)

    with pytest.raises(AttributeError, match=r"no value 'epohc' \(there are epoch\)"):
        run.epohc = 1
    with pytest.raises(CheckpointingException, match=r"state_dict=\.\.\.\): a method"):
        Values(state_dict=1)
