"""Random sequences of faults, each of which another test makes alone: what was complete is loaded.

Every decision of a step is drawn from the seed and the step's number alone, so that a seed takes
the same steps however the timing turns out.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from localckpt import parse_group_sequence
from tests.faults.images import identity_in
from tests.faults.remote import Answer, PerRank, Ranks
from tests.faults.trainer import SESSION, Setup, Trainer, state_of_attempt
from tests.managers.jobs import assert_same

Dirs = Callable[[int], list[Path]]

# Together they take all kinds of steps, with each kind of manager.
_SEEDS = (96, 116)
_STEPS = 16
_LONG_S = 600.0
_LIMIT_S = 3600
_LONG_STEPS = 60
_TIMEOUT_S = 3.0
# A call waits for what is behind it, meets the others a few times, and a computer with much to do
# takes its own time.
_LIMIT_OF_CALL_S = 12 * _TIMEOUT_S + 15.0


@dataclass
class _Checkpoint:
    """A checkpoint that all ranks called complete.

    Attributes:
        copies: The nodes that have each rank's shard, as far as nothing was done to them, with its
            name and checksum.
    """

    iteration: int
    attempt: int
    copies: dict[int, dict[Path, tuple[str, int]]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return bool(self.copies) and all(self.copies.values())


class _Campaign:
    """A job, its nodes, and what it was promised.

    Args:
        setup: How the job saves.
        nodes: The nodes' directories, in the order of the ranks.
        small: The node that can be filled, where one could be mounted.
    """

    def __init__(self, setup: Setup, nodes: Sequence[Path], small: Path | None) -> None:
        self.setup = setup
        self.choice = random.Random()
        self.trail: list[str] = []
        self.output = ""
        self.ranks: Ranks | None = None
        self.small = small
        # Of a save that lost a rank nobody knows what came of it, until the next start has loaded.
        self.is_unsure = False
        self._nodes = list(nodes)
        self._kept: dict[Path, Path] = {}
        self._cliques = parse_group_sequence(1, 2, setup.world_size)
        self._iterations: list[int] = []
        self._complete: list[_Checkpoint] = []
        self._iteration = 0
        self._under_way: list[int] = []
        # The first attempt of this life, and whether its ranks could not always remove files.
        self._first = 0
        self._is_untidy = False

    # What the job does.

    def restart(self, blow: Callable[[], int] | None = None) -> None:
        """Start the job's processes, find and load; a blow hits the load."""
        before = self._shards()
        self._start()
        found = {answer.value for answer in self._ask("find").values()}
        assert len(found) == 1, found
        answers = self._ask("load", blow=blow)
        errors = self._same_end(answers, lost=blow is not None)
        least = max((c for c in self._complete if c.is_whole), key=_age, default=None)
        if errors and blow is None:
            assert least is None, (least, errors)
            assert all(text.startswith("NoReplicasAvailableError") for text in errors), errors
            self._complete, self._iteration = [], 0
        elif not errors:
            self._judge_load(answers, least)
        self.is_unsure = False
        deleted = [p for p in before if not (p.exists() or Path(f"{p}.corrupt").exists())]
        assert not deleted

    def _judge_load(self, answers: dict[int, Answer], least: _Checkpoint | None) -> None:
        """All ranks have one attempt's state, bit for bit, of no older checkpoint than there is."""
        loaded = {rank: pickle.loads(answer.value[1]) for rank, answer in answers.items()}
        iteration = next(iter(answers.values())).value[0][0]
        attempt = next(iter(loaded.values()))["attempt"]
        for rank, answer in answers.items():
            assert answer.value[0] == (iteration, rank, SESSION)
            assert_same(loaded[rank], state_of_attempt(rank, iteration, attempt))
        assert self._iterations[attempt] == iteration
        # A node that comes back may have had something newer.
        assert least is None or iteration >= least.iteration or attempt > least.attempt, least
        known = [place for place, c in enumerate(self._complete) if c.attempt == attempt]
        self._complete = (
            self._complete[: known[0] + 1] if known else [_Checkpoint(iteration, attempt)]
        )
        self._iteration = iteration
        self._say(f"at {iteration}")

    def go_back(self) -> None:
        """The user starts from something older, and does not load the newest."""
        self._start()
        self._ask("find")
        self._iteration = max(0, self._iteration - 1 - self.choice.randrange(6))
        self._complete = []
        self.save()

    def save(self) -> None:
        self.settle()
        self._save()

    def _save(self, blow: Callable[[], int] | None = None, may_fail: bool = False) -> None:
        attempt = self._next_attempt()
        answers = self._ask("save", self._iteration, attempt, blow=blow)
        errors = self._same_end(answers, may_fail, blow is not None)
        self._ends({attempt: errors}, blow is not None)

    def begin(self) -> None:
        self.settle()
        for _ in range(self.choice.choice((1, 2))):
            attempt = self._next_attempt()
            assert not self._same_end(self._ask("begin", self._iteration, attempt))
            self._under_way.append(attempt)

    def settle(
        self, blow: Callable[[], int] | None = None, may_fail: bool = False, lost: bool = False
    ) -> None:
        """Finalize the saves behind training."""
        attempts, self._under_way = self._under_way, []
        if not attempts:
            return
        answers, lost = self._ask("finalize", True, blow=blow), lost or blow is not None
        errors: dict[int, list[str]] = {}
        for attempt in attempts:
            ends = {rank: dict(answer.value).get(attempt) for rank, answer in answers.items()}
            errors[attempt] = [text for text in ends.values() if text is not None]
            self._check_errors(errors[attempt], len(ends), may_fail, lost)
        self._ends(errors, lost)

    def _ends(self, errors: dict[int, list[str]], lost: bool) -> None:
        """Take note of how saves ended; what is complete has all its copies, and keeps them."""
        for attempt, texts in errors.items():
            self._say(f"attempt {attempt} {'failed' if texts else 'is complete'}")
        self.is_unsure |= lost
        if lost:
            return
        good = [attempt for attempt, texts in errors.items() if not texts]
        self._complete += [_Checkpoint(self._iterations[attempt], attempt) for attempt in good]
        self._complete = self._complete[-self.setup.keep_last :]
        kept = [checkpoint for checkpoint in self._complete if checkpoint.attempt >= self._first]
        for checkpoint in kept:
            if checkpoint.attempt in good:
                checkpoint.copies = self._copies(checkpoint.iteration)
            for nodes in checkpoint.copies.values():
                for node, (name, checksum) in nodes.items():
                    there = [crc32(path.read_bytes()) for path in node.glob(f"*/*/{name}")]
                    assert checksum in there, (node, name)
        if good and len(kept) == self.setup.keep_last and not self._is_untidy:
            old = [p for p in self._shards() if _iteration_in(p) < kept[0].iteration]
            assert not old, (kept[0], old)

    def _copies(self, iteration: int) -> dict[int, dict[Path, tuple[str, int]]]:
        copies: dict[int, dict[Path, tuple[str, int]]] = {}
        for clique in self._cliques:
            for owner, node in product(clique, (self._nodes[member] for member in clique)):
                paths = list(node.glob(f"*/*/{iteration:012d}.{owner}.*.safetensors"))
                assert paths, (node, iteration, owner)
                # Attempts before the last one may have saved the same iteration.
                path = max(paths, key=lambda path: [*map(int, path.name.split(".")[:-1])])
                copies.setdefault(owner, {})[node] = (path.name, crc32(path.read_bytes()))
        return copies

    def lose_a_rank(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kill or stop a rank in a save, a save behind training, or a load; the others end."""
        way = self.choice.choice(("save", "finalize", "load"))
        self._say(f"{sig.name} in {way}")
        if way == "load":
            self.crash()
            self.restart(self._blow(sig))
        elif way == "save":
            self.settle()
            self._save(self._blow(sig))
        else:
            self.begin()
            self.settle(self._blow(sig))
        self.crash()

    def stop_a_rank(self) -> None:
        self.lose_a_rank(signal.SIGSTOP)

    def fill_node(self) -> None:
        """A node without room: the save may fail, on all ranks; the next one is good."""
        assert self.small is not None
        self._is_untidy = True
        self.settle()
        ballast = self.small / "ballast"
        with ballast.open("wb") as file, suppress(OSError):
            while (status := os.statvfs(self.small)).f_bavail:
                nbytes = status.f_bavail * status.f_frsize
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), nbytes)
        self._save(may_fail=True)
        ballast.unlink()
        self.save()

    def break_directory(self) -> None:
        """A directory is not where it was: as with a node without room."""
        self._is_untidy = True
        self.begin()
        session = self._a_node() / f"session-{SESSION}"
        obstacle = session.with_name("obstacle")
        obstacle.write_text("in the way")
        hidden = session.rename(session.with_name("hidden"))
        while not session.is_file():
            # The job may have made it again.
            shutil.rmtree(session, ignore_errors=True)
            with suppress(IsADirectoryError):
                obstacle.rename(session)
        self.settle(may_fail=True)
        session.unlink()
        hidden.rename(session)
        self.save()

    def crash(self) -> None:
        self._end()

    def shut_down(self) -> None:
        self.settle()
        self._same_end(self._ask("close"))
        self._end(leave=True)
        left = [path for node in self._nodes for path in node.rglob("*.dirty")]
        # The next start removes what could not be removed while a directory was gone.
        assert not left or self._is_untidy

    # What happens to nodes while it does not run.

    def start_and_kill(self) -> None:
        self._start(wait=False)
        time.sleep(self.choice.uniform(0.0, 0.8))
        self._end()

    def lose_node(self) -> None:
        node = self._a_node()
        shutil.rmtree(node)
        node.mkdir()
        self._harm(node)

    def node_of_old(self) -> None:
        """A node is remembered; or is as it was when it was."""
        node = self._a_node()
        if node in self._kept:
            shutil.rmtree(node)
            shutil.move(self._kept.pop(node), node)
            self._harm(node)
        else:
            self._kept[node] = node.with_name(f"{node.name}-kept")
            shutil.copytree(node, self._kept[node])

    def move_ranks(self) -> None:
        self.choice.shuffle(self._nodes)

    def damage(self) -> None:
        """Spoil up to three shards: flip a bit, overwrite a part, or cut a file off at rest."""
        self.settle()
        # Who has mapped a file must not find it shorter.
        ways = ("flip", "zeros", "cut") if self.ranks is None else ("flip", "zeros")
        for path in self._some_shards(self.choice.randint(1, 3)):
            at, way = self.choice.randrange(path.stat().st_size), self.choice.choice(ways)
            with path.open("r+b") as file:
                file.seek(at)
                found = file.read(1 if way == "flip" else 5000)
                file.seek(at)
                file.write(bytes([found[0] ^ 4]) if way == "flip" else bytes(len(found)))
                if way == "cut":
                    file.truncate(at)
            self._say(f"{way} at {at} of {path}")

    def swap_files(self) -> None:
        """Let two files of a node change their names."""
        node = self._a_node()
        paths = self._some_shards(2, node)
        if len(paths) == 2:
            aside = paths[0].rename(paths[0].with_name("aside"))
            paths[1].rename(paths[0])
            aside.rename(paths[1])

    # How.

    def clean_up(self) -> None:
        if self.ranks is not None:
            self._end()
        for kept in self._kept.values():
            shutil.rmtree(kept)

    def _start(self, wait: bool = True) -> None:
        self._first, self._is_untidy = len(self._iterations), False
        self.ranks = Ranks(self.setup.world_size, Trainer, self.setup)
        if wait:
            assert not self._same_end(self._ask("open", PerRank(self._nodes)))
            left = [path for node in self._nodes for path in node.rglob("*.dirty")]
            assert not left
        else:
            self.ranks.tell("open", PerRank(self._nodes))

    def _end(self, leave: bool = False) -> None:
        assert self.ranks is not None
        ranks, self.ranks, self._under_way = self.ranks, None, []
        ranks.end(leave=leave)
        self.output = ranks.output

    def _ask(
        self, command: str, *args: Any, blow: Callable[[], int] | None = None
    ) -> dict[int, Answer]:
        """Make a call on all ranks, and wait for the answers of those that live."""
        assert self.ranks is not None
        self.ranks.tell(command, *args)
        hit = None if blow is None else blow()
        asked = [rank for rank in range(self.setup.world_size) if rank != hit]
        answers = self.ranks.answers(_LIMIT_OF_CALL_S, asked)
        for rank, answer in answers.items():
            assert not answer.died, (rank, command)
            assert answer.crash is None, answer.crash
        return answers

    def _same_end(
        self, answers: dict[int, Answer], may_fail: bool = False, lost: bool = False
    ) -> list[str]:
        """What all ranks raised, if they did; they do so together, and for a reason."""
        errors = [answer.error for answer in answers.values() if answer.error is not None]
        if not any("NoReplicasAvailableError" in text for text in errors):
            self._check_errors(errors, len(answers), may_fail, lost)
        return errors

    def _check_errors(self, errors: list[str], count: int, may_fail: bool, lost: bool) -> None:
        assert not errors or may_fail or lost, errors
        assert len(errors) in (0, count), errors
        if errors and not lost:
            # Who opens a store says it as it is, to the others as what the job could not do.
            cause = min((text.partition(": ")[2] for text in errors), key=len)
            assert all(cause in text for text in errors), errors

    def _blow(self, sig: signal.Signals) -> Callable[[], int]:
        hit, after_s = self.choice.randrange(self.setup.world_size), self.choice.uniform(0, 0.3)

        def strike() -> int:
            assert self.ranks is not None
            time.sleep(after_s)
            self.ranks.kill(hit, sig)
            return hit

        return strike

    def _next_attempt(self) -> int:
        self._iteration += self.choice.randint(1, 3)
        self._iterations.append(self._iteration)
        return len(self._iterations) - 1

    def _a_node(self) -> Path:
        node = self.choice.choice(sorted(self._nodes))
        self._say(node.name)
        return node

    def _some_shards(self, count: int, node: Path | None = None) -> list[Path]:
        nodes = self._nodes if node is None else [node]
        there = self._shards(nodes)
        chosen = self.choice.sample(there, min(count, len(there)))
        for path in chosen:
            iteration, owner = map(int, re.findall(r"^(\d+)\.(\d+)\.", path.name)[0])
            self._harm(next(at for at in nodes if at in path.parents), iteration, owner)
        return chosen

    def _shards(self, nodes: Sequence[Path] = ()) -> list[Path]:
        return sorted(path for at in nodes or self._nodes for path in at.glob("*/*/*.safetensors"))

    def _harm(self, node: Path, iteration: int | None = None, owner: int | None = None) -> None:
        """What a node has of an iteration and a rank, or all, is no longer counted on."""
        for checkpoint in self._complete:
            for of, nodes in checkpoint.copies.items():
                if iteration in (None, checkpoint.iteration) and owner in (None, of):
                    nodes.pop(node, None)

    def _say(self, words: str) -> None:
        self.trail[-1] += f" | {words}"


def _age(checkpoint: _Checkpoint) -> int:
    return checkpoint.attempt


def _iteration_in(path: Path) -> float:
    """The iteration of a file, by its name or header: one of them may have been spoiled."""
    with suppress(Exception):
        return max(identity_in(path.read_bytes()).iteration, int(path.name.partition(".")[0]))
    return float("inf")


_C = _Campaign
_ALIVE = [
    *((_C.save, 3), (_C.begin, 4), (_C.settle, 2), (_C.lose_a_rank, 3), (_C.stop_a_rank, 1)),
    *((_C.fill_node, 1), (_C.break_directory, 1), (_C.crash, 2), (_C.shut_down, 1)),
]
_AT_REST = [(_C.restart, 6), (_C.go_back, 1), (_C.start_and_kill, 1), (_C.move_ranks, 1)]
_HARMS = [(_C.lose_node, 1), (_C.node_of_old, 1), (_C.damage, 2), (_C.swap_files, 1)]


def _take_step(campaign: _Campaign, seed: int) -> None:
    """Take the next step. The first two see to it that there is something to lose."""
    number = len(campaign.trail)
    campaign.choice = random.Random(f"{seed}/{number}")
    steps = _ALIVE if campaign.ranks is not None else _AT_REST
    if not campaign.is_unsure:
        steps = [*steps, *(_HARMS if campaign.ranks is None else [(_C.damage, 1)])]
    possible = [step for step in steps if step[0] is not _C.fill_node or campaign.small]
    (step,) = campaign.choice.choices(*zip(*possible, strict=True))
    _take(campaign, (_C.restart, _C.save)[number] if number < 2 else step)


def _take(campaign: _Campaign, step: Callable[[_Campaign], None]) -> None:
    campaign.trail.append(step.__name__.replace("_", " "))
    step(campaign)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case for each seed; a seed or steps that were asked for may take hours.

    Without a seed a case draws one; without a number of steps it goes on for ten minutes.
    """
    option = metafunc.config.getoption
    seed, count = option("--seed"), option("--steps")
    courses: list[tuple[int | None, int | None]] = [(s, count or _STEPS) for s in _SEEDS]
    if seed is not None:
        courses = [(seed, count or _LONG_STEPS)]
    elif option("--faults"):
        courses = [(None, count)]
    limit = pytest.mark.timeout(_LIMIT_S if seed is count is None else 0)
    metafunc.parametrize(("seed", "count"), [pytest.param(*one, marks=limit) for one in courses])


@pytest.mark.fault("random-sequence")
def test_all_guarantees_hold_in_random_sequences_of_faults(
    seed: int | None,
    count: int | None,
    request: pytest.FixtureRequest,
    node_dirs: Dirs,
    shm_roots: Dirs,
    record_property: Callable[[str, object], None],
) -> None:
    end = time.monotonic() + _LONG_S if count is None else float("inf")
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    choice = random.Random(str(seed))
    kind, world_size = choice.choice(["disk", "memory"]), choice.choice([3, 4])
    setup = Setup(kind, world_size, choice.choice([1, 2, 3]), _TIMEOUT_S)
    nodes, small = (node_dirs if kind == "disk" else shm_roots)(world_size), None
    with suppress(pytest.skip.Exception):
        small = request.getfixturevalue("small_disk")("size=96m")
        nodes[0] = small / "node"
        nodes[0].mkdir()
    campaign = _Campaign(setup, nodes, small)
    print(f"seed {seed}: {setup}")

    try:
        while len(campaign.trail) != count and time.monotonic() < end:
            _take_step(campaign, seed)
        # Whatever happened, the job starts, saves, and leaves in peace.
        for step in ([] if campaign.ranks else [_C.restart]) + [_C.save, _C.shut_down]:
            _take(campaign, step)
    finally:
        for number, told in enumerate(campaign.trail, 1):
            print(f"{number:4d}  {told}")
        print(f"To run it again: make faults SEED={seed} STEPS={len(campaign.trail)}")
        campaign.clean_up()
        print(campaign.output)

    record_property("cases", len(campaign.trail))
