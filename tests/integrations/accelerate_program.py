"""Program of Accelerate that records its losses: ``accelerate_program.py DIRECTORY``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.integrations.forks import leave_out
from tests.integrations.kills import record

if __name__ == "__main__":
    leave_out()
    from tests.integrations.accelerate_runs import train

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    train(
        *(rank, world_size, Path(sys.argv[1]) / f"node{rank}", 3, {}),
        pause_s=0.01,
        epochs=10,
        record=lambda batch, text: record(batch.replace(" ", "-"), text, rank),
    )
