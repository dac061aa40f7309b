"""Program of torchtitan that records its steps: ``torchtitan_program.py OPTION...``."""

from __future__ import annotations

import sys

from examples.integrations import torchtitan_on_cpu

if __name__ == "__main__":
    torchtitan_on_cpu.prepare()
    # It imports torchtitan.
    from tests.integrations import torchtitan_runs

    torchtitan_runs.train_as_told(sys.argv[1:])
