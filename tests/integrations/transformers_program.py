"""Program of Transformers that records its losses: ``transformers_program.py DIRECTORY``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.integrations.forks import leave_out
from tests.integrations.kills import record

if __name__ == "__main__":
    leave_out()
    from tests.integrations.transformers_runs import train

    rank = int(os.environ.get("RANK", "0"))
    train(
        *(rank, int(os.environ.get("WORLD_SIZE", "1")), Path(sys.argv[1]) / f"node{rank}", 3, {}),
        pause_s=0.02,
        num_train_epochs=8,
        record=lambda step, text: record(step, text, rank),
    )
