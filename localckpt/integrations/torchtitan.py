"""torchtitan with local checkpoints: a checkpoint manager for its trainer, chosen by one flag.

Checkpoints on the nodes come between torchtitan's own, which stay as they are: on shared storage,
for export, and to begin from. A restart takes whichever is newer.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any

import torch

from localckpt.checkpointer.cadence import Every
from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.checkpointer.parts import ModulePart
from localckpt.checkpointer.resume import Elsewhere
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.integrations.versions import at_least, require_called

# Releases before had one checkpoint manager, and no place for another.
with at_least("torchtitan"):
    import tyro
    from torchtitan.components.checkpointer import (
        DATALOADER,
        MODEL,
        OPTIMIZER,
        TRAIN_STATE,
        CheckpointManager,
    )
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.config.override import derive, override

require_called(
    *("torchtitan", CheckpointManager),
    *("_load", "_save", "_should_save", "_maybe_wait_for_staging", "_close"),
)

logger = logging.getLogger(__name__)

_SHOWN = 3


class LocalCheckpoint(CheckpointManager):
    """torchtitan's checkpoint manager, with checkpoints on the nodes between its own.

    torchtitan's trainer makes it from its :class:`Config`.

    Attributes:
        checkpointer: The :class:`localckpt.Checkpointer` from ``load`` to ``close``, else ``None``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, which mean what they mean without localckpt, and those below."""

        local: str | None = None
        """Directory on a disk of each node, for the checkpoints on the nodes."""

        memory: bool = False
        """Whether to keep them in the nodes' memory instead of on a disk."""

        local_interval: int | None = None
        """Steps between them. By default they take at most 1 % of training time."""

        session_id: str = ""
        """Name of the training run; runs with different names may share a directory."""

        save_to_folder: bool = True
        """Whether torchtitan's own checkpoints are saved, too."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Other arguments of :class:`localckpt.Checkpointer`."""

    def __init__(self, config: Config, **components: Any) -> None:
        self.checkpointer: Checkpointer | None = None
        if config.enable:
            _check(config)
        super().__init__(config, **components)
        if not self.enable:
            return
        self._config = config
        self._model_parts: list[torch.nn.Module] = components["model_parts"]
        # A manager that only loads takes part in no stop either.
        self._is_saving = not config.load_only
        self.load_only = config.load_only or not config.save_to_folder

    def __del__(self) -> None:
        # Reached without close(): the other ranks may be anywhere.
        checkpointer, self.checkpointer = self.__dict__.get("checkpointer"), None
        if checkpointer is not None:
            left = CheckpointingException("torchtitan's trainer was left without close()")
            checkpointer.__exit__(type(left), left, None)
        super().__del__()

    def _load(self, step: int = -1) -> bool:
        """Load the newest checkpoint: of the nodes, of ``folder``, or one to begin from."""
        self.checkpointer = checkpointer = self._make_checkpointer()
        theirs = self._find_load_step() if step == -1 else step
        elsewhere = Elsewhere(theirs, partial(super()._load, theirs), goes_back=step != -1)
        is_found = checkpointer.resume(elsewhere if theirs >= 0 else None) > 0
        if not is_found:
            # The initial_* options are for runs that have no checkpoint yet.
            is_found = super()._load(step)
        elif (dataloader := self.states[DATALOADER]) is not None:
            # A loader makes its iterator here, which draws random numbers, and then uses it.
            dataloader.state_dict()
            checkpointer.rewind_random()
        if not self._is_saving:
            self.checkpointer = None
            checkpointer.close()
        return bool(is_found)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save on the nodes and to ``folder`` as it is time, and stop training if it is to stop."""
        checkpointer = self.checkpointer
        # Nothing was loaded before a seed checkpoint, which is for any number of ranks.
        if checkpointer is None:
            return bool(super()._save(curr_step, last_step))
        is_to_stop = checkpointer.step(curr_step)
        if not is_to_stop and (last_step or self._should_save(curr_step)):
            # Else torchtitan's, which has no random numbers, would be the newer one.
            checkpointer.save(curr_step)
        is_saved = bool(super()._save(curr_step, last_step))
        if is_to_stop:
            # The nodes have the state; what goes to shared storage needs the rest of the time.
            self.maybe_wait_for_saving()
            trainer = self.states[TRAIN_STATE]
            logger.warning("ending torchtitan's training loop: %s", checkpointer.stopped)
            trainer.should_continue_training = lambda: False
        return is_saved

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        is_to_stop = self.checkpointer is not None and self.checkpointer.stopped is not None
        return (is_to_stop and not self.load_only) or super()._should_save(curr_step, last_step)

    def _maybe_wait_for_staging(self) -> None:
        super()._maybe_wait_for_staging()
        if self.checkpointer is not None:
            self.checkpointer.manager.wait_staged()

    def _close(self) -> None:
        checkpointer, self.checkpointer = self.checkpointer, None
        try:
            if checkpointer is not None:
                # torchtitan calls close() in its handler of errors, too. Then the other ranks may
                # not come any more.
                if (error := sys.exception()) is not None:
                    checkpointer.__exit__(type(error), error, error.__traceback__)
                else:
                    checkpointer.close()
        finally:
            super()._close()

    def _make_checkpointer(self) -> Checkpointer:
        config, optimizers = self._config, list(self.states[OPTIMIZER])
        defaults: dict[str, Any] = {"guard": optimizers}
        if not hasattr(self.states.get(TRAIN_STATE), "should_continue_training"):
            # Another loop than that of torchtitan's Trainer would not end.
            defaults["stop_signals"] = ()
        if config.local_interval is not None:
            defaults["every"] = Every(steps=config.local_interval)
        return Checkpointer(
            self._state(optimizers),
            local=config.local,
            memory=config.memory,
            session_id=config.session_id,
            **(defaults | config.options),
        )

    def _state(self, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        """Parts of the state, for a :class:`Checkpointer`.

        Those of the model, and the optimizers, are taken one by one: torchtitan's containers gather
        and copy tensors, so that other numbers of ranks can load them.
        """
        state: dict[str, Any] = {
            **{f"{MODEL}{n}": _ModelPart(part) for n, part in enumerate(self._model_parts)},
            **{f"{OPTIMIZER}{n}": optimizer for n, optimizer in enumerate(optimizers)},
        }
        for key, value in self.states.items():
            if key == DATALOADER and value is not None:
                state[key] = _TitanLoader(value)
            elif key not in (MODEL, OPTIMIZER, DATALOADER):
                state[key] = value
        return state


@override(
    target=CheckpointManager.Config, description="checkpoints on the nodes beside torchtitan's own"
)
def local_checkpoint(config: Any, **options: Any) -> LocalCheckpoint.Config:
    """Put :class:`LocalCheckpoint` in the place of torchtitan's manager, for a run of any config.

    Named by ``--override.imports``; torchtitan's own checkpoints are saved if they were enabled.

    Args:
        config: torchtitan's options.
        options: Fields of :class:`LocalCheckpoint.Config`, and arguments of
            :class:`localckpt.Checkpointer`.

    Raises:
        CheckpointingException: The run has a checkpoint manager of another kind.
    """
    if type(config) not in (CheckpointManager.Config, LocalCheckpoint.Config):
        raise CheckpointingException(
            f"local_checkpoint would take the place of {type(config).__qualname__}, which may do "
            f"more than torchtitan's CheckpointManager. Nothing was changed"
        )
    known = {item.name for item in fields(LocalCheckpoint.Config)}
    given = {name: value for name, value in options.items() if name in known}
    others = {name: value for name, value in options.items() if name not in known}
    settings = {"save_to_folder": config.enable, **given, "enable": True, "options": others}
    return derive(config, LocalCheckpoint.Config, **settings)  # type: ignore[no-any-return]


class _ModelPart(ModulePart):
    """A part of the model as this rank trains it.

    ``state_dict()`` of a torchtitan model splits fused weights into copies, which it gathers from
    all ranks first.
    """

    def state_dict(self) -> dict[str, Any]:
        tensors: dict[str, Any] = dict(self.module.named_parameters())
        for prefix, module in self.module.named_modules():
            left_out = module._non_persistent_buffers_set
            tensors |= {
                name: buffer
                for name, buffer in module.named_buffers(prefix, recurse=False)
                if name.rpartition(".")[2] not in left_out
            }
        # Without the names of wrappers, such as that of activation checkpointing.
        return {canonical_fqn(name): tensor for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was loaded; tensors that were filled in place are there already."""
        own = self.state_dict()
        if differing := sorted(state.keys() ^ own.keys()):
            raise MismatchError(
                f"{len(differing)} tensors are in the checkpoint or in the model, and not in both: "
                f"{', '.join(differing[:_SHOWN])}. Run with the model, and the pipeline stages, "
                f"that were saved"
            )
        for name, tensor in own.items():
            if state[name] is not tensor:
                tensor.copy_(state[name])


class _TitanLoader:
    """A data loader; the values that torchtitan pickles in its state are saved as they are."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def state_dict(self) -> dict[str, Any]:
        own = self._dataloader.state_dict()
        packed = {key: pickle.loads(value) for key, value in own.items() if type(value) is bytes}
        return {"packed": packed, "plain": {k: own[k] for k in own.keys() - packed.keys()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Of values that were read without running code, so that the loader's own pickle.loads is
        # given nothing that comes from a file.
        packed = {key: pickle.dumps(value) for key, value in state["packed"].items()}
        self._dataloader.load_state_dict({**state["plain"], **packed})


def _check(config: LocalCheckpoint.Config) -> None:
    """Refuse options that make no sense, before anything is made."""
    if config.local is None and not config.memory:
        raise CheckpointingException(
            "LocalCheckpoint needs checkpoint.local, a directory on a disk of each node, or "
            "checkpoint.memory, to keep checkpoints in the nodes' memory"
        )
    if "shared" in config.options:
        raise CheckpointingException(
            "shared= is not for torchtitan, whose own checkpoints in checkpoint.folder are on "
            "shared storage: leave it out, and set checkpoint.interval"
        )
    taken = {"state", "local", "memory", "session_id"}
    if config.local_interval is not None:
        taken.add("every")
    known = inspect.signature(Checkpointer).parameters.keys() - taken
    if unknown := sorted(config.options.keys() - known):
        raise CheckpointingException(
            f"LocalCheckpoint does not know {', '.join(unknown)}: beside the fields of its Config "
            f"it takes the arguments of localckpt.Checkpointer"
        )
