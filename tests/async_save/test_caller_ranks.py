"""A caller that is asked about all ranks, without a queue."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from localckpt import AsyncRequest, ThreadAsyncCaller
from tests.async_save import work
from tests.ranks import run_ranks

PATIENCE_S = 20.0


def _polls(rank: int, world_size: int, directory: Path) -> Any:
    caller, gate = ThreadAsyncCaller(timeout_s=PATIENCE_S), directory / "gate"
    args = (directory / "a", gate) if rank == 1 else ()
    caller.schedule_async_call(AsyncRequest(work.write_when if rank == 1 else None, args, []))
    alone = caller.is_current_async_call_done(no_dist=True)
    before = caller.is_current_async_call_done()
    dist.barrier()
    if rank == 0:
        work.write(gate)
    polls = 0
    while not caller.is_current_async_call_done():
        polls += 1
        time.sleep(0.002)
    caller.close()
    return alone, before, polls, (directory / "a").exists()


def test_a_call_is_done_on_all_ranks_in_the_same_poll(tmp_path: Path) -> None:
    first, second = run_ranks(_polls, 2, tmp_path)

    assert (first[0], second[0]) == (True, False)
    assert first[1:] == second[1:]
    assert first[1] is False
    assert first[3]
