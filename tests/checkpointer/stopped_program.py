"""A training program whose weights are the number of its step, to be stopped by a signal.

Each line that it prints says how far it is.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import localckpt
from tests.checkpointer.slow_storage import slow_down

GRACE_S = 2.0
STEP_S = 0.05


def tell(line: str) -> None:
    print(line, flush=True)


def main(folder: Path, slow: str, tier: str, *, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if slow:
        slow_down(folder / tier, folder / "slow", 60.0, hangs=slow == "hangs")
    model = torch.nn.Linear(300, 100, bias=False)
    options: dict[str, Any] = {"shared": folder / "shared", "shared_every": 10}
    with localckpt.Checkpointer(
        {"model": model}, local=folder / "nodes" / str(rank), every=5, grace_s=GRACE_S, **options
    ) as checkpointer:
        first = checkpointer.resume()
        assert first == 0 or bool((model.weight == first - 1).all())
        if (folder / "slow at resume").exists():
            (folder / "slow").touch()
        tell(f"resumed {first}")
        for step in range(first, first + steps):
            dist.barrier()
            time.sleep(STEP_S)
            torch.nn.init.constant_(model.weight, step)
            tell(f"step {step}")
            if checkpointer.step(step):
                tell(f"stopped {step}")
                break
        tell(f"newest {checkpointer.newest}")


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], steps=int(sys.argv[4]))
