"""Local checkpoints in a training loop with Accelerate.

Everything that the accelerator has prepared is saved, and the position in the data; the batches
that were trained on are left out when the loop is resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Self

from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.errors import CheckpointingException
from localckpt.integrations.epoch_position import EpochPosition
from localckpt.integrations.versions import at_least

with at_least("accelerate"):
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.utils import DistributedType

__all__ = ["LocalCheckpoints"]

logger = logging.getLogger(__name__)

_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class LocalCheckpoints:
    """Saves what an accelerator has prepared, resumes the loop, and stops it in order.

    Every rank makes one and runs the same loop::

        with LocalCheckpoints(accelerator, local="/local/checkpoints") as checkpoints:
            for epoch in checkpoints.epochs(3):
                for batch in checkpoints.batches(loader):
                    train_step(batch)

    Args:
        accelerator: It prepares models, optimizers, schedulers and loaders, and registers other
            objects, before the loop begins.
        options: Arguments of :class:`localckpt.Checkpointer`: at least ``local=`` or
            ``memory=True``.

    Attributes:
        checkpointer: The :class:`localckpt.Checkpointer`; its steps are those of the optimizers.

    Raises:
        CheckpointingException: The accelerator trains in a way that cannot be resumed from local
            checkpoints, or :class:`localckpt.Checkpointer` refuses the options.
    """

    def __init__(self, accelerator: Accelerator, **options: Any) -> None:
        if accelerator.distributed_type in _UNSUPPORTED:
            raise CheckpointingException(
                f"{accelerator.distributed_type.value} keeps the model and the optimizer in a form "
                f"of its own, which LocalCheckpoints cannot save: use it with DDP or FSDP. Nothing "
                f"was made"
            )
        self._accelerator = accelerator
        self._run = _Run()
        self._position = EpochPosition()
        self._is_resumed = False
        # Whether the batch under way, or the last one, has ended an optimizer step.
        self._is_step_unsaved = False
        # A loop may be left while gradients are accumulated, which are not saved.
        saves_last = accelerator.gradient_accumulation_steps == 1
        self.checkpointer = Checkpointer(self._state, **{"save_last": saves_last, **options})

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the run so far."""
        return self._run.steps

    @property
    def stopped(self) -> str | None:
        """Why the job was stopped; ``None`` if it was not."""
        return self.checkpointer.stopped

    def epochs(self, count: int) -> Iterator[int]:
        """Numbers of the epochs that are left, of so many; all ranks take the same.

        The first call restores the newest checkpoint that can be had. The state is saved when the
        next number is taken, if it is time: with what the loop does after the batches of an epoch.

        Raises:
            CheckpointingException: The accelerator has prepared nothing, or loaders whose position
                it notes wrongly; or a save failed, as for :meth:`localckpt.Checkpointer.step`.
            MismatchError, NoReplicasAvailableError, PeerLostError: As for
                :meth:`localckpt.Checkpointer.resume`.
        """
        if not self._is_resumed:
            self.checkpointer.resume()
            self._is_resumed = True
        while self._run.epoch < count:
            yield self._run.epoch
            if self._is_stopped():
                return
            self._run.epoch += 1
            self._run.iteration += 1
            self._run.batches = 0
            if self._step(is_last_of_epoch=True):
                return

    def batches(self, loader: Any) -> Iterator[Any]:
        """Batches of this epoch that are left; all ranks take as many.

        The state is saved when the next batch is taken, if an optimizer step has ended and it is
        time. When the job is to stop there is no next batch.

        Args:
            loader: A loader that the accelerator has prepared.

        Raises:
            CheckpointingException: :meth:`epochs` does not run, or the accelerator has not prepared
                the loader. Or a save failed; as for :meth:`localckpt.Checkpointer.step`.
        """
        if not self._is_resumed or not any(loader is known for known in _loaders(self)):
            raise CheckpointingException(
                "batches() takes a loader that accelerator.prepare() has returned, within a loop "
                "over epochs(). No batch was taken"
            )
        run, left = self._run, loader
        if self._position.is_resumed:
            loader.set_epoch(run.iteration)
        run.iteration = loader.iteration
        if run.batches > 0 and not _is_stateful(loader):
            left = self._accelerator.skip_first_batches(loader, self._batches_to_skip(loader))
        elif run.batches == 0 and _is_stateful(loader):
            # Else an iterator that was made before is used once, and draws other numbers.
            loader.load_state_dict({})
        self._position.enter_epoch(loader)
        for batch in left:
            if self._position.enter_step():
                self.checkpointer.rewind_random()
            yield batch
            run.batches += 1
            self._is_step_unsaved = self._accelerator.sync_gradients
            run.steps += self._is_step_unsaved
            # After the last batch comes what the loop does after an epoch.
            if not left.end_of_dataloader and self._step(is_last_of_epoch=False):
                return
        # The one that leaves out batches counts its epochs by itself.
        loader.set_epoch(run.iteration + 1)

    def close(self) -> None:
        """Finish the saves under way, and free everything; all ranks call it."""
        self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpointer.__exit__(*error)

    def _step(self, *, is_last_of_epoch: bool) -> bool:
        """Save if it is time, and no gradients are being accumulated; whether to stop."""
        if not self._is_step_unsaved:
            return False
        self._is_step_unsaved = False
        self._position.end_step(is_last_of_epoch=is_last_of_epoch)
        if self.checkpointer.step(self.steps):
            logger.warning("stopping the loop: %s", self.stopped)
        return self._is_stopped()

    def _batches_to_skip(self, loader: Any) -> int:
        """Batches that were trained on, as the loader's own sampler counts them."""
        is_for_all = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches
        # There the first rank reads a batch for each rank, unless it yields them without a sampler.
        is_for_all = is_for_all and loader.batch_sampler is not None
        return self._run.batches * (int(self._accelerator.num_processes) if is_for_all else 1)

    def _is_stopped(self) -> bool:
        return self.stopped is not None

    def _state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        # Accelerator.save_state() takes the same lists; there are no public names for them.
        named: dict[str, list[Any]] = {
            "model": accelerator._models,
            "optimizer": [getattr(o, "optimizer", o) for o in accelerator._optimizers],
            "scheduler": [getattr(s, "scheduler", s) for s in accelerator._schedulers],
            "loader": [_StatefulLoader(one) for one in _loaders(self) if _is_stateful(one)],
            "object": accelerator._custom_objects,
        }
        if not named["model"]:
            raise CheckpointingException(
                "the accelerator has prepared no model: call accelerator.prepare() before epochs()"
            )
        if accelerator.num_processes > 1 and any(_is_miscounted(one) for one in _loaders(self)):
            raise CheckpointingException(
                "before 1.13.0 Accelerate notes the position of stateful loaders of several ranks "
                "wrongly, and a run would go on with other batches: install accelerate>=1.13, or "
                "leave use_stateful_dataloader=True out. Nothing was loaded or saved"
            )
        state = {
            f"{name}{number}": part
            for name, parts in named.items()
            for number, part in enumerate(parts)
        }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        state["accumulated"] = (
            lambda: accelerator.step,
            lambda step: setattr(accelerator, "step", step),
        )
        return state | {"run": self._run, "position": self._position}


class _Run:
    """How far the loop is.

    Attributes:
        epoch: Number of the epoch to go on in.
        batches: Number of its batches that were trained on.
        steps: Number of optimizer steps.
        iteration: Number by which the loader draws the order of this epoch.
    """

    def __init__(self) -> None:
        self.epoch = self.batches = self.steps = self.iteration = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        vars(self).update(state)


class _StatefulLoader:
    """A loader that restores its position by itself, within an epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # With one that is at its end, the order of the next epoch would be drawn twice.
        if not state.get("_iterator_finished"):
            self._loader.load_state_dict(state)


def _loaders(checkpoints: LocalCheckpoints) -> list[Any]:
    return list(checkpoints._accelerator._dataloaders)


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _is_miscounted(loader: Any) -> bool:
    """Whether the loader's state allows for batches that are read for other ranks, and are not."""
    is_allowed_for = "adjust_state_dict_for_prefetch" not in vars(DataLoaderShard)
    return is_allowed_for and _is_stateful(loader) and isinstance(loader, DataLoaderShard)
