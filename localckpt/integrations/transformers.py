"""Transformers' ``Trainer`` with local checkpoints: one line, and nothing else to change.

The callback restores what it finds, also in the middle of an epoch, saves behind training, and
stops all ranks after the same step when the job is preempted.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localckpt.checkpointer.arguments import absolute_paths
from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.checkpointer.loaders import EpochPosition
from localckpt.checkpointer.resume import Elsewhere
from localckpt.errors import CheckpointingException
from localckpt.integrations.versions import at_least, require_called

with at_least("transformers"):
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainingArguments

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"
# What a program's arguments say anew at each start is not in this list.
_STATE_FIELDS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class LocalCheckpointCallback(TrainerCallback):
    """Callback that keeps the state of a training run on the nodes, and resumes from it.

    :meth:`attach` it to a ``Trainer``; ``Trainer.train()`` then goes on from the newest checkpoint
    that can be had.

    Args:
        options: Arguments of :class:`localckpt.Checkpointer`: at least ``local=`` or
            ``memory=True``.

    Attributes:
        checkpointer: The :class:`localckpt.Checkpointer` while ``train`` is running, else ``None``.
        stopped: Why the last ``train`` was stopped; ``None`` if it was not.
    """

    def __init__(self, **options: Any) -> None:
        self.checkpointer: Checkpointer | None = None
        self.stopped: str | None = None
        # After the last step the trainer may load the best weights.
        self._options = {"save_last": False, **absolute_paths(options)}
        self._trainer: Trainer | None = None
        self._position = EpochPosition()
        # Checkpoint of the Trainer's own that it was told to resume from.
        self._elsewhere: Elsewhere | None = None
        # Directory that stands for the checkpoint to resume from, for the Trainer.
        self._resume_path: str | None = None
        # Step of the checkpoint that the Trainer has been told of, and of the last call of step().
        self._found = -1
        self._last_step = -1
        self._is_epoch_over = False

    def attach(self, trainer: Trainer) -> None:
        """Have a trainer resume, save and stop by this callback, as the last of its callbacks.

        Raises:
            CheckpointingException: The trainer trains in a way that cannot be resumed from local
                checkpoints; or the callback belongs to another trainer.
        """
        _require_supported(trainer)
        replaced: dict[str, Callable[..., Any]] = {
            "_inner_training_loop": self._train,
            "_maybe_log_save_evaluate": self._end_step,
            "_load_from_checkpoint": self._load_model,
        }
        require_called("transformers", type(trainer), *replaced)
        if self._trainer is not None:
            raise CheckpointingException(
                "this LocalCheckpointCallback is attached to a Trainer already: make another one, "
                "with another session_id if both keep checkpoints in the same directory"
            )
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        # The Trainer reads how far it is before any callback is called, and only from a directory
        # that it is given; so the whole of its loop is entered with one. It tells of the end of an
        # evaluation before it has judged it; so what follows a step is awaited as a whole.
        for name, wrapper in replaced.items():
            setattr(trainer, name, functools.partial(wrapper, getattr(trainer, name)))

    @property
    def trainer(self) -> Trainer:
        """Trainer that the callback is attached to.

        Raises:
            CheckpointingException: There is none.
        """
        if self._trainer is None:
            raise CheckpointingException(
                "LocalCheckpointCallback does not know its Trainer: call callback.attach(trainer) "
                "before trainer.train(). Nothing was trained"
            )
        return self._trainer

    # What the trainer calls.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the checkpoint that was found.

        Raises:
            CheckpointingException: :meth:`attach` was not called.
        """
        trainer = self.trainer
        assert self.checkpointer is not None, "a trainer that is attached has made it"
        loaded = self.checkpointer.resume(self._elsewhere) - 1
        if loaded != self._found:
            raise _OlderLoadedError(loaded)
        self._last_step = state.global_step
        if self._resume_path is not None:
            # Read by now, so that a job that is killed leaves nothing of it.
            shutil.rmtree(self._resume_path)
        if loaded >= 0:
            trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
            state.compute_steps(args, state.max_steps)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the order of the epoch drawn from the random numbers that it was drawn from."""
        self._is_epoch_over = False
        self._position.enter_epoch(kwargs["train_dataloader"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on with the random numbers of the step that was resumed from."""
        assert self.checkpointer is not None, "on_train_begin came before"
        if self._position.enter_step():
            self.checkpointer.rewind_random()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that the evaluation of the epoch comes next."""
        self._is_epoch_over = True

    # What is called in place of the trainer's methods.

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Train, from the checkpoint that is found or from the path that was given."""
        path = kwargs.pop("resume_from_checkpoint", None)
        if kwargs.get("trial") is not None:
            raise CheckpointingException(
                "a hyper-parameter search trains several models: leave LocalCheckpointCallback out "
                "of it, and attach it to the Trainer of the run with the best ones"
            )
        self.stopped, self._elsewhere = None, None if path is None else _elsewhere(path)
        with Checkpointer(self._state, **self._options) as self.checkpointer:
            try:
                found = self.checkpointer.find_latest(self._elsewhere)
                while True:
                    try:
                        return self._train_from(found, path, original, *args, **kwargs)
                    except _OlderLoadedError as error:
                        # Rare enough to set up the whole loop once more.
                        found = error.step
                        logger.warning("the newest checkpoint is damaged: going back to %d", found)
            finally:
                self.stopped, self.checkpointer = self.checkpointer.stopped, None

    def _train_from(
        self, found: int, path: str | None, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._found = found
        self._position = EpochPosition()
        if found < 0 or (self._elsewhere is not None and found == self._elsewhere.step):
            return original(*args, resume_from_checkpoint=path, **kwargs)
        if self._elsewhere is not None:
            logger.warning("step %d of this run is newer than %s, and is resumed", found, path)
        told = TrainerState(global_step=found, train_batch_size=self.trainer._train_batch_size)
        told.compute_steps(self.trainer.args, max_steps=1)
        with tempfile.TemporaryDirectory(prefix="localckpt-") as folder:
            told.save_to_json(str(Path(folder) / _STATE_FILE))
            self._resume_path = folder
            try:
                return original(*args, resume_from_checkpoint=folder, **kwargs)
            finally:
                self._resume_path = None

    def _load_model(
        self,
        original: Callable[..., Any],
        resume_from_checkpoint: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # A model in FSDP, which :meth:`on_train_begin` fills as any other.
        if resume_from_checkpoint != self._resume_path:
            original(resume_from_checkpoint, *args, **kwargs)

    def _end_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save as the trainer does; then save if it is time, or stop.

        It is called after each step, and after each epoch.
        """
        assert self.checkpointer is not None, "on_train_begin came before"
        if self.checkpointer.stopped is not None:
            # After an epoch that was left: the job has no time for an evaluation.
            return
        original(*args, **kwargs)
        state, control = self.trainer.state, self.trainer.control
        is_last_of_epoch = state.epoch == int(state.epoch)
        if state.global_step == self._last_step or (is_last_of_epoch and not self._is_epoch_over):
            # After the last step of an epoch comes the evaluation of the epoch.
            return
        if control.should_training_stop and state.global_step < state.max_steps:
            # Another callback ends the run here. Resumed from here it would go on.
            return
        self._last_step = state.global_step
        self._position.end_step(is_last_of_epoch=is_last_of_epoch)
        if self.checkpointer.step(state.global_step):
            logger.warning("stopping Trainer.train: %s", self.checkpointer.stopped)
            control.should_training_stop = True

    # The state.

    def _state(self) -> dict[str, Any]:
        """Parts of the state, once the trainer has made them."""
        trainer = self.trainer
        state: dict[str, Any] = {
            "model": trainer.model_wrapped,
            # Accelerate wraps it.
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "trainer": (self._trainer_state, self._take_trainer_state),
            "position": self._position,
        }
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
        return state

    def _trainer_state(self) -> str:
        """What the trainer itself keeps in JSON, and so do its callbacks."""
        trainer = self.trainer
        known = asdict(trainer.state)
        return json.dumps(
            {
                "state": {name: known[name] for name in _STATE_FIELDS if name in known},
                "current_flos": trainer.current_flos,
                "callbacks": [
                    [type(callback).__name__, callback.state()] for callback in _exportable(trainer)
                ],
            },
            default=_as_json,
        )

    def _take_trainer_state(self, saved: str) -> None:
        trainer = self.trainer
        told = json.loads(saved)
        for name, value in told["state"].items():
            setattr(trainer.state, name, value)
        best = trainer.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            logger.warning("the best model %s is not there any more, and is forgotten", best)
            trainer.state.best_model_checkpoint = None
        trainer.current_flos = told["current_flos"]
        # Several of one class are in the same order as they were.
        left = _exportable(trainer)
        for name, state in told["callbacks"]:
            callback = next((c for c in left if type(c).__name__ == name), None)
            if callback is None:
                logger.warning("the state of the callback %s is left out: it is not there", name)
                continue
            left.remove(callback)
            for attribute, value in state["attributes"].items():
                setattr(callback, attribute, value)


class _OlderLoadedError(Exception):
    """The checkpoint that was found is damaged, and an older one was loaded.

    Attributes:
        step: Step of the one that was loaded; -1 for none.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} was loaded")
        self.step = step


def _elsewhere(path: str) -> Elsewhere:
    """A checkpoint of the trainer's own, which loads it by itself."""
    known = TrainerState.load_from_json(str(Path(path) / _STATE_FILE))
    return Elsewhere(known.global_step, load=lambda: None)


def _exportable(trainer: Trainer) -> list[Any]:
    """Callbacks that have a state, without the trainer's own flags, which are those of a step."""
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]


def _as_json(value: Any) -> Any:
    """A number of numpy or torch as one of Python."""
    item = getattr(value, "item", None)
    if item is None:
        raise CheckpointingException(
            f"the TrainerState, or a callback's state(), has a {type(value).__name__}, which JSON "
            f"cannot hold, nor can the Trainer's own checkpoints: keep plain numbers there"
        )
    return item()


def _require_supported(trainer: Trainer) -> None:
    """Raise CheckpointingException if runs of a trainer cannot be resumed."""
    if trainer.is_deepspeed_enabled:
        raise CheckpointingException(
            "DeepSpeed keeps the model and the optimizer in a form of its own, which "
            "LocalCheckpointCallback cannot save: use it with DDP or FSDP. Nothing was attached"
        )
    if trainer.args.auto_find_batch_size:
        raise CheckpointingException(
            "auto_find_batch_size changes the batch size of a run, and with it what batches were "
            "trained on: give the size that it has found. Nothing was attached"
        )
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise CheckpointingException(
            "enable_jit_checkpoint and LocalCheckpointCallback both save when the job is asked to "
            "stop: leave enable_jit_checkpoint out. Nothing was attached"
        )
