"""Local checkpoints in a training loop with Accelerate.

Everything that the accelerator has prepared is saved, and the position in the data; the batches
that were trained on are left out when the loop is resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Self

from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.checkpointer.parts import Values
from localckpt.errors import CheckpointingException
from localckpt.integrations.versions import at_least

with at_least("accelerate"):
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.utils import DistributedType

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
        self._run = Values(steps=0)
        self._is_resumed = False
        # A loop may be left while gradients are accumulated, which are not saved.
        saves_last = accelerator.gradient_accumulation_steps == 1
        self.checkpointer = Checkpointer(self._state, **{"save_last": saves_last, **options})

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the run so far."""
        return int(self._run.steps)

    @property
    def stopped(self) -> str | None:
        """Why the job was stopped; ``None`` if it was not."""
        return self.checkpointer.stopped

    def epochs(self, count: int) -> Iterator[int]:
        """Numbers of the epochs that are left, of so many; all ranks take the same.

        The first call restores the newest checkpoint that can be had. What the loop does after the
        batches of an epoch it does after a restart from the epoch's last step, too.

        Raises:
            CheckpointingException: The accelerator has prepared nothing, or loaders whose position
                it notes wrongly; or as for :meth:`localckpt.Checkpointer.epochs`.
            MismatchError, NoReplicasAvailableError, PeerLostError: As for
                :meth:`localckpt.Checkpointer.resume`.
        """
        if not self._is_resumed:
            self.checkpointer.resume()
            self._is_resumed = True
        yield from self.checkpointer.epochs(count)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Batches of this epoch that are left; all ranks take as many.

        The state is saved when the next batch is asked for, if an optimizer step has ended and it
        is time. When the job is to stop there is no next batch.

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
        for batch in self.checkpointer.batches(_Prepared(self._accelerator, loader)):
            yield batch
            if self._accelerator.sync_gradients:
                self._run.steps += 1
                if self.checkpointer.step(self.steps):
                    logger.warning("stopping the loop: %s", self.stopped)

    def close(self) -> None:
        """Finish the saves under way, and free everything; all ranks call it."""
        self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpointer.__exit__(*error)

    def _state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        # Accelerator.save_state() takes the same lists; there are no public names for them.
        named: dict[str, list[Any]] = {
            "model": accelerator._models,
            "optimizer": [getattr(o, "optimizer", o) for o in accelerator._optimizers],
            "scheduler": [getattr(s, "scheduler", s) for s in accelerator._schedulers],
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
        return state | {"run": self._run}


class _Prepared:
    """A loader that the accelerator has prepared, which leaves out batches in its own way."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        self._accelerator, self._loader = accelerator, loader

    def __getattr__(self, name: str) -> Any:
        # All have these, and only stateful ones know their position.
        if name in ("state_dict", "load_state_dict") and not _is_stateful(self._loader):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def without_first(self, count: int) -> Any:
        loader = self._loader
        if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches:
            # The first rank reads a batch for each rank, unless it yields them without a sampler.
            is_for_all = loader.batch_sampler is not None
            count *= int(self._accelerator.num_processes) if is_for_all else 1
        return self._accelerator.skip_first_batches(loader, count)


def _loaders(checkpoints: LocalCheckpoints) -> list[Any]:
    return list(checkpoints._accelerator._dataloaders)


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _is_miscounted(loader: Any) -> bool:
    """Whether the loader's state allows for batches that are read for other ranks, and are not."""
    is_allowed_for = "adjust_state_dict_for_prefetch" not in vars(DataLoaderShard)
    return is_allowed_for and _is_stateful(loader) and isinstance(loader, DataLoaderShard)
