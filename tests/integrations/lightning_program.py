"""Program of Lightning that records its losses: ``lightning_program.py DIRECTORY``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.integrations.kills import record
from tests.integrations.lightning_runs import fit

if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    fit(
        *(rank, int(os.environ.get("WORLD_SIZE", "1")), Path(sys.argv[1]) / f"node{rank}", 3, {}),
        pause_s=0.02,
        epochs=20,
        record=lambda step, text: record(step, text, rank),
    )
