"""Lightning's ``Trainer`` with local checkpoints: one callback, and nothing else to change.

The callback restores what it finds before the first batch, also in the middle of an epoch, saves
behind training, and stops all ranks after the same batch when the job is preempted.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from localckpt.checkpointer.arguments import absolute_paths
from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.checkpointer.parts import RandomPart
from localckpt.errors import CheckpointingException
from localckpt.integrations.versions import at_least
from localckpt.state_dict.basic import is_stateful

with at_least("lightning", "pytorch-lightning"):
    try:
        from lightning.pytorch import Callback, strategies
    except ImportError:
        from pytorch_lightning import Callback, strategies

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

logger = logging.getLogger(__name__)

# Their modules and optimizers are torch's own, wrapped or sharded.
_STRATEGIES = (
    *(strategies.SingleDeviceStrategy, strategies.DDPStrategy),
    *(strategies.FSDPStrategy, strategies.ModelParallelStrategy),
)
# Subclasses of DDPStrategy that keep the state in forms or on devices of their own.
_UNKNOWN_STRATEGIES = (strategies.DeepSpeedStrategy, strategies.XLAStrategy)


class LocalCheckpoint(Callback):
    """Callback that keeps the state of a training run on the nodes, and resumes from it.

    Give it to the ``Trainer`` as the last callback, so that it saves the state of the others as it
    is after a batch.

    Args:
        stop_signals: Signals on any one rank that stop the run in order. They take the place of
            Lightning's own handlers, which end the ranks without saving.
        stop_when: As for :class:`localckpt.Checkpointer`.
        options: Other arguments of :class:`localckpt.Checkpointer`: at least ``local=`` or
            ``memory=True``.

    Attributes:
        checkpointer: The :class:`localckpt.Checkpointer` while ``fit`` is running, else ``None``.
    """

    def __init__(
        self,
        *,
        stop_signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        stop_when: Callable[[], str | None] | None = None,
        **options: Any,
    ) -> None:
        self.checkpointer: Checkpointer | None = None
        self._stop_signals = tuple(stop_signals)
        self._stop_when = stop_when
        self._options = absolute_paths(options)
        self._received: str | None = None
        self._position = _Position()
        self._loader_states: list[Any] = []
        # Limits of the trainer that a stop has lifted, to be put back.
        self._lifted: tuple[Any, Any, Any] | None = None
        self._strict: list[Any] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest checkpoint, if there is one.

        Raises:
            CheckpointingException: A checkpoint was found, and ``fit`` was given a ``ckpt_path``;
                or the trainer's strategy keeps the state in a form of its own.
        """
        self._received = self._lifted = None
        self._position = _Position()
        self.checkpointer = Checkpointer(
            _state_of(trainer, pl_module, self) | {"position": self._position},
            stop_signals=(),
            stop_when=self._why_stop,
            # After the last step Lightning goes on to change the state of its loops.
            **{"save_last": False, **self._options},
        )
        is_resumed = self.checkpointer.resume() > 0
        if is_resumed and trainer.ckpt_path is not None:
            raise CheckpointingException(
                f"a checkpoint of this run was found on the nodes or on shared storage, and "
                f"Trainer.fit was given ckpt_path={trainer.ckpt_path!r}: leave ckpt_path out to go "
                f"on from the newest checkpoint, or give LocalCheckpoint another session_id to "
                f"begin a new run from that path"
            )
        self._position.enter_epoch()
        # Lightning forgets them when it has restored the loaders.
        self._loader_states = list(trainer.fit_loop._combined_loader_states_to_load)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on behind the last batch that was trained on, and take over the signals."""
        assert self.checkpointer is not None, "on_fit_start came before"
        if self._position.batches > 0:
            _enter_epoch(trainer, self._position, self._loader_states)
            _skip_batches(trainer, self._position.batches)
            self.checkpointer.rewind_random()
        if threading.current_thread() is threading.main_thread():
            # Lightning puts back the handlers that were there before, when the run ends.
            for number in self._stop_signals:
                signal.signal(number, self._receive)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the random numbers that the order of the epoch's batches is drawn from."""
        self._position.begin_epoch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, and stop the run if it is to stop."""
        # Accumulated gradients are not saved. After the last batch comes on_train_epoch_end: a run
        # that is resumed at the last batch would leave out the validation.
        is_between = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_between and not trainer.is_last_batch:
            self._position.batches = batch_idx + 1
            self._step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save at the end of an epoch, as :meth:`on_train_batch_end` does within."""
        if trainer.is_last_batch:
            self._position.batches = 0
            self._step(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the saves under way, and free everything."""
        if self._lifted is not None:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps, limit = self._lifted
            trainer.limit_val_batches = limit
            for one in self._strict:
                one.strict = True
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Free everything without waiting for other ranks, which may not come any more."""
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def _step(self, trainer: Trainer) -> None:
        assert self.checkpointer is not None, "on_fit_start came before"
        if self._lifted is not None:
            return
        if self.checkpointer.step(trainer.fit_loop.total_batch_idx):
            logger.warning("stopping Trainer.fit: %s", self.checkpointer.stopped)
            fit_loop = trainer.fit_loop
            # A run goes on until its least number of epochs and steps, and is validated at its end.
            limits = fit_loop.min_epochs, fit_loop.epoch_loop.min_steps, trainer.limit_val_batches
            self._lifted = limits
            fit_loop.min_epochs = fit_loop.epoch_loop.min_steps = None
            trainer.limit_val_batches = 0
            # Early stopping, and schedulers, may look at a metric of the validation, of which in
            # the first epoch there is none.
            of_metrics = [*trainer.callbacks, *trainer.lr_scheduler_configs]
            self._strict = [one for one in of_metrics if getattr(one, "strict", None) is True]
            for one in self._strict:
                one.strict = False
            trainer.should_stop = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = f"signal {signal.Signals(number).name}"

    def _why_stop(self) -> str | None:
        return self._received or (None if self._stop_when is None else self._stop_when())


class _Position:
    """Position in the data: a part of the state, to find the same batches in the same order.

    A loader draws the order of an epoch from the random number generators when its iterator is
    made. That of the first epoch of a run is made before ``on_train_start``, and those of others
    after ``on_train_epoch_start``.

    Attributes:
        batches: Number of batches of the epoch that were trained on; 0 at the end of an epoch.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._random = RandomPart()
        self._epoch_random: dict[str, Any] = {}
        self._is_iterator_made = False

    def enter_epoch(self) -> None:
        """Begin a run, in the middle of an epoch or with a new one."""
        self._is_iterator_made = self.batches == 0
        if self.batches > 0:
            self._random.load_state_dict(self._epoch_random)
        else:
            self._epoch_random = self._random.state_dict()

    def begin_epoch(self) -> None:
        """Note the random number generators, unless the iterator of this epoch is made already."""
        if not self._is_iterator_made:
            self._epoch_random = self._random.state_dict()
        self._is_iterator_made = False

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "random": self._epoch_random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state["batches"]
        self._epoch_random = dict(state["random"])


def require_known(strategy: strategies.Strategy) -> None:
    """Refuse a strategy whose modules and optimizers are not torch's own."""
    if not isinstance(strategy, _STRATEGIES) or isinstance(strategy, _UNKNOWN_STRATEGIES):
        names = ", ".join(known.__name__ for known in _STRATEGIES)
        raise CheckpointingException(
            f"{type(strategy).__name__} may keep the training state in a form of its own, which "
            f"LocalCheckpoint cannot save: use one of {names}. Nothing was made"
        )


def _state_of(trainer: Trainer, module: LightningModule, own: Callback) -> dict[str, Any]:
    """Parts of a run's state, for a :class:`Checkpointer`."""
    require_known(trainer.strategy)
    others = {c.state_key: c for c in trainer.callbacks if c is not own}

    def callback_states() -> dict[str, Any]:
        return {key: state for key, other in others.items() if (state := other.state_dict())}

    def load_callbacks(states: Mapping[str, Any]) -> None:
        for key, state in states.items():
            if key in others:
                others[key].load_state_dict(state)

    def extras() -> dict[str, Any]:
        saved: dict[str, Any] = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
        for other in others.values():
            other.on_save_checkpoint(trainer, module, saved)
        module.on_save_checkpoint(saved)
        return saved

    def load_extras(saved: dict[str, Any]) -> None:
        for other in others.values():
            other.on_load_checkpoint(trainer, module, saved)
        module.on_load_checkpoint(saved)

    state: dict[str, Any] = {
        # Before all others, as when Lightning loads: it may change what they are loaded into.
        "extras": (extras, load_extras),
        "model": trainer.model,
        "callbacks": (callback_states, load_callbacks),
        "loop": (trainer.fit_loop.state_dict, trainer.fit_loop.load_state_dict),
        "precision": trainer.precision_plugin,
    }
    for number, optimizer in enumerate(trainer.optimizers):
        state[f"optimizer{number}"] = optimizer
    for number, config in enumerate(trainer.lr_scheduler_configs):
        state[f"scheduler{number}"] = config.scheduler
    if is_stateful(trainer.datamodule):
        state["datamodule"] = trainer.datamodule
    return state


def _enter_epoch(trainer: Trainer, position: _Position, loader_states: list[Any]) -> None:
    """Make the iterator of an epoch anew if samplers draw its order from its number.

    Lightning has made one, and tells the samplers the number after ``on_train_start``.
    """
    loop = trainer.fit_loop
    holders = [
        holder
        for loader in loop._combined_loader.flattened
        for holder in (loader, getattr(loader, "batch_sampler", None))
    ]
    samplers: list[Any] = [getattr(holder, "sampler", None) for holder in holders]
    counting = [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]
    if not counting:
        return
    for sampler in counting:
        sampler.set_epoch(loop.epoch_progress.current.processed)
    position.enter_epoch()
    loop._combined_loader_states_to_load = loader_states
    loop._load_combined_loader_states()
    iter(loop._data_fetcher)


def _skip_batches(trainer: Trainer, batches: int) -> None:
    """Take batches of the epoch out of the loaders that do not restore their position."""
    loop = trainer.fit_loop
    # Lightning has no public name for the iterator of an epoch.
    loaders, fetcher = loop._combined_loader.flattened, loop._data_fetcher
    stateful = [loader for loader in loaders if is_stateful(loader)]
    if stateful:
        # Lightning has restored them.
        if len(stateful) < len(loaders):
            logger.warning(
                "%d of %d loaders have no state_dict: they begin this epoch anew",
                *(len(loaders) - len(stateful), len(loaders)),
            )
        return
    for _ in range(batches):
        next(fetcher)
    # The loop adds the batches of before.
    fetcher.fetched -= batches
