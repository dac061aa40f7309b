"""Lines of the product that hold a guarantee, each broken on purpose: some test fails for each.

``mutants.txt`` has for each a module and the tests that notice it, then the line, then what takes
its place. ``python -m tests.mutants`` breaks one after the other in a copy of the package, runs
those tests with the choice of rows of a plain run, and prints the mutants that nobody noticed.
Numbers choose some.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant"]

_ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A change of one place in a module, and the tests that notice it."""

    module: str
    line: str
    broken: str
    tests: str


def _read(text: str) -> list[Mutant]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    mutants = []
    for heading, *pair in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        module, _, tests = heading.partition(": ")
        line, broken = (part[4:].replace("\\n", "\n") for part in pair)
        mutants.append(Mutant(module, line, "" if broken == "(nothing)" else broken, tests))
    return mutants


MUTANTS = _read(Path(__file__).with_suffix(".txt").read_text())


def _is_noticed(mutant: Mutant, tree: Path) -> bool:
    module = tree / "localckpt" / mutant.module
    text = module.read_text()
    module.write_text(text.replace(mutant.line, mutant.broken))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            timeout=900,
            check=False,
        )
    finally:
        module.write_text(text)
    return ended.returncode == 1


def main() -> int:
    """Try all mutants, or those of some numbers; the exit status says whether all were noticed."""
    chosen = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        leave_out = shutil.ignore_patterns(".venv*", ".git", "build", "__pycache__")
        shutil.copytree(_ROOT, tree, ignore=leave_out)
        for number in chosen:
            began, mutant = time.monotonic(), MUTANTS[number]
            is_noticed = _is_noticed(mutant, tree)
            survivors += not is_noticed
            took_s, told = time.monotonic() - began, ("SURVIVES", "noticed")[is_noticed]
            line = " ".join(mutant.line.split())
            print(f"{number:3} {told:8} {took_s:4.0f} s  {mutant.module}: {line:.90}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
