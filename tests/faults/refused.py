"""A job that refuses its last rank one call after another, and what all ranks know of it.

The n-th call is made to fail, what must hold is checked, the work is done again undisturbed, and so
on until the work makes no n-th call.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from localckpt import CheckpointingException
from tests.faults.traced import Call, Fault, Section, Watched, watch
from tests.managers.jobs import make_manager
from tests.ranks import node_store, run_ranks

__all__ = [
    "LOOKS",
    "Case",
    "Job",
    "attempt",
    "codes_of",
    "dangerous",
    "gather",
    "run",
]

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
LOOKS = {"stat", "lstat", "newfstatat", "statx", "fstat", "access", "faccessat"}


@dataclass(frozen=True)
class Job:
    """A job whose last rank is refused one call after another.

    Attributes:
        kind: Of the managers.
        worker: Who saves behind training; ``None`` for saves that are waited for.
        fresh: Every case has a manager of its own, and is the first save of it.
        ranks: How many there are, each on a node of its own.
        codes: The errors, in turn.
        denied: Every call is also refused with EACCES: of some calls pathlib makes an empty folder
            of that one. All others are handled alike.
        lasts: From the n-th on, every call is refused.
        cold: Files are not in the page cache when they are loaded.
        serves: The other node is empty, so that the one that is refused has all that is left.
        step: Only every so many calls.
        only: Names of the calls that are refused; all by default.
    """

    kind: str
    worker: Literal["thread"] | None = None
    fresh: bool = False
    ranks: int = 1
    codes: tuple[int, ...] = _REFUSALS
    denied: bool = False
    lasts: bool = False
    cold: bool = False
    serves: bool = False
    step: int = 1
    only: tuple[str, ...] = ()

    @property
    def victim(self) -> int:
        return self.ranks - 1

    def faults(self) -> Iterator[Fault]:
        for turn in itertools.count():
            for code in codes_of(turn, self.codes, self.denied):
                nth = 1 + turn * self.step
                yield Fault(nth, "error", code, lasts=self.lasts, only=self.only)

    def manager(self, repl: Any) -> Any:
        return make_manager(self.kind, node_store(), "job", repl, keep_last=2)

    def __str__(self) -> str:
        said = (
            *(self.worker, "first" * self.fresh, "cold" * self.cold, "serves" * self.serves),
            *("from then on" * self.lasts, f"{self.ranks} ranks" * (self.ranks > 1)),
        )
        return "-".join([self.kind, *filter(None, said)])


@dataclass
class Case:
    """What came of one call that was refused, as all ranks know it.

    Attributes:
        hit: The call; ``None`` when there was none left.
        errors: What each rank raised.
        source: Where the rank that was refused has loaded from.
    """

    hit: Call | None
    errors: list[str | None]
    source: str = ""

    @property
    def failed(self) -> bool:
        return any(self.errors)

    @classmethod
    def gather(cls, job: Job, section: Section, error: str | None) -> Case:
        told = gather(job, (section.hit, error))
        return cls(told[job.victim][0], [text for _, text in told])

    def check(self, job: Job, fault: Fault) -> None:
        """The error is the same on all ranks, of the right type, and says what happened where."""
        if not self.failed:
            return
        for text in self.errors:
            assert text is not None, (self.hit, self.errors)
            if self.hit is not None and self.hit.name not in {*LOOKS, "close"}:
                assert text.startswith(("StorageError:", "SaveFailedError:")), (self.hit, text)
            assert os.strerror(fault.code) in text, (self.hit, text)
        for text in self.errors[: job.victim]:
            assert text is not None
            assert f"rank {job.victim}" in text, (self.hit, text)


def codes_of(turn: int, codes: Sequence[int], denied: bool) -> list[int]:
    """The errors of one call: the next in turn, and EACCES if it is to be denied, too."""
    return list(dict.fromkeys([codes[turn % len(codes)], *([errno.EACCES] if denied else [])]))


def gather(job: Job, mine: Any) -> list[Any]:
    told = [mine] * job.ranks
    if job.ranks > 1:
        dist.all_gather_object(told, mine)
    return told


def attempt(
    dangerous: AbstractContextManager[Section], call: Callable[[], Any]
) -> tuple[Section, str | None]:
    error = None
    with dangerous as section:
        try:
            call()
        except CheckpointingException as raised:
            error = f"{type(raised).__name__}: {raised}"
    return section, error


def dangerous(watched: Watched | None, fault: Fault) -> AbstractContextManager[Section]:
    return nullcontext(Section()) if watched is None else watched.section(fault)


def run(job: Job, what: Callable[..., Any], nodes: Sequence[Path]) -> list[Case]:
    """Run it on all ranks; what came of each call that was refused."""
    with watch(nodes[job.victim]) as watching:
        refused, *_ = run_ranks(
            *(what, job.ranks, job, watching.address),
            init_group=job.ranks > 1,
            store_per_node=nodes,
            timeout_s=1200.0,
        )
    return list(refused)
