"""Tests of the runner of the tests with several versions of Python and torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import Result, find_python, main, table

_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_python_on_the_path_is_found_by_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken, good = tmp_path / "broken", tmp_path / "good"
    for folder, text in ((broken, "exit 127"), (good, f'exec "{sys.executable}" "$@"')):
        folder.mkdir()
        (folder / f"python{_HERE}").write_text(f"#!/bin/sh\n{text}\n")
        (folder / f"python{_HERE}").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:{good}")

    found = find_python(_HERE)

    assert found is not None
    said = subprocess.run(
        [found, "-c", "import sys; print(sys.version)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.strip() == sys.version


def test_a_python_that_the_machine_lacks_is_reported_and_nothing_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["3.99:2.13.0", "--", "--no-such-argument"])

    assert code == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        *("3.99", "2.13.0", "-", "-", "-", "-"),
        *("not", "run:", "no", "python3.99", "with", "venv", "on", "PATH"),
    ]


def test_the_closing_table_has_a_line_for_each_pair() -> None:
    told = table(
        [
            Result("3.11.7", "2.13.0+cpu", "passed", 3000, 0, 5, 471.4),
            Result("3.12.1", "2.8.0", "failed", 3000, 12, 5, 480.0),
        ]
    )

    assert told.splitlines() == [
        "Python  torch       tests  failed  skipped  seconds  result",
        "3.11.7  2.13.0+cpu  3000   0       5        471      passed",
        "3.12.1  2.8.0       3000   12      5        480      failed",
    ]


def test_a_text_that_is_no_pair_of_versions_is_refused() -> None:
    with pytest.raises(SystemExit, match="give one such as"):
        main(["3.12"])
