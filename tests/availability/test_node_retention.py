"""Checkpoints that stay on the nodes by a metric, decided from plain data."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt import Best, CheckpointingException, Retention
from localckpt.availability.durability import Durability, Found
from localckpt.availability.retention import Retirement, node_rules, rules
from localckpt.ids import Checkpoint, Generation
from localckpt.lineage import EpochId, Lineage, Point
from localckpt.managers.context import JobCheckpoints
from localckpt.replication.strategies import NoReplication

_VALUES = st.none() | st.sampled_from([-math.inf, 0.5, 1.0, 2.0, math.inf])
_RETENTIONS = st.builds(
    Retention,
    st.integers(1, 3),
    st.none(),
    st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)


class _Job:
    """A job of one rank, whose starts hand on what a look at the nodes would find."""

    def __init__(self, retention: Retention) -> None:
        self.retention = retention
        self.known = JobCheckpoints(NoReplication(1.0, None))

    def save(self, iteration: int, value: float | None, bad: bool = False) -> Retirement | None:
        checkpoint = _checkpoint(iteration)
        metric = None if value is None else ("loss", value)
        self.known.note(checkpoint, mark="bad" if bad else None, metric=metric)
        self.known.add(checkpoint, _kept(iteration))
        return self.known.keep(iteration, self.retention)

    def restart(self) -> None:
        known = self.known
        found = Found({c: _kept(c.iteration) for c in known.complete}, [], "", known.trusts)
        self.known = JobCheckpoints(NoReplication(1.0, None))
        self.known.take_in(Found.from_json(json.loads(json.dumps(found.to_json()))))

    @property
    def iterations(self) -> set[int]:
        return {checkpoint.iteration for checkpoint in self.known.complete}


def _checkpoint(iteration: int) -> Checkpoint:
    return Checkpoint(Generation(1, 1 + iteration), iteration, 1)


def _kept(iteration: int) -> Durability:
    return Durability(iteration, "local", 1, 1)


@given(st.lists(st.tuples(_VALUES, st.booleans(), st.booleans()), max_size=12), _RETENTIONS)
def test_what_stays_is_the_last_and_the_best_of_all_that_was_saved(
    saves: list[tuple[float | None, bool, bool]], retention: Retention
) -> None:
    assert retention.best is not None
    assert retention.last is not None
    sign = 1.0 if retention.best.mode == "min" else -1.0
    job, sound = _Job(retention), dict[int, float | None]()

    for iteration, (value, is_bad, restarts) in enumerate(saves):
        before = {*job.iterations, iteration}
        over = job.save(iteration, value, is_bad)
        if not is_bad:
            sound[iteration] = value
        if restarts:
            job.restart()

        valued = [(sign * v, -i) for i, v in sound.items() if v is not None]
        expected = {-i for _, i in sorted(valued)[: retention.best.count]}
        expected.update([*sound][-retention.last :])
        if len(sound) < retention.last:
            expected.update(sound)
        bad = job.iterations - sound.keys()
        assert job.iterations - bad == expected
        # The newest is the last resort if it is newer than all that are sound.
        assert bad <= {iteration}
        assert len(expected) <= retention.most
        if over is not None:
            assert {i for i in before if not over.takes(_checkpoint(i))} == job.iterations


def test_what_the_job_went_back_from_is_not_best() -> None:
    job = _Job(Retention(last=1, best=Best("loss")))
    for iteration, value in ((1, 2.0), (2, 1.0), (3, 3.0)):
        job.save(iteration, value)
    job.restart()
    epoch = _checkpoint(1).generation.epoch_id
    # Back to iteration 1, which is gone here, from 2 and 3.
    job.known.job_has_looked = True
    job.known.began(Lineage(EpochId(2, 7), "local", 1, (Point(epoch, 1),), (Point(epoch, 3),)))
    again = Checkpoint(Generation(2, 7 << 28), 2, 1)
    job.known.note(again, metric=("loss", 5.0))
    job.known.add(again, _kept(2))

    over = job.known.keep(2, job.retention)

    assert job.known.complete == [again]
    assert over is not None
    assert over.takes(_checkpoint(2))


@pytest.mark.parametrize(
    ("keep_last", "retention", "told"),
    [
        (2, Retention(last=2), "give keep_last= or retention=, not both: retention=Retention"),
        (0, None, "keep_last is 0; it must be at least 1"),
        (None, Retention(best=Best("loss")), "which need last=, at least 1: a restart loads"),
        (None, Retention(), "which need last=, at least 1"),
        (
            None,
            Retention(last=2, every=10),
            "every= would fill them: .* has no bound. Give it",
        ),
        (None, Retention(2, None, Best("l" * 201)), "has 201 characters, and the nodes note at"),
        (None, "best", r"retention='best': give the rules as Retention\(last=2, ...\)"),
    ],
)
def test_what_the_nodes_cannot_follow_is_an_error_that_says_why(
    keep_last: int | None, retention: Retention | None, told: str
) -> None:
    with pytest.raises(CheckpointingException, match=told):
        node_rules(keep_last, retention)


def test_the_short_form_is_the_rule() -> None:
    assert node_rules(3, None) == Retention(last=3)
    assert node_rules(None, None) == Retention(last=2)
    assert rules(None, None) == Retention()
    with pytest.raises(CheckpointingException, match="shared_retention=, not both"):
        rules(3, Retention(), "shared_")
