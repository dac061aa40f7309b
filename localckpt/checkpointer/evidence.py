"""Evidence that a training loop that failed has changed nothing since its last step.

An error may leave a step half done, whose state is that of no step. Of one error more can be known:
a data loader that gives no batch, as when a signal has ended its workers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from localckpt.checkpointer.parts import ModulePart
from localckpt.errors import CheckpointingException
from localckpt.failure_texts import ranks_named
from localckpt.state_dict.replicated import without_marker

_LOADERS = ("torch.utils.data", "torchdata")


def is_of_loader(error: BaseException) -> bool:
    """Return whether an error comes out of the ``next`` of one of torch's data loaders."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_LOADERS) and frame.f_code.co_name == "__next__":
            return True
        trace = trace.tb_next
    return False


def judge_ends(ends: Sequence[tuple[int, bool]]) -> None:
    """Judge whether all ranks are at one step whose state is known.

    ``ends`` has for each rank its last step, and whether it is known that nothing has changed
    since.
    """
    steps = [step for step, _ in ends]
    if len(set(steps)) > 1:
        raise CheckpointingException(f"the last steps of the ranks differ: {steps[:16]}")
    unsure = [rank for rank, (_, is_known) in enumerate(ends) if not is_known]
    if unsure:
        raise CheckpointingException(
            f"on {ranks_named(unsure)} the error came in the middle of the next step, or it cannot "
            f"be known that nothing has changed since. Older checkpoints are as they were"
        )


class Evidence:
    """Notes on the state of the last step, taken in jobs with processes of data loaders.

    A change of a tensor of the state's modules, or of a gradient, shows in torch's count of its
    versions, and a random number in the state of torch's generator.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._tensors: list[torch.Tensor] = []
        self._noted: Any = None

    def look(self) -> None:
        """Look which tensors there are to note; to be called now and then."""
        self._noted = None
        self._tensors = self._current() if multiprocessing.active_children() else []

    def note(self) -> None:
        """Note the state of a step that has ended."""
        if self._tensors:
            self._noted = self._state()

    def is_unchanged(self) -> bool:
        """Return whether it is known that nothing has changed since the last note."""
        noted, current = self._noted, self._current()
        is_same = len(current) == len(self._tensors) and all(
            one is other for one, other in zip(current, self._tensors, strict=True)
        )
        return noted is not None and is_same and bool(noted == self._state())

    def _current(self) -> list[torch.Tensor]:
        parts = [without_marker(part) for part in self._parts.values()]
        modules = [part.module for part in parts if isinstance(part, ModulePart)]
        found = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return [] if any(tensor.is_inference() for tensor in found) else found

    def _state(self) -> tuple[int, int, int, bytes]:
        gradients = [t.grad for t in self._tensors if t.grad is not None]
        return (
            sum([tensor._version for tensor in self._tensors]),
            len(gradients),
            sum([gradient._version for gradient in gradients]),
            torch.get_rng_state().numpy().tobytes(),
        )
