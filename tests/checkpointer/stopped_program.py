"""A training program whose weights are the number of its step, to be stopped by a signal.

Each line that it prints says how far it is.
"""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import localckpt
from localckpt.managers.save import Saves
from localckpt.storage.directory import DirectoryStore
from tests.checkpointer.slow_storage import slow_down

GRACE_S = 2.0
STEP_S = 0.05
SLOW_FROM = 22
"""From here on storage becomes slow, in a step in which no save begins or ends."""
BEGIN, END = "where a save begins", "where a save ends"
"""Other times at which storage begins to hang, for each rank by itself."""


def tell(line: str) -> None:
    print(line, flush=True)


def hang_once(kind: type, method: str, flag: Path, *, after: bool) -> None:
    """Have storage hang from a call of a method on, or from its end on."""
    call = getattr(kind, method)

    def called(*args: Any) -> Any:
        if not after:
            flag.touch()
        result = call(*args)
        flag.touch()
        return result

    setattr(kind, method, called)


def main(folder: Path, slow: str, tier: str, *, steps: int = 1000) -> int:
    """Train; return the first step."""
    # Of a program that does not end the log says where it is.
    faulthandler.dump_traceback_later(100.0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = folder / f"slow {rank}"
    if slow:
        at = own if slow in (BEGIN, END) else folder / "slow"
        slow_down(folder / tier, at, 60.0, hangs=slow != "fsync")
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
        was_newest = None
        for step in range(first, first + steps):
            dist.barrier()
            time.sleep(STEP_S)
            torch.nn.init.constant_(model.weight, step)
            tell(f"step {step}")
            if step == SLOW_FROM and slow == BEGIN:
                # Storage answers, and then no more.
                hang_once(DirectoryStore, "probe", own, after=True)
            elif step == SLOW_FROM and slow == END:
                hang_once(Saves, "retire", own, after=False)
            if checkpointer.step(step):
                tell(f"stopped {step}")
                break
            # The save before is over, with what it does in the loop.
            is_quiet, was_newest = was_newest == step - (step + 1) % 5, checkpointer.newest
            is_quiet = is_quiet and not checkpointer._shared.is_busy  # type: ignore[union-attr]
            if slow and rank == 0 and step >= SLOW_FROM and is_quiet:
                (folder / "slow").touch()
        tell(f"newest {checkpointer.newest}")
    return first
