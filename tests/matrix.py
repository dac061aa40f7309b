"""Runs the tests with several versions of Python and torch, each pair in an environment of its own.

``python tests/matrix.py 3.12:2.8.0 3.13:newest -- PYTEST_ARGUMENTS``; the Makefile calls it so. It
needs the standard library only. A Python that the machine does not have is told in the closing
table, and is no failure.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Pair", "Result", "find_python", "main", "table"]

_ROOT = Path(__file__).resolve().parent.parent
_ENVIRONMENTS = _ROOT / ".venv-matrix"
_UPSTREAM = _ROOT / "constraints-integrations.txt"
_NEWEST = "newest"


@dataclass(frozen=True)
class Pair:
    """A version of Python, such as ``3.12``, and one of torch, or ``newest``."""

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        python, colon, torch = text.partition(":")
        if not (python and colon and torch):
            raise SystemExit(f"{text!r} is no pair of versions; give one such as 3.12:2.8.0")
        return cls(python, torch)

    @property
    def folder(self) -> Path:
        return _ENVIRONMENTS / f"python{self.python}-torch{self.torch}"


@dataclass(frozen=True)
class Result:
    """How a pair did; ``outcome`` is ``passed``, ``failed``, or why nothing ran."""

    python: str
    torch: str
    outcome: str
    tests: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def find_python(version: str) -> Path | None:
    """The interpreter of a version that runs when it is called by its name."""
    name = f"python{version}"
    # Where PATH leads to pyenv's shims, this tells them which of its versions is meant.
    environment = os.environ | {"PYENV_VERSION": version}
    for folder in os.get_exec_path():
        if not (candidate := Path(folder) / name).is_file():
            continue
        asked = subprocess.run(
            [candidate, "-c", "import ensurepip, sys, venv; print(sys.executable)"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if asked.returncode == 0:
            return Path(asked.stdout.strip())
    return None


def table(results: Sequence[Result]) -> str:
    """What ran, with what result, in columns."""
    rows: list[tuple[str, ...]] = [
        ("Python", "torch", "tests", "failed", "skipped", "seconds", "result")
    ]
    for r in results:
        counts = (r.tests, r.failed, r.skipped, round(r.seconds)) if r.tests else ("-",) * 4
        rows.append((r.python, r.torch, *map(str, counts), r.outcome))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main(arguments: Sequence[str]) -> int:
    """Run all pairs, one after the other; 0 if at least one ran and none failed."""
    pairs, pytest_arguments = list(arguments), []
    if "--" in pairs:
        cut = pairs.index("--")
        pairs, pytest_arguments = pairs[:cut], pairs[cut + 1 :]
    results = [_try_out(Pair.parse(text), pytest_arguments) for text in pairs]
    print(f"\n{table(results)}")
    outcomes = {result.outcome for result in results}
    return 0 if "passed" in outcomes and "failed" not in outcomes else 1


def _try_out(pair: Pair, pytest_arguments: Sequence[str]) -> Result:
    print(f"\n=== Python {pair.python}, torch {pair.torch} ===", flush=True)
    python = find_python(pair.python)
    if python is None:
        return Result(pair.python, pair.torch, f"not run: no python{pair.python} with venv on PATH")
    if not _install(pair, python):
        return Result(pair.python, pair.torch, "not run: could not be installed, see above")
    return _run_tests(pair, pytest_arguments)


def _install(pair: Pair, python: Path) -> bool:
    """Make the environment, unless it is there and its requirements are what they were."""
    requirements = [_ROOT / "pyproject.toml", _ROOT / "constraints.txt", _UPSTREAM]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in requirements)).hexdigest()
    # Written last, so an installation that was interrupted is done again.
    stamp = pair.folder / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return True
    print(f"installing into {pair.folder.relative_to(_ROOT)} (torch is a large download)")
    shutil.rmtree(pair.folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", pair.folder], timeout=300, check=True)
    constraints = pair.folder / "constraints.txt"
    lines = (_ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    # Other versions of torch want other versions of what it needs.
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    torch = "torch" if pair.torch == _NEWEST else f"torch=={pair.torch}"
    package = f"{_ROOT}[dev,bench]"
    if not _pip_install(pair, "--constraint", constraints, "--editable", package, torch):
        return False
    if not _install_frameworks(pair):
        print("not all frameworks could be installed, tests with those are skipped")
    stamp.write_text(wanted)
    return True


def _install_frameworks(pair: Pair) -> bool:
    lines = [line for line in _UPSTREAM.read_text().splitlines() if "==" in line]
    # They have no wheels for newer Pythons, and what is compiled in them is not used.
    old = [line for line in lines if line.startswith(("megatron-core", "nvidia-resiliency-ext"))]
    target = ("--no-deps", "--target", pair.folder / "upstream")
    wheels = ("--only-binary=:all:", "--python-version", "3.12")
    is_old_installed = _pip_install(pair, *target, *wheels, *old)
    return _pip_install(pair, *target, *(set(lines) - set(old))) and is_old_installed


def _pip_install(pair: Pair, *arguments: str | Path) -> bool:
    pip = (pair.folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    done = subprocess.run(
        [*pip, "install", "--quiet", *arguments],
        # Else DeepSpeed looks for a compiler.
        env=os.environ | {"DS_BUILD_OPS": "0"},
        timeout=3 * 3600,
        check=False,
    )
    return done.returncode == 0


def _run_tests(pair: Pair, pytest_arguments: Sequence[str]) -> Result:
    python, report = pair.folder / "bin" / "python", pair.folder / "report.xml"
    asked = subprocess.run(
        [
            python,
            "-c",
            "import platform, torch; print(platform.python_version(), torch.__version__)",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    versions = asked.stdout.split()
    report.unlink(missing_ok=True)
    start = time.monotonic()
    # No deadline here: each test has its own.
    ran = subprocess.run(
        [python, "-m", "pytest", f"--junit-xml={report}", *pytest_arguments],
        cwd=_ROOT,
        check=False,
    )
    seconds = time.monotonic() - start
    outcome = "passed" if ran.returncode == 0 else "failed"
    if not report.is_file():
        return Result(versions[0], versions[1], outcome, seconds=seconds)
    suites = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
    counts = [
        [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")]
        for suite in suites
    ]
    tests, failures, errors, skipped = map(sum, zip(*counts, strict=True))
    return Result(versions[0], versions[1], outcome, tests, failures + errors, skipped, seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
