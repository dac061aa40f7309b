"""One job on its nodes, and what every step of the campaign does with it.

A call is made on all ranks, judged as soon as they have answered, and what lies on the nodes is
looked at before and after.
"""

from __future__ import annotations

import random
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.campaign.job import Setup, Trainer
from tests.faults.campaign.nodes import Node
from tests.faults.campaign.oracle import Oracle, require
from tests.faults.campaign.remote import Answer, OverdueError, PerRank, Ranks
from tests.faults.campaign.survey import Survey, session_files
from tests.ranks import RanksFailedError

__all__ = ["Blow", "Campaign", "Settled"]

# A call waits for what is behind it, meets the others a few times, and a computer with much to do
# takes its own time.
_WAITS = 12
_SLACK_S = 15.0
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Blow:
    """A rank that is killed, or stopped, while all are busy with a call.

    Attributes:
        rank: Whom it hits.
        moment: When, as a fraction of the time that the call took before.
        sig: SIGKILL, or SIGSTOP, which is followed by SIGKILL once the others have given up.
    """

    rank: int
    moment: float
    sig: signal.Signals = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Settled:
    """How one save ended on all living ranks."""

    attempt: int
    error: str | None
    lost: tuple[int, ...] = ()


class Campaign:
    """A job, its nodes, and what happens to them.

    Args:
        setup: How the job saves.
        nodes: One for each rank.
    """

    def __init__(self, setup: Setup, nodes: Sequence[Node]) -> None:
        self.setup = setup
        self.nodes = list(nodes)
        self.oracle = Oracle(setup)
        self.choice = random.Random()
        self.trail: list[str] = []
        self.outputs: deque[str] = deque(maxlen=3)
        self.iteration = 0
        self.under_way: list[int] = []
        # Not how many are: polls find that out sooner or later.
        self.begun = 0
        self.had_trouble = False
        # Nodes on which the job could not tidy up; the next start does.
        self.untidy: set[str] = set()
        self._ranks: Ranks | None = None
        self._took_s: dict[str, float] = {}
        self._dead_pids: set[int] = set()

    @property
    def is_alive(self) -> bool:
        """Whether the job runs."""
        return self._ranks is not None

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None
        return self._ranks

    def clean_up(self) -> None:
        """Leave neither processes nor directories."""
        if self._ranks is not None:
            self.end()
        for node in self.nodes:
            node.clean_up()

    def say(self, words: str) -> None:
        """Add to what is told of this step."""
        self.trail[-1] += f" | {words}"

    def fraction(self) -> float:
        return round(self.choice.random(), 3)

    def look(self) -> Survey:
        """Read what lies on the nodes; what must stand does."""
        survey = self._look()
        self.oracle.check_standing(survey)
        return survey

    @contextmanager
    def harm(self) -> Iterator[None]:
        """What is taken away inside is not the job's fault."""
        self.look()
        yield
        self.oracle.acted(self._look())

    # The job's life.

    def start(self, *, load: bool = True) -> None:
        """Start the job's processes, and load."""
        before = self.look()
        dirty = self.dirty()
        self._ranks = Ranks(self.setup.world_size, Trainer, self.setup)
        self._dead_pids -= set(self._ranks.pids)
        self.judge(self.ask("open", self._stores()))
        self.had_trouble = False
        self.untidy.clear()
        # Before what is loaded gets new copies, whose names may be the same.
        left = [path for path in dirty if path.exists()]
        require(not left, "I6", f"the start has left {', '.join(map(str, left))}")
        self.resume(before, load=load)
        for copy in before.copies:
            kept = copy.path.exists() or Path(f"{copy.path}.corrupt").exists()
            require(kept, "I4", f"{copy.path} was deleted")

    def start_in_vain(self, why_not: str) -> None:
        """Start the job where it cannot, or hardly; then end it."""
        self.look()
        self._ranks = Ranks(self.setup.world_size, Trainer, self.setup)
        error = self.judge(self.ask("open_and_find", self._stores()), [why_not])
        self.say("it starts" if error is None else error[:60])
        self.end()
        self.look()

    def start_and_kill(self, after_s: float) -> None:
        """Start the job, and kill it before it has begun or soon after."""
        self.look()
        self._ranks = Ranks(self.setup.world_size, Trainer, self.setup)
        self.ranks.tell("open_and_find", self._stores())
        time.sleep(after_s)
        self.end()

    def resume(self, before: Survey, *, load: bool = True, blow: Blow | None = None) -> None:
        """Find the newest checkpoint, and load it; the last of the calls takes the blow."""
        lost = [blow.rank] if blow else []
        finding = self.ask("find", blow=None if load else blow)
        if self.judge(finding, lost=[] if load else lost) is not None:
            return
        self.iteration = self.oracle.found(before, self.look(), finding)
        if load:
            loading = self.ask("load", blow=blow)
            nothing = all("NoReplicasAvailableError" in str(told) for told in loading.values())
            if lost and not nothing and self.judge(loading, lost=lost) is not None:
                return
            self.iteration = self.oracle.loaded(before, self.look(), loading)
        self.say(f"at {self.iteration}")

    def end(self, *, spare_workers: bool = False, wait: bool = True, leave: bool = False) -> None:
        """The job's processes are gone."""
        ranks, self._ranks, self.under_way, self.begun = self.ranks, None, [], 0
        try:
            ranks.end(spare_workers=spare_workers, leave=leave)
        except RanksFailedError as failed:
            require(False, "I6", f"ranks did not leave: {failed}")
        finally:
            self._dead_pids |= set(ranks.pids)
            self.outputs.append(ranks.output)
        self._ended = ranks
        if wait:
            self.await_orphans()

    def await_orphans(self) -> None:
        """What the last life's ranks had started ends by itself."""
        left = self._ended.orphans_end()
        require(not left, "I6", f"processes of killed ranks go on: {left}")

    def dirty(self) -> list[Path]:
        """Files on the nodes that are not finished."""
        return [path for node in self.nodes for path in session_files(node.store, [".dirty"])]

    def nothing_shared_left(self) -> None:
        """Dead processes have left no shared memory."""
        left = [
            path.name
            for path in _SHARED_MEMORY.glob("localckpt-staging-*")
            if any(f"-{pid}-" in path.name for pid in self._dead_pids)
        ]
        require(not left, "I6", f"dead processes left {', '.join(left)}")

    def await_copies(self) -> None:
        """What was loaded has all its copies again, once its manager says so."""
        answers = self.ask("await_copies")
        self.judge(answers)
        self.oracle.replicated(self.look(), {r: int(answer.value) for r, answer in answers.items()})

    # What all ranks do.

    def ask(self, command: str, *args: Any, blow: Blow | None = None) -> dict[int, Answer]:
        """Make a call on all ranks, and wait for the answers of those that live."""
        ranks = self.ranks
        ranks.tell(command, *args)
        if blow is not None:
            time.sleep(blow.moment * self._took_s.get(command, 0.2))
            ranks.kill(blow.rank, blow.sig)
        asked = [rank for rank in ranks.living if blow is None or rank != blow.rank]
        try:
            answers = ranks.answers(_WAITS * self.setup.timeout_s + _SLACK_S, asked)
        except OverdueError as overdue:
            require(False, "I3", f"{command}: {overdue}")
        finally:
            if blow is not None and blow.sig != signal.SIGKILL:
                ranks.kill(blow.rank)
        for rank, answer in answers.items():
            require(not answer.died, "I5", f"rank {rank} died of {command}")
            require(answer.crash is None, "I5", f"rank {rank} in {command}: {answer.crash}")
        if blow is None:
            self._took_s[command] = max(answer.took_s for answer in answers.values())
        return answers

    def judge(
        self, answers: dict[int, Answer], why_not: Sequence[str] = (), lost: Sequence[int] = ()
    ) -> str | None:
        """The error that all ranks raised, if they did."""
        told = {rank: answer.error for rank, answer in answers.items()}
        return self.oracle.same_end(told, why_not, lost)

    def save(self, *, blow: Blow | None = None, why_not: Sequence[str] = ()) -> Settled:
        """Save, and wait until it is complete."""
        attempt = self._attempt()
        lost = (blow.rank,) if blow else ()
        error = self.judge(
            self.ask("save", self.iteration, attempt, blow=blow), why_not=why_not, lost=lost
        )
        return Settled(attempt, error, lost)

    def begin(self, *, blow: Blow | None = None, why_not: Sequence[str] = ()) -> Settled:
        """Save behind training; under way, unless there was an error."""
        attempt = self._attempt()
        lost = (blow.rank,) if blow else ()
        answers = self.ask("begin", self.iteration, attempt, blow=blow)
        error = self.judge(answers, why_not=why_not, lost=lost)
        if error is None:
            self.under_way.append(attempt)
            self.begun += 1
        return Settled(attempt, error, lost)

    def finalize(
        self,
        *,
        blocking: bool = True,
        blow: Blow | None = None,
        why_not: Sequence[str] = (),
        lost: Sequence[int] = (),
    ) -> list[Settled]:
        """Settle the saves behind training."""
        lost = (*lost, blow.rank) if blow else tuple(lost)
        answers = self.ask("finalize", blocking, blow=blow)
        if blocking:
            self.begun = 0
        self.judge(answers)
        by_rank = {rank: dict(answer.value) for rank, answer in answers.items()}
        settled = []
        for attempt in list(self.under_way):
            has = [rank for rank, told in by_rank.items() if attempt in told]
            if not has:
                continue
            require(len(has) == len(by_rank), "I5", f"only ranks {has} settled attempt {attempt}")
            told = {rank: told[attempt] for rank, told in by_rank.items()}
            error = self.oracle.same_end(told, why_not, lost)
            settled.append(Settled(attempt, error, lost))
            self.under_way.remove(attempt)
        over = lost or not blocking or not self.under_way
        require(over, "I5", f"attempts {self.under_way} were not settled")
        return settled

    def settle(self, *saves: Settled) -> None:
        """Check what lies on the nodes after saves have ended."""
        agreed = [s.attempt for s in saves if s.error is not None and not s.lost]
        self.oracle.failed(agreed, list(self.untidy))
        survey = self._look()
        good = [s.attempt for s in saves if s.error is None]
        failed = [s.attempt for s in saves if s.error is not None]
        if good:
            self.oracle.saved(
                good,
                survey,
                [node.name for node in self.nodes],
                under_way=self.under_way + failed,
                retired=not self.had_trouble and not any(s.lost for s in saves),
            )
        self.oracle.check_standing(survey)
        self.say(f"saved {good}, failed {failed}")

    def _stores(self) -> PerRank:
        return PerRank([node.store for node in self.nodes])

    def _look(self) -> Survey:
        return self.oracle.look({node.name: node.store for node in self.nodes})

    def _attempt(self) -> int:
        self.iteration += 1 + int(3 * self.choice.random())
        return self.oracle.attempt(self.iteration)
