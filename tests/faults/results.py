"""What came of each test of faults, kept in a file, so that a run can be made in parts.

A line is added for each test when it is over, so what was run before a run was interrupted counts.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Outcome", "Result", "Results", "version_of"]

Outcome = Literal["held", "FAILED", "skipped"]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one test.

    Attributes:
        test: Its name.
        outcome: A test holds if nothing of it failed.
        faults: Those that it makes.
        cases: How many.
        version: The commit that was tested.
    """

    test: str
    outcome: Outcome
    faults: Sequence[str]
    cases: int
    version: str


class Results:
    """The results of a run, and of the runs that it goes on with.

    Args:
        path: The file; ``None`` for results that are not kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: dict[str, Result] = {}
        self._failed: set[str] = set()
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._count(Result(**json.loads(line)))

    def add(self, result: Result) -> None:
        self._count(result)
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a") as file:
                print(json.dumps(asdict(result)), file=file)

    def held(self, test: str) -> bool:
        """Whether this test was run, and held."""
        return test in self._last and self._last[test].outcome == "held"

    def counts(self, fault: str) -> str:
        """How many cases of a fault held, and how many tests of it did not."""
        counted: Counter[Outcome] = Counter()
        for result in self._last.values():
            if fault in result.faults:
                counted[result.outcome] += result.cases if result.outcome == "held" else 1
        others: tuple[Outcome, ...] = ("FAILED", "skipped")
        told = [f"{counted['held']} held", *(f"{counted[o]} {o}" for o in others if counted[o])]
        return ", ".join(told)

    def told(self) -> list[str]:
        """How many tests there are, of which commits, and which of them failed before they held."""
        versions = Counter(result.version for result in self._last.values())
        lines = [f"{count} tests of {version}" for version, count in versions.items()]
        lines += [f"failed once, then held: {test}" for test in self._failed if self.held(test)]
        return lines

    def _count(self, result: Result) -> None:
        self._last[result.test] = result
        if result.outcome == "FAILED":
            self._failed.add(result.test)


def version_of(root: Path) -> str:
    """The commit that is checked out, and whether something was changed."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        return "an unknown commit"
    return done.stdout.strip() or "an unknown commit"
