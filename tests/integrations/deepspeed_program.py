"""Program of DeepSpeed that records its losses: give it a ZeRO stage, a precision, a directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed

from localckpt import Every
from tests.integrations.deepspeed_runs import Run, use_no_compiler
from tests.integrations.kills import record, record_end

_MICRO_STEPS = 200

if __name__ == "__main__":
    use_no_compiler()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    stage, precision, directory = sys.argv[1:4]
    rank = int(os.environ["RANK"])
    # An attempt that is killed before its first save is one in vain.
    options = {"every": Every(steps=2), "max_attempts": None}
    run = Run(Path(directory) / f"node{rank}", int(stage), precision, **options)
    for over in run.micro_steps(_MICRO_STEPS, pause_s=0.01):
        record(over, run.lines[-1], rank)
        run.checkpoints.step()
    record_end(run.state(), rank)
    run.checkpoints.close()
