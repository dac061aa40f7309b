"""The oracle of the campaign complains of what is wrong, and of nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.image import pack
from tests.faults.campaign.job import SESSION, Setup, state_of_attempt
from tests.faults.campaign.nodes import damage
from tests.faults.campaign.oracle import Oracle, Violation
from tests.faults.campaign.remote import Answer
from tests.faults.campaign.survey import Survey, Version

_SETUP = Setup("disk", 4, 2, False, 3.0)
_NODES = [f"node{rank}" for rank in range(4)]


class _World:
    """What nodes hold after a job has saved, and what its ranks answer, all as it should be.

    Attempt 0 saved iteration 5, attempt 1 iteration 7, and after the job went back attempt 2 saved
    iteration 7 again.
    """

    def __init__(self, base: Path) -> None:
        self.oracle = Oracle(_SETUP)
        self.stores = {name: base / name for name in _NODES}
        self.newest = Version(2, 7, 30)
        for version in (Version(1, 5, 10), Version(1, 7, 11), self.newest):
            attempt = self.oracle.attempt(version.iteration)
            for rank, owner in product(range(4), range(4)):
                if rank // 2 == owner // 2:
                    self.put(_NODES[rank], rank, owner, version, attempt)
        self.answers = {rank: self.loads(rank, rank, 7, 2) for rank in range(4)}
        survey = self.look()
        self.oracle.found(survey, survey, self.finds(7))

    def put(self, node: str, folder: int, owner: int, version: Version, attempt: int) -> None:
        identity = ShardIdentity(
            SESSION, Generation(version.epoch, version.sequence), version.iteration, owner, 4
        )
        state = state_of_attempt(owner, version.iteration, attempt)
        path = self.path(node, folder, owner, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(wrapped(state), identity).view)

    def path(self, node: str, folder: int, owner: int, version: Version) -> Path:
        name = f"{version.iteration:012d}.{owner}.{version.epoch}.{version.sequence}.safetensors"
        return self.stores[node] / f"session-{SESSION}" / str(folder) / name

    def look(self) -> Survey:
        return self.oracle.look(self.stores)

    def finds(self, *iterations: int) -> dict[int, Answer]:
        return {rank: Answer(iterations[rank % len(iterations)]) for rank in range(4)}

    def loads(self, rank: int, owner: int, iteration: int, attempt: int) -> Answer:
        state = state_of_attempt(owner, iteration, attempt)
        return Answer(((iteration, rank, SESSION), pickle.dumps(state)))

    def judge_load(self) -> None:
        survey = self.look()
        self.oracle.loaded(survey, survey, self.answers)

    def judge_find(self, *iterations: int) -> None:
        survey = self.look()
        self.oracle.found(survey, survey, self.finds(*iterations))

    def judge_save(self) -> None:
        survey = self.look()
        self.oracle.saved([2], survey, _NODES, retired=False)

    def all_load(self, iteration: int, attempt: int) -> None:
        self.answers = {rank: self.loads(rank, rank, iteration, attempt) for rank in range(4)}
        self.judge_load()

    def one_loads(self, *wrong: int) -> None:
        self.answers[2] = self.loads(2, *wrong)
        self.judge_load()

    def one_loads_a_flipped_bit(self) -> None:
        state = state_of_attempt(2, 7, 2)
        state["model"]["weight"].view(torch.int32)[50] ^= 1
        self.answers[2] = Answer(((7, 2, SESSION), pickle.dumps(state)))
        self.judge_load()

    def one_cannot_load(self) -> None:
        self.answers[2] = Answer(error="NoReplicasAvailableError: nothing")
        self.judge_load()

    def lose(self, node: str, owner: int) -> None:
        self.path(node, int(node[-1]), owner, self.newest).unlink()

    def spoil(self, node: str, owner: int) -> None:
        damage(self.path(node, int(node[-1]), owner, self.newest), "flip", 0.7)

    def shards_of_two_attempts(self) -> None:
        self.put("node2", 2, 2, self.newest, 1)
        self.put("node3", 3, 2, self.newest, 1)
        self.look()

    def failed_and_left(self) -> None:
        self.oracle.failed([2])
        self.look()

    def older_than_another(self) -> None:
        survey = self.look()
        self.oracle.saved([1], survey, _NODES, retired=False)

    def not_let_go(self) -> None:
        survey = self.look()
        self.oracle.saved([1, 2], survey, _NODES, retired=True)


_WRONG: dict[str, tuple[str, Callable[[_World], object]]] = {
    "an older iteration": ("I2", lambda w: w.all_load(5, 0)),
    "what was abandoned": ("I1", lambda w: w.all_load(7, 1)),
    "another iteration on one rank": ("I1", lambda w: w.one_loads(2, 5, 0)),
    "another attempt on one rank": ("I1", lambda w: w.one_loads(2, 7, 1)),
    "the state of another rank": ("I1", lambda w: w.one_loads(3, 7, 2)),
    "a flipped bit": ("I1", lambda w: w.one_loads_a_flipped_bit()),
    "nothing": ("I2", lambda w: w.one_cannot_load()),
    "two answers": ("I1", lambda w: w.judge_find(7, 5)),
    "an older answer": ("I2", lambda w: w.judge_find(5)),
    "no answer": ("I2", lambda w: w.judge_find(-1)),
    "an iteration that nobody saved": ("I2", lambda w: w.judge_find(8)),
    "shards of two attempts": ("I1", lambda w: w.shards_of_two_attempts()),
    "a copy that is gone": (
        "I4",
        lambda w: (w.lose("node1", 0), w.oracle.check_standing(w.look())),
    ),
    "a copy that is spoiled": (
        "I4",
        lambda w: (w.spoil("node3", 3), w.oracle.check_standing(w.look())),
    ),
    "a save without a replica": ("I2", lambda w: (w.lose("node2", 3), w.judge_save())),
    "a save that is spoiled": ("I2", lambda w: (w.spoil("node2", 3), w.judge_save())),
    "a save that is not there": (
        "I2",
        lambda w: w.oracle.saved([w.oracle.attempt(9)], w.look(), _NODES),
    ),
    "a save that an older one overrules": ("I7", lambda w: w.older_than_another()),
    "a copy that was not made again": (
        "I2",
        lambda w: (w.lose("node2", 3), w.oracle.replicated(w.look(), {0: 0, 1: 0})),
    ),
    "copies that stay away": ("I2", lambda w: w.oracle.replicated(w.look(), {0: 1, 1: 1})),
    "a failed save that is there": ("I5", lambda w: w.failed_and_left()),
    "an old one that stays": ("I6", lambda w: w.not_let_go()),
    "an error on one rank": (
        "I5",
        lambda w: w.oracle.same_end({0: None, 1: "E: no"}, ["full"], []),
    ),
    "an error without a reason": ("I3", lambda w: w.oracle.same_end({0: "E: no"}, [], [])),
    "different errors": (
        "I5",
        lambda w: w.oracle.same_end({0: "E: no", 1: "E: what?"}, ["full"], []),
    ),
    "an error that names nobody": (
        "I3",
        lambda w: w.oracle.same_end({0: "E: rank 2 (asleep) did not come"}, [], [1]),
    ),
}


@pytest.mark.parametrize("what", _WRONG)
def test_the_oracle_complains_of(what: str, tmp_path: Path) -> None:
    guarantee, happens = _WRONG[what]

    with pytest.raises(Violation, match=f"^{guarantee}: "):
        happens(_World(tmp_path))


def test_the_oracle_does_not_complain_of_what_is_as_it_should_be(tmp_path: Path) -> None:
    world = _World(tmp_path)

    world.judge_find(7)
    world.judge_load()
    world.oracle.replicated(world.look(), {0: 0, 1: 0})
    world.judge_save()
    world.oracle.check_standing(world.look())
    world.oracle.same_end({0: None, 1: None}, [], [])
    world.oracle.same_end({0: "E: rank 1 (asleep) did not come"}, [], [1])
