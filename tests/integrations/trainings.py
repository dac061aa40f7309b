"""Trainings with a framework that are killed, stopped and resumed, and compared bit for bit.

Frameworks take many seconds to import: so one process does it for all jobs of a test, and forks
their ranks. Dropout and the order of the batches draw random numbers, so what a run notes is the
same only if the parameters, the optimizer, the schedule, the position and all generators are.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from benchmarks.stores import serve_store
from localckpt import Checkpointer
from tests.ranks import DeadRank, node_store, run_ranks
from tests.upstream.environment import import_upstream

__all__ = [
    "Jobs",
    "Run",
    "assert_resumed",
    "assert_stopped",
    "digest_of",
    "example",
    "leave_out",
    "run_example",
]

# What a framework takes to be imported on a busy machine is within it.
LONGEST_S = 170.0
_JOB_S = 150.0
_NEVER = 10**6
_HEAVY = ("deepspeed", "torchao", "datasets", "tensorboard", "tensorboardX", "ray", "pandas")


def leave_out() -> None:
    """Have Transformers and Accelerate not import packages that are installed, and take long."""
    for name in _HEAVY:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


@dataclass
class Run:
    """One start of a training on one rank: what it is told, and what it notes."""

    rank: int
    world_size: int
    local: Path
    every: int = _NEVER
    end_at: str = ""
    """The batch, or the step of an optimizer, at which this rank sends itself a signal."""
    sends: int = signal.SIGKILL
    is_new: bool = True
    pause_s: float = 0.0
    is_stopped: bool = False
    noted: list[str] = field(default_factory=list)

    def seed(self, seed: int) -> None:
        """Begin here; a run that is resumed has other random numbers and weights before."""
        torch.manual_seed(seed if self.is_new else random.SystemRandom().randrange(1 << 32))

    def note(self, batch: object, *values: object) -> None:
        texts = [value.hex() if isinstance(value, float) else f"{value}" for value in values]
        self.noted.append(" ".join([f"{batch}", *texts]))

    def may_end(self, batch: object, checkpointer: Any) -> None:
        if f"{batch}" == self.end_at:
            self.end_at = ""
            if self.sends == signal.SIGKILL:
                # Else the batch that it is resumed at would depend on how fast saves are.
                checkpointer.wait_until_finished()
            os.kill(os.getpid(), self.sends)
        time.sleep(self.pause_s)

    def watch(self) -> None:
        """Note each step of an optimizer of this process, once a checkpointer has resumed."""
        resume, step, checkpointers = Checkpointer.resume, Checkpointer.step, list[Checkpointer]()

        def begin(checkpointer: Checkpointer, *args: Any, **options: Any) -> int:
            first = resume(checkpointer, *args, **options)
            checkpointers[:] = [checkpointer]
            return first

        def look(checkpointer: Checkpointer, *args: Any, **options: Any) -> bool:
            self.is_stopped = step(checkpointer, *args, **options)
            return self.is_stopped

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            is_a_container = not type(optimizer).__module__.startswith("torch.optim.")
            if is_a_container or not checkpointers:
                return
            groups = [(group["params"], group["lr"]) for group in optimizer.param_groups]
            # The random numbers to come stand last: not all checkpoints have them.
            states = [groups, optimizer.state_dict()["state"]], torch.get_rng_state()
            self.noted.append(" ".join(map(digest_of, states)))
            self.may_end(len(self.noted) - 1, checkpointers[0])

        Checkpointer.resume = begin  # type: ignore[method-assign]
        Checkpointer.step = look  # type: ignore[method-assign]
        register_optimizer_step_post_hook(note)


def digest_of(state: Any) -> str:
    """Digest of all values of a state; an object is what it has."""
    digest = xxhash.xxh3_64()
    for leaf in tree_leaves(state):
        local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
        if isinstance(local, torch.Tensor):
            digest.update(f"{local.dtype} {tuple(local.shape)}".encode())
            digest.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            digest.update(repr(getattr(local, "__dict__", local)).encode())
    return digest.hexdigest()


class Ended(NamedTuple):
    noted: list[str]
    is_stopped: bool


Train = Callable[[Run], None]
"""Trains as far as the run gets."""
Outcomes = Sequence[Sequence[Any]]
"""For each start of a job, what became of its ranks."""


class Jobs:
    """Starts jobs, one after the other, in a rank that was started without a process group."""

    def killed(
        self,
        name: str,
        train: Train,
        kill_at: object,
        ranks: int = 2,
        every: int = _NEVER,
        loses_node: bool = False,
    ) -> Outcomes:
        """An undisturbed job; one whose ranks are killed at a batch; and the same resumed."""
        whole = self.start(f"{name} whole", train, ranks)
        killed = self.start(name, train, ranks, every=every, end_at=f"{kill_at}")
        if loses_node:
            shutil.rmtree(node_store() / name / f"node {ranks - 1}")
        return [whole, killed, self.start(name, train, ranks, every=every, is_new=False)]

    def stopped(self, train: Train, stop_at: object) -> Outcomes:
        """A job of which one rank gets a signal, while no cadence saves; and the same resumed."""
        # The ranks have a few steps' time to learn of it.
        stop = {"sends": signal.SIGTERM, "pause_s": 0.2}
        return [
            self.start("stopped", train, 2, last_rank={"end_at": f"{stop_at}"}, **stop),
            self.start("stopped", train, 2, is_new=False),
        ]

    def start(
        self, name: str, train: Train, ranks: int, *, last_rank: Any = None, **options: Any
    ) -> list[Any]:
        """One start of a training; what became of each rank."""

        def begin(rank: int, world_size: int) -> Ended:
            own = options | (last_rank or {} if rank == world_size - 1 else {})
            run = Run(rank, world_size, node_store() / name / f"node {rank}", **own)
            run.local.mkdir(parents=True, exist_ok=True)
            train(run)
            return Ended(run.noted, run.is_stopped)

        return self.run(begin, ranks)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` in every rank of a new job.

        Returns:
            What each returned; a :class:`DeadRank` for those that ended otherwise.

        Raises:
            RuntimeError: Some rank raised; with its traceback.
        """
        # Names in the store of a job that was killed would be taken for those of the next.
        store = serve_store()
        children = [_fork(rank, world_size, store.port, fn, args) for rank in range(world_size)]
        watch = threading.Timer(_JOB_S, _kill, [[pid for pid, _ in children]])
        watch.start()
        try:
            outcomes = [_outcome(rank, *child) for rank, child in enumerate(children)]
        finally:
            watch.cancel()
            watch.join()
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, _Raised):
                raise RuntimeError(f"rank {rank}: {outcome}")
        return outcomes


def assert_resumed(outcomes: Outcomes, first: int) -> None:
    """The resumed job began behind so much of the undisturbed one, and went on as that did."""
    for whole, killed, resumed in zip(*outcomes, strict=True):
        assert killed.signal == signal.SIGKILL
        assert len(whole.noted) - len(resumed.noted) == first
        assert resumed.noted == whole.noted[first:]


def assert_stopped(wholes: Sequence[Ended], outcomes: Outcomes) -> None:
    """All ranks stopped after the same batch, and the resumed job went on behind it."""
    assert len({len(stopped.noted) for stopped in outcomes[0]}) == 1
    for whole, stopped, resumed in zip(wholes, *outcomes, strict=True):
        assert stopped.is_stopped
        assert 0 < len(stopped.noted) < len(whole.noted)
        assert [*stopped.noted, *resumed.noted] == whole.noted


def example(name: str, *arguments: Any, **options: Any) -> Train:
    """A training by an example, of which each step of an optimizer is noted."""
    program = import_upstream(f"examples.integrations.{name}")

    def train(run: Run) -> None:
        run.seed(0)
        run.watch()
        program.main(str(run.local), *arguments, **options)

    return train


def run_example(
    name: str,
    node: Path,
    lengths: Sequence[object],
    prepare: Callable[[], object] | None = None,
    **options: Any,
) -> list[str]:
    """Run an example on two ranks, once for each length; what both print of their training."""
    mine, other = run_ranks(
        *(_train_example, 2, name, lengths, prepare),
        store_per_node=[node],
        timeout_s=LONGEST_S,
        **options,
    )
    assert mine == other
    return list(mine)


def _train_example(
    rank: int, world_size: int, name: str, lengths: Sequence[object], prepare: Any
) -> list[str]:
    if prepare is not None:
        prepare()
    example = import_upstream(f"examples.integrations.{name}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for length in lengths:
            example.main(str(node_store()), length)
    return [line for line in printed.getvalue().splitlines() if line.startswith("trained")]


class _Raised(str):
    """Traceback of what a rank has raised."""

    __slots__ = ()


def _fork(
    rank: int, world_size: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[int, int]:
    receiving, sending = os.pipe()
    sys.stdout.flush()
    if pid := os.fork():
        os.close(sending)
        return pid, receiving
    os.close(receiving)
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "GROUP_RANK": "0",
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_WORLD_SIZE": f"{world_size}",
        "MASTER_PORT": f"{port}",
    }
    torch.set_num_threads(1)
    try:
        outcome = fn(rank, world_size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the test shows it
        outcome = _Raised(traceback.format_exc())
    with open(sending, "wb") as stream:
        pickle.dump(outcome, stream)
    sys.stdout.flush()
    sys.stderr.flush()
    # The test process's own work is not this one's to end.
    os._exit(0)


def _outcome(rank: int, pid: int, receiving: int) -> Any:
    with open(receiving, "rb") as stream:
        payload = stream.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(payload) if payload else DeadRank(rank, os.waitstatus_to_exitcode(status))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
