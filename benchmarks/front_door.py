"""What training waits for in a step in which ``Checkpointer`` saves, to one tier or to both.

One rank, whose saves to the nodes are the limit of saves to both tiers: of those that drain what
the nodes have, and of a second capture of the state by ``GlobalCheckpointManager.save``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

import localckpt
from benchmarks.report import Report
from benchmarks.setup import Options
from benchmarks.state import parameter_shapes

__all__ = ["measure"]

_NEVER = localckpt.Every(steps=1 << 30)


def measure(options: Options) -> Report:
    """Measure saves in each of the three ways, in turn, each once the one before is over."""
    report = Report("front-door")
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.rand(shape)) for _, shape in parameter_shapes(options.width)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())

    with ExitStack() as opened:
        root = options.directory
        checkpointer = opened.enter_context(
            localckpt.Checkpointer(
                *(state,),
                local=root / "nodes",
                shared=root / "shared",
                every=_NEVER,
                shared_every=_NEVER,
                shared_keep_last=1,
                save_last=False,
                quiet=True,
            )
        )
        other = opened.enter_context(
            localckpt.GlobalCheckpointManager(
                root / "second", retention=localckpt.Retention(last=1)
            )
        )
        checkpointer.resume()
        step = 0

        def stall_s(shared: bool, also: Callable[[int], None] = lambda step: None) -> float:
            nonlocal step
            checkpointer.step(step)
            began = time.perf_counter()
            checkpointer.save(step, shared=shared)
            also(step)
            stalled_s = time.perf_counter() - began
            checkpointer.wait_until_finished()
            other.wait_until_finished()
            step += 1
            return stalled_s

        def capture_again(step: int) -> None:
            named = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            other.save(named, step, is_async=True)

        drained = report.compared("stall, both tiers, drained", "nodes alone", nbytes)
        twice = report.compared("stall, both tiers, captured twice", "nodes alone", nbytes)
        for round_ in range(options.rounds + 1):
            alone_s, drained_s = stall_s(shared=False), stall_s(shared=True)
            again_s, twice_s = stall_s(shared=False), stall_s(shared=False, also=capture_again)
            # The first saves make their memory.
            if round_:
                drained.add(alone_s, drained_s)
                twice.add(again_s, twice_s)
    return report
