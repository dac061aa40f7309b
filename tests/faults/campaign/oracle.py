"""Knows what a job was promised, and says when it gets something else.

Judges by what the ranks answer and by what lies on the nodes. See docs/guarantees.md for the names.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from localckpt import parse_group_sequence
from tests.faults.campaign.job import SESSION, Setup, state_of_attempt
from tests.faults.campaign.remote import Answer
from tests.faults.campaign.survey import Copy, Survey, Version, look, newest_first
from tests.managers.jobs import assert_same

__all__ = ["Oracle", "Violation", "require"]


class Violation(AssertionError):
    """A guarantee does not hold."""


def require(holds: object, guarantee: str, told: str) -> None:
    """Complain unless something holds."""
    if not holds:
        raise Violation(f"{guarantee}: {told}")


class Oracle:
    """What was promised to one job.

    Args:
        setup: How the job saves.
    """

    def __init__(self, setup: Setup) -> None:
        self._ranks = range(setup.world_size)
        self._keep_last = setup.keep_last
        self._cliques = parse_group_sequence(1, 2, setup.world_size)
        self._attempts: dict[int, list[int]] = defaultdict(list)
        self._iteration_of: list[int] = []
        # Nodes that were out of reach, by failed attempt.
        self._failed: dict[int, Sequence[str]] = {}
        # Good copies that nothing but the test itself may take away: (node, owner).
        self._standing: dict[Version, set[tuple[str, int]]] = {}
        # What the job counts as complete, the oldest first; None for what it let go at once.
        self._believed: list[Version | None] = []

    def attempt(self, iteration: int) -> int:
        """The number of one more attempt to save an iteration."""
        number = len(self._iteration_of)
        self._iteration_of.append(iteration)
        self._attempts[iteration].append(number)
        return number

    def look(self, nodes: Mapping[str, Path]) -> Survey:
        """Read what lies on the nodes, and check what must never lie there."""
        survey = look(nodes, len(self._ranks), lambda iteration: self._attempts[iteration])
        for version in survey.complete(good=False):
            attempts = survey.attempts(version)
            require(len(attempts) <= 1, "I1", f"{version} is of the attempts {sorted(attempts)}")
        for copy in survey.copies:
            if copy.attempt in self._failed:
                excused = copy.node in self._failed[copy.attempt]
                require(excused, "I5", f"attempt {copy.attempt} failed, and left {copy.path}")
        return survey

    def check_standing(self, survey: Survey) -> None:
        """Nothing is gone that the job had no reason to remove."""
        for version, places in self._standing.items():
            gone = sorted(places - survey.places(version))
            require(not gone, "I4", f"{version} has no good copy any more at (node, owner) {gone}")

    def acted(self, survey: Survey) -> None:
        """The test itself has taken away what is not there any more."""
        self._standing = {
            version: places & survey.places(version) for version, places in self._standing.items()
        }

    def must_stand(self, copy: Copy) -> bool:
        """Whether a copy is one that nothing but the test itself may take away."""
        places = self._standing.get(copy.version) if copy.version is not None else None
        return places is not None and (copy.node, copy.owner) in places

    # What the ranks answered.

    def same_end(
        self, told: Mapping[int, str | None], why_not: Sequence[str], lost: Sequence[int]
    ) -> str | None:
        """Whether a call succeeded on all living ranks or failed on all; with what error.

        Args:
            told: The error of each living rank; ``None`` if it has none.
            why_not: What may have made it fail; if nothing, it must succeed.
            lost: Ranks that died or stopped in it, one of which the error must name.
        """
        errors = [text for text in told.values() if text is not None]
        if not errors:
            return None
        shown = "; ".join(f"rank {rank}: {text or 'ok'}" for rank, text in told.items())
        require(len(errors) == len(told), "I5", f"it failed on some ranks only: {shown}")
        require(why_not or lost, "I3", f"it failed without a reason: {shown}")
        if not lost:
            # Who opens a store says it as it is, to the others as what the whole job could not do.
            cause = min((text.partition(": ")[2] for text in errors), key=len)
            same = all(cause in text for text in errors)
            require(same, "I5", f"the ranks raise different errors: {shown}")
        elif not why_not:
            for text in errors:
                named = any(f"rank {rank} " in text for rank in lost)
                require(named, "I3", f"an error names none of the lost ranks {lost}: {text}")
        return errors[0]

    def saved(
        self,
        attempts: Sequence[int],
        survey: Survey,
        nodes: Sequence[str],
        *,
        under_way: Sequence[int] = (),
        retired: bool = True,
    ) -> None:
        """All living ranks called these saves complete, one after the other.

        Args:
            nodes: The node of each rank.
            under_way: Attempts that may be committed or not.
            retired: Whether older checkpoints must have gone.
        """
        new = [survey.version_of(attempt) for attempt in attempts]
        self._believed += new
        kept = self._believed[-self._keep_last :]
        for attempt, version in zip(attempts, new, strict=True):
            if version not in kept:
                continue
            what = f"attempt {attempt}, iteration {self._iteration_of[attempt]},"
            require(version is not None, "I2", f"{what} was called complete, and is not there")
            assert version is not None
            expected = {
                (nodes[member], owner)
                for clique in self._cliques
                for member in clique
                for owner in clique
            }
            lacks = sorted(expected - survey.places(version))
            require(not lacks, "I2", f"{what} was called complete, and lacks {lacks}")
            self._standing[version] = expected
        not_over = {survey.version_of(attempt) for attempt in under_way}
        complete = [v for v in survey.complete(good=False) if v not in not_over]
        newest = new[-1]
        assert newest is not None
        require(newest == complete[0], "I7", f"{newest} was just saved, and is not the newest")
        self._standing = {v: places for v, places in self._standing.items() if v in kept}
        oldest = kept[0]
        if retired and len(kept) == self._keep_last and oldest is not None:
            # What is above it by iteration, and was never given up, may be of another lineage.
            later = [version for version in kept if version is not None]
            there = set(newest_first(survey)) - not_over
            old = [v for v in there if v not in later and v.iteration <= oldest.iteration]
            require(not old, "I6", f"{', '.join(map(str, old))} should have been let go")

    def failed(self, attempts: Sequence[int], untidy: Sequence[str] = ()) -> None:
        """All ranks are alive and agreed that these saves failed: nothing of them stays.

        Args:
            untidy: Nodes that were out of reach.
        """
        self._failed.update(dict.fromkeys(attempts, untidy))

    def found(self, before: Survey, after: Survey, answers: Mapping[int, Answer]) -> int:
        """Judge what ``find_latest`` answered: the iteration that all ranks named.

        Args:
            before: What lay on the nodes before. A late writer may add to it.
            after: What lay there after.
        """
        found = {rank: answer.value for rank, answer in answers.items()}
        require(len(set(found.values())) == 1, "I1", f"find_latest differs: {found}")
        (iteration,) = set(found.values())
        least = _newest(before)
        # A damaged copy counts until it is read.
        possible = {*before.complete(good=False), *after.complete(good=False)}
        possible = set(_not_older(least, possible, before, after))
        named = {version.iteration for version in possible} | ({-1} if least is None else set())
        require(
            iteration in named,
            "I2",
            f"find_latest gives {iteration}; what can be had is {sorted(named)}",
        )
        self._stand(after)
        return int(iteration)

    def loaded(self, before: Survey, after: Survey, answers: Mapping[int, Answer]) -> int:
        """Judge what was loaded: its iteration, or -1 if there is none."""
        least, good = _newest(before), {*before.complete(good=True), *after.complete(good=True)}
        if least is None and all(
            answer.error is not None and answer.error.startswith("NoReplicasAvailableError")
            for answer in answers.values()
        ):
            self._stand(after)
            return -1
        bad = {rank: str(answer) for rank, answer in answers.items() if not answer.succeeded}
        require(not bad, "I2", f"{least} can be had, and load failed: {bad}")
        possible = _not_older(least, good, before, after)
        ids = {rank: answer.value[0] for rank, answer in answers.items()}
        (iteration, *others) = {ckpt_id[0] for ckpt_id in ids.values()}
        require(not others, "I1", f"the ranks loaded different iterations: {ids}")
        require(
            all(ckpt_id == (iteration, rank, SESSION) for rank, ckpt_id in ids.items()),
            "I1",
            f"the ranks loaded {ids}",
        )
        newest = [version for version in possible if version.iteration == iteration]
        told = ", ".join(map(str, possible))
        require(newest, "I2", f"iteration {iteration} was loaded; what can be had is {told}")
        differences = [
            _difference(v, {*before.attempts(v), *after.attempts(v)}, answers) for v in newest
        ]
        require("" in differences, "I1", "; ".join(differences))
        self._stand(after, newest[0])
        return int(iteration)

    def replicated(self, survey: Survey, degraded: Mapping[int, int]) -> None:
        """Each shard of what was loaded lies on as many nodes again as its clique has members.

        Args:
            degraded: How many shards have too few copies, by what the ranks say.
        """
        loaded = self._believed[-1] if self._believed else None
        copies = [copy for copy in survey.copies if copy.version == loaded]
        if loaded is None or not all(copy.is_good for copy in copies):
            # A bad copy that nobody has read yet may be the one that is to be sent.
            return
        require(not any(degraded.values()), "I2", f"shards stay with fewer copies: {degraded}")
        for clique in self._cliques:
            for owner in clique:
                nodes = {copy.node for copy in copies if copy.owner == owner}
                told = f"{loaded}: the shard of rank {owner} is on {sorted(nodes)} only"
                require(len(nodes) >= len(clique), "I2", told)
        self._standing[loaded] = survey.places(loaded)

    def _stand(self, survey: Survey, loaded: Version | None = None) -> None:
        """From here on, what is complete must not go before the job has saved anew."""
        complete = survey.complete(good=False)
        since = complete.index(loaded) if loaded in complete else 0
        self._believed = [*reversed(complete[since:])]
        self._standing = {version: survey.places(version) for version in survey.complete(good=True)}


def _newest(survey: Survey) -> Version | None:
    complete = survey.complete(good=True)
    return complete[0] if complete else None


def _not_older(
    least: Version | None, versions: Iterable[Version], *surveys: Survey
) -> list[Version]:
    """Those of the versions that are not older than one of them, the newest first."""
    ordered = newest_first(*surveys)
    among = set(versions)
    return [v for v in ordered[: None if least is None else ordered.index(least) + 1] if v in among]


def _difference(version: Version, attempts: set[int], answers: Mapping[int, Answer]) -> str:
    """How what was loaded is not what was saved as this version; empty if it is."""
    (attempt,) = attempts
    for rank, answer in answers.items():
        state = pickle.loads(answer.value[1])
        try:
            assert_same(state, state_of_attempt(rank, version.iteration, attempt))
        except AssertionError:
            loaded = state.get("attempt") if isinstance(state, dict) else None
            return (
                f"rank {rank} loaded the state of attempt {loaded} as {version}, which was saved "
                f"in attempt {attempt}, or not all of it is the same"
            )
    return ""
