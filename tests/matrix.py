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
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_UPSTREAM = _ROOT / "constraints-integrations.txt"
# NVIDIA's packages beside the newest torch; Python 3.11 has no wheels of these releases.
_NEWEST_OF_NVIDIA = ("megatron-core==0.19.2", "nvidia-resiliency-ext==0.7.0")
_NOT_RUN = "not run: "


def main(arguments: Sequence[str]) -> int:
    """Run all pairs, one after the other; 0 if at least one ran and none failed."""
    pairs, pytest_arguments = list(arguments), []
    if "--" in pairs:
        cut = pairs.index("--")
        pairs, pytest_arguments = pairs[:cut], pairs[cut + 1 :]
    table = []
    for pair in pairs:
        version, _, torch = pair.partition(":")
        if not torch:
            raise SystemExit(f"{pair!r} is no pair of versions; give one such as 3.12:2.8.0")
        print(f"\n=== Python {version}, torch {torch} ===", flush=True)
        began = time.monotonic()
        outcome = _try_out(version, torch, pytest_arguments)
        table.append((version, torch, f"{time.monotonic() - began:.0f} s", outcome))
    for row in [("Python", "torch", "time", "result"), *table]:
        print("{:10}{:10}{:10}{}".format(*row))
    outcomes = {outcome for *_, outcome in table}
    return 0 if "passed" in outcomes and "failed" not in outcomes else 1


def _try_out(version: str, torch: str, pytest_arguments: Sequence[str]) -> str:
    python = _find_python(version)
    if python is None:
        return f"{_NOT_RUN}no python{version} with venv on PATH"
    folder = _ROOT / ".venv-matrix" / f"python{version}-torch{torch}"
    if not _install(folder, python, torch):
        return f"{_NOT_RUN}could not be installed, see above"
    # No deadline here: each test has its own.
    command = [folder / "bin" / "python", "-m", "pytest", *pytest_arguments]
    done = subprocess.run(command, cwd=_ROOT, check=False)
    return "failed" if done.returncode else "passed"


def _find_python(version: str) -> Path | None:
    """The interpreter of a version that runs when it is called by its name."""
    # Where PATH leads to pyenv's shims, this tells them which of its versions is meant.
    environment = os.environ | {"PYENV_VERSION": version}
    code = "import ensurepip, sys, venv; print(sys.executable)"
    for folder in os.get_exec_path():
        if (candidate := Path(folder) / f"python{version}").is_file():
            asked = subprocess.run(
                [candidate, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if asked.returncode == 0:
                return Path(asked.stdout.strip())
    return None


def _install(folder: Path, python: Path, torch: str) -> bool:
    """Make the environment, unless it is there and its requirements are what they were."""
    requirements = [_ROOT / "pyproject.toml", _ROOT / "constraints.txt", _UPSTREAM]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in requirements)).hexdigest()
    # Written last, so an installation that was interrupted is done again.
    stamp = folder / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return True
    print(f"installing into {folder.relative_to(_ROOT)} (torch is a large download)")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], timeout=300, check=True)
    constraints = folder / "constraints.txt"
    lines = (_ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    # Other versions of torch want other versions of what it needs.
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    wheel = "torch" if torch == "newest" else f"torch=={torch}"
    package = f"{_ROOT}[dev,bench,docs]"
    if not _pip_install(folder, "--constraint", constraints, "--editable", package, wheel):
        return False
    if not _install_frameworks(folder, torch == "newest"):
        print("not all frameworks could be installed, tests with those are skipped")
    stamp.write_text(wanted)
    return True


def _install_frameworks(folder: Path, newest: bool) -> bool:
    lines = {line for line in _UPSTREAM.read_text().splitlines() if "==" in line}
    pinned = {line for line in lines if line.startswith(("megatron-core", "nvidia-resiliency-ext"))}
    target = ("--no-deps", "--target", folder / "upstream")
    # They have wheels for few Pythons, and what is compiled in them is not used.
    wheels = ("--only-binary=:all:", "--python-version", "3.12")
    systems = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (24, 28, 31, 39)]
    of_nvidia = _NEWEST_OF_NVIDIA if newest else pinned
    is_installed = _pip_install(folder, *target, *wheels, *systems, *of_nvidia)
    return _pip_install(folder, *target, *(lines - pinned)) and is_installed


def _pip_install(folder: Path, *arguments: str | Path) -> bool:
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install")
    # Else DeepSpeed looks for a compiler.
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    done = subprocess.run([*pip, "--quiet", *arguments], env=environment, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
