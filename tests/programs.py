"""Runs other programs until they end, or a deadline ends them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["run", "run_python"]


def run(
    *command: str | Path, timeout: float = 60.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program; how it ended, and what it printed."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def run_python(
    code: str, *arguments: str | Path, **options: Any
) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", code, *arguments, **options)
