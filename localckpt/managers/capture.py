"""Capture of states in slots: tensors are copied, and digests computed beside training.

Nothing here knows what a store does with a slot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from localckpt.availability.coverage import division_problem
from localckpt.errors import CheckpointingException
from localckpt.ids import Group, ShardIdentity
from localckpt.managers.context import Context
from localckpt.memory.copying import Copier
from localckpt.memory.gpu_copies import CopiesUnderWay, SideStreams
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import shaped
from localckpt.state_dict.basic import BasicTensorAwareStateDict, TensorAwareStateDict, wrapped
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import Capture, ImagePlanner, pack, unpack, write_digests
from localckpt.state_dict.parts import Agreed
from localckpt.state_dict.source import MemorySource
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.preflight import MemoryNeeds, plan_buffers
from localckpt.storage.store import Slot
from localckpt.threads import SerialThread, Task, end_all

logger = logging.getLogger(__name__)


class StateCapture:
    """Captures the states of one manager."""

    def __init__(self, context: Context) -> None:
        options, ranks = context.options, context.ranks
        self._context = context
        self.planner = ImagePlanner(context.allowed, Job(ranks.rank, ranks.global_ranks))
        self._copier = Copier(options.staging_threads)
        # Between two steps of an optimizer nobody changes its parameters and its state, so their
        # copies from a GPU need to be over only when it steps next.
        self._guarded = options.optimizers
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._hold_back_training())
            for optimizer in self._guarded
        ]
        self._digesting = SerialThread("localckpt-digests")
        self._streams = SideStreams(options.timeout)
        self._copies: list[CopiesUnderWay] = []
        self._states_are_good = False
        # Until the ranks find that their parts do not fit together.
        self._divides = options.divide_replicated and self._context.store.keeps_images

    def node_ranks(self) -> tuple[int, ...]:
        """Return the ranks with which this rank divides equal tensors; ``()`` for none."""
        nodes, rank = self._context.epoch.nodes, self._context.ranks.rank
        if not self._divides:
            return ()
        here = tuple(other for other, node in enumerate(nodes) if node == nodes[rank])
        return here if len(here) > 1 else ()

    def divide_no_more(self, why: str) -> None:
        """Store all tensors whole from now on, as all ranks do."""
        if self._divides:
            self._divides = False
            logger.warning("each rank stores all of its tensors from now on: %s", why)

    def capture(
        self,
        state: TensorAwareStateDict,
        identity: ShardIdentity,
        *,
        is_sent: bool,
        node_ranks: tuple[int, ...] = (),
    ) -> tuple[Slot, tuple[Agreed, ...]]:
        """Capture a state's value now; return its slot, and what divided parts have alike."""
        if not self._context.store.keeps_images:
            state = self._on_host(state, identity)
        capture = self.planner.capture(state, node_ranks)
        timeout_s = self._context.options.timeout
        slot = self._context.store.reserve(
            *(identity, capture.nbytes(identity), timeout_s), may_stage=True
        )
        tasks: list[Task[None]] = []
        slot.begin_filling(partial(self._stop, tasks))
        slot.pin(capture.gpu)
        if slot.staged is not None:
            pieces = slot.staged.pieces(verifies=False)
            capture.write_pieces(pieces, identity, self._copier, self._streams)
            slot.filled(capture.covered_nbytes(identity), slot.staged, is_complete=True)
            return slot, capture.agreed
        image = slot.image
        guarded = _storages_of(self._guarded)
        written = capture.write(image, identity, self._copier, self._streams, guarded)
        covered, copies = written.covered_nbytes, written.under_way
        self._copies = [*(c for c in self._copies if not c.over), copies]
        computing: Task[None] | None = None
        if is_sent and not written.has_digests:
            computing = Task(partial(_compute_digests, copies, image, covered, identity))
            # Noted before it can begin: after an interrupt it is ended with the slot.
            tasks.append(computing)
            self._digesting.submit(computing)
        slot.filled(
            covered,
            _CapturedImage(image, capture, covered, computing),
            is_complete=written.has_digests,
            copies=copies,
            computing=computing,
        )
        if is_sent:
            slot.hold("replication")
        return slot, capture.agreed

    def held(
        self, state: Any, identity: ShardIdentity, images: DirectoryStore, ranks: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Context in which a state as it is now is in memory, where ``images`` opens it.

        ``ranks`` are those of all shards of the checkpoint, as meshes in the state number them.
        """
        # Its layout is not that of the saves.
        job = Job(identity.rank, ranks, ranks[identity.rank])
        capture = ImagePlanner(self._context.allowed, job).capture(wrapped(state))

        def fill(image: memoryview) -> None:
            capture.write_pieces([(0, image)], identity, self._copier, self._streams)

        return images.held_in_memory(identity, capture.nbytes(identity), fill)

    def checked(self, state: Any, iteration: int) -> Any:
        """Refuse the first state on all ranks if it could not be loaded again on some.

        Ranks that save what others cannot would wait for those. So all ask each other, once; also
        whether the parts of their states that they divide fit together, and how many staging
        buffers there is memory for.
        """
        if self._states_are_good:
            return state
        report: Any = None
        ranks, protection = self._context.ranks, self._context.strategy.protection
        with Attempt() as checking:
            state = wrapped(state)
            capture = self.planner.capture(state, self.node_ranks())
            needs = self._context.store.memory_needs(len(capture.skeleton) + capture.data_nbytes)
            if self._context.options.needs_whole_images:
                needs = replace(needs, least_nbytes=0)
            report = [capture.agreed, needs.to_json()]
        apart, buffers, most_nbytes, memory = ranks.decide(
            f"save iteration {iteration}",
            checking.of(report),
            partial(_judge_first, protection),
            grace_s=ranks.timeout_s,
            kind="check the state",
            read=shaped((str | None, int, int, str)),
        )
        if apart is not None:
            self.divide_no_more(apart)
        self._context.store.limit_buffers(buffers, most_nbytes)
        is_less = buffers < needs.buffers
        logger.log(logging.WARNING if is_less else logging.INFO, "%s", memory)
        self._states_are_good = True
        return state

    def await_copied(self) -> None:
        """Return when all values of all captured states are in host memory."""
        for copies in self._copies:
            copies.wait()

    def close(self) -> None:
        """Wait for what is being copied, end the threads, and leave the optimizers alone."""
        with ExitStack() as closing:
            closing.callback(self._copier.stop)
            closing.callback(self._digesting.close)
            for hook in self._hooks:
                closing.callback(hook.remove)
            try:
                self.await_copied()
            except (CheckpointingException, RuntimeError) as error:
                # A GPU that hangs, or is broken, must not keep the store from being left.
                logger.error("what a GPU was copying is given up: %s", error)

    def _stop(self, tasks: Sequence[Task[None]]) -> None:
        self._copier.stop()
        end_all(tasks)
        self._streams.synchronize()

    def _hold_back_training(self) -> None:
        for copies in self._copies:
            copies.hold_back_training()

    def _on_host(
        self, state: TensorAwareStateDict, identity: ShardIdentity
    ) -> TensorAwareStateDict:
        """Copy a state to host memory, with a note of the device of each tensor."""
        copied: Any
        if isinstance(state, BasicTensorAwareStateDict):
            if all(tensor.is_cpu for tensor in state.tensors):
                return state
            image = pack(state, identity, self.planner)
            copied = unpack(image, allowed=self._context.allowed, map_location="cpu")
            copied.remember_devices(state)
        else:
            image = pack(state, identity, self.planner)
            copied = unpack(image, allowed=self._context.allowed)
            copied.copy_tensors_to_cpu()
        on_host: TensorAwareStateDict = copied
        return on_host


def _storages_of(optimizers: Sequence[torch.optim.Optimizer]) -> frozenset[int]:
    """Return the addresses of the storages that only a step of the optimizers changes."""
    tensors = (t for optimizer in optimizers for t in tensors_of(optimizer))
    # Of a DTensor, this rank's part is what is saved.
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    # A tensor that is made of others has no storage; what it is made of is copied at once.
    plain = (t for t in local if type(t) in (torch.Tensor, torch.nn.Parameter))
    return frozenset(t.untyped_storage().data_ptr() for t in plain)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer, and the tensors of its state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _judge_first(protection: Mapping[int, Group], reports: list[Any]) -> list[Any]:
    needs = [MemoryNeeds.from_json(fields) for _, fields in reports]
    return [division_problem([divided for divided, _ in reports]), *plan_buffers(needs, protection)]


def _compute_digests(
    copies: CopiesUnderWay, image: memoryview, covered_nbytes: int, identity: ShardIdentity
) -> None:
    copies.wait()
    write_digests(image, covered_nbytes, identity)


class _CapturedImage(MemorySource):
    """A captured image whose digests may be computed while its first bytes are sent."""

    def __init__(
        self,
        image: memoryview,
        capture: Capture,
        covered_nbytes: int,
        computing: Task[None] | None,
    ) -> None:
        super().__init__(image)
        self._capture = capture
        self._data_start = covered_nbytes - len(capture.skeleton) - capture.data_nbytes
        self._covered_nbytes = covered_nbytes
        self._computing = computing

    def read(self, start: int, stop: int) -> memoryview:
        if self._computing is not None and stop > self._covered_nbytes:
            self._computing.result()
        return super().read(start, stop)

    def fill(self, bucket: torch.Tensor, start: int, stop: int) -> None:
        """Put bytes ``[start, stop)`` into device memory."""
        self.read(start, stop)
        self._capture.fill(bucket[: stop - start], self.view, self._data_start, start)
