"""Errors that are also those which NVRx raises."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from localckpt.errors import CheckpointingException, PeerLostError

__all__ = ["also_torchs"]


@contextmanager
def also_torchs() -> Iterator[None]:
    """Raise what failed as torch's ``CheckpointException``, too, unless a rank was lost."""
    try:
        yield
    except PeerLostError:
        raise
    except CheckpointingException as error:
        error.__class__ = _also_torchs(type(error))  # type: ignore[arg-type]
        raise


@cache
def _also_torchs(kind: type[CheckpointingException]) -> type[CheckpointingException]:
    if issubclass(kind, CheckpointException):
        return kind

    class Both(kind, CheckpointException):  # type: ignore[misc, valid-type]
        @property
        def failures(self) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
            """This rank's error, whose text names the ranks that failed."""
            rank = dist.get_rank() if dist.is_initialized() else 0
            return {rank: (self, traceback.extract_tb(self.__traceback__))}

        def __reduce__(self) -> tuple[object, ...]:
            return kind, self.args, vars(self)

    Both.__name__, Both.__qualname__ = kind.__name__, kind.__qualname__
    Both.__module__ = kind.__module__
    return Both
