"""The platform is checked when the package is imported."""

from __future__ import annotations

import subprocess
import sys


def test_another_platform_is_refused_in_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.platform = 'darwin'; import localckpt"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: localckpt runs on Linux only, and this is darwin"
    )
