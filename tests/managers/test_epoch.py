"""The epoch of a job's saves: generations, lineage, and what ranks that meet agree on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localckpt.errors import CheckpointingException
from localckpt.ids import Checkpoint
from localckpt.lineage import Point
from localckpt.managers.context import Epoch
from localckpt.options import Options
from localckpt.storage.directory import DirectoryStore
from tests.managers.jobs import context_of


@pytest.fixture
def epoch(tmp_path: Path) -> Iterator[Epoch]:
    """The epoch of a rank that is alone, and has joined."""
    store = DirectoryStore(tmp_path, "job", 0, 5.0, num_buffers=2)
    begun = context_of(store, Options(timeout=5.0)).epoch
    begun.join()
    yield begun
    store.close()


def _save(epoch: Epoch, iteration: int) -> Checkpoint:
    epoch.begin(iteration, lambda: False)
    checkpoint = epoch.next_identity(iteration).checkpoint
    epoch.newest_iteration = iteration
    return checkpoint


def test_each_save_has_a_generation_of_its_own_in_one_epoch(epoch: Epoch) -> None:
    first, second = _save(epoch, 1), _save(epoch, 2)

    assert first.generation < second.generation
    assert first.generation.epoch_id == second.generation.epoch_id
    assert epoch.lineage is not None
    assert epoch.lineage.epoch == first.generation.epoch_id


def test_going_back_begins_an_epoch_that_descends_from_what_was_loaded(epoch: Epoch) -> None:
    first, second = _save(epoch, 1), _save(epoch, 2)
    left = first.generation.epoch_id

    epoch.resume_from(first)
    epoch.join()
    again = _save(epoch, 2)

    assert epoch.lineage is not None
    assert again.generation.epoch_id != left
    assert epoch.lineage.resumed_at == 1
    assert epoch.lineage.ancestors == (Point(left, 1),)
    assert not epoch.lineage.descends_from(left, second.iteration)


def test_loading_the_newest_of_an_epoch_goes_on_in_it(epoch: Epoch) -> None:
    _save(epoch, 1)
    newest = _save(epoch, 2)
    lineage = epoch.lineage

    epoch.resume_from(newest)

    assert epoch.lineage is lineage
    assert epoch.checked(3) == 3


def test_an_iteration_is_saved_again_only_after_going_back(epoch: Epoch) -> None:
    first, _ = _save(epoch, 1), _save(epoch, 2)
    with pytest.raises(CheckpointingException, match="iteration 2 cannot be saved"):
        epoch.checked(2)

    epoch.resume_from(first)

    assert epoch.checked(2) == 2
    epoch.start_over()
    assert epoch.checked(0) == 0
