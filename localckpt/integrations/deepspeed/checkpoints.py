"""Calls of DeepSpeed's engine that save to the nodes, and resume from them."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, SupportsFloat

from deepspeed.runtime.engine import DeepSpeedEngine

from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.checkpointer.resume import Elsewhere
from localckpt.checkpointer.stopping import StopRequests
from localckpt.errors import CheckpointingException
from localckpt.integrations.deepspeed.engine_state import CLASSES, EngineState, check_engine

logger = logging.getLogger(__name__)

# Name of the engine's part of the state, and of the directory for DeepSpeed in the rank's folder.
_OWN = "deepspeed"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_OWN_TAG = re.compile(r"global_step(\d+)(?:_universal)?")


def install(
    engine: DeepSpeedEngine,
    *,
    state: Mapping[str, Any] | None = None,
    stop_signals: Sequence[signal.Signals] = _STOP_SIGNALS,
    safe_globals: Iterable[Any] = (),
    **options: Any,
) -> LocalCheckpoints:
    """Have an engine's ``save_checkpoint`` and ``load_checkpoint`` use the nodes.

    All ranks call it, after ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Args:
        engine: What ``deepspeed.initialize`` returns first.
        state: More parts of the state by name, such as a data loader, as for
            :class:`localckpt.Checkpointer`. The model, the optimizer and the schedule are the
            engine's.
        stop_signals: Signals on any one rank that stop the job in order, from the first call of
            :meth:`LocalCheckpoints.step` on.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults and
            DeepSpeed's own.
        options: Other arguments of :class:`localckpt.Checkpointer`: at least ``local=`` or
            ``memory=True``.

    Returns:
        The engine's checkpoints, to be closed at the end.

    Raises:
        CheckpointingException: The arguments make no sense, or the engine keeps its state in a way
            that cannot be saved to the nodes; nothing was made.
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Copies that were asked for would be lost together with
            their originals.
    """
    check_engine(engine)
    if _OWN in (state or {}):
        raise CheckpointingException(
            f"the key {_OWN!r} of state= is that of the engine: give the part another name"
        )
    if options.get("finite"):
        raise CheckpointingException(
            "finite=True looks at the parameters of modules, and DeepSpeed gives its own states: "
            "judge their tensors by check="
        )
    return LocalCheckpoints(engine, state or {}, tuple(stop_signals), safe_globals, options)


class LocalCheckpoints:
    """The checkpoints of an engine on the nodes; made by :func:`install`.

    Attributes:
        checkpointer: The :class:`localckpt.Checkpointer` that keeps them.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        state: Mapping[str, Any],
        stop_signals: tuple[signal.Signals, ...],
        safe_globals: Iterable[Any],
        options: Mapping[str, Any],
    ) -> None:
        self._engine = engine
        self._part = EngineState(engine)
        self._signals = stop_signals
        self._stop_requests: StopRequests | None = None
        self._stop_when: Callable[[], str | None] | None = options.get("stop_when")
        # Step of the last call that came between two steps; None before load_checkpoint.
        self._last_step: int | None = None
        self._is_closed = False
        self.checkpointer = Checkpointer(
            {_OWN: self._part, **state},
            safe_globals=(*CLASSES, *safe_globals),
            # A loop may be left while gradients are accumulated, which are not saved.
            **{"save_last": False, **options},
            stop_signals=(),
            stop_when=self._why_stop,
        )
        try:
            self._part.open(self.checkpointer.manager.store.folder / _OWN)
        except BaseException as error:
            self.checkpointer.__exit__(type(error), error, error.__traceback__)
            raise
        engine.save_checkpoint = self.save_checkpoint
        engine.load_checkpoint = self.load_checkpoint

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from the newest checkpoint, on the nodes or DeepSpeed's own in ``load_dir``.

        It stands in for the engine's method, with the same arguments and result; all ranks call it,
        once, before the first step. Of DeepSpeed's own checkpoints those with a tag such as
        ``global_step100`` are known to be newer; any is loaded if there is none on the nodes. A
        call that asks for a part of the state only, to begin a run from other weights, always is
        DeepSpeed's own.

        Raises:
            CheckpointingException: A checkpoint was found on the nodes, and its tag is not the
                one that was asked for. Or training has begun.
            MismatchError, NoReplicasAvailableError, PeerLostError: As for
                :meth:`localckpt.Checkpointer.resume`.
        """
        arguments = (
            *(load_module_strict, load_optimizer_states, load_lr_scheduler_states),
            *(load_module_only, custom_load_fn),
        )
        if arguments[1:] != (True, True, False, None):
            loaded: tuple[str | None, dict[str, Any] | None]
            loaded = self._part.own_load(load_dir, tag, *arguments)
            return loaded
        if self._last_step not in (None, self._engine.global_steps):
            raise CheckpointingException(
                "load_checkpoint was called while training: to go back, end the job and start it "
                "again. Nothing was loaded"
            )
        owns: list[tuple[str | None, dict[str, Any] | None]] = []

        def load_own() -> None:
            owns.append(self._part.own_load(load_dir, tag, *arguments))

        is_universal = self._engine.load_universal_checkpoint()
        step = _step_of_own(load_dir, tag, "latest_universal" if is_universal else "latest")
        elsewhere = None if step is None else Elsewhere(step, load_own)
        if self.checkpointer.resume(elsewhere) == 0:
            load_own()
        if owns:
            loaded = owns[0]
        else:
            found = self._part.tag
            if tag is not None and str(tag) != found:
                raise CheckpointingException(
                    f"the newest checkpoint of this run on the nodes has the tag {found!r}, and "
                    f"load_checkpoint was given tag={tag!r}: leave the tag out to go on from the "
                    f"newest checkpoint, or give install() another session_id to begin a new run "
                    f"from {os.path.join(load_dir, str(tag))}"
                )
            name, client_state = self._part.take_loaded(load_module_strict)
            self.checkpointer.rewind_random()
            loaded = os.path.join(load_dir, found, name), client_state
        self._last_step = self._engine.global_steps
        return loaded

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save to the nodes, behind training; all ranks call it between two steps.

        It stands in for the engine's method. Nothing is written to ``save_dir``, and the state is
        whole, also where ``exclude_frozen_parameters`` is asked for.

        Raises:
            CheckpointingException: ``engine.load_checkpoint`` was not called before; gradients are
                being accumulated; or as for :meth:`localckpt.Checkpointer.save`.
        """
        self._require_loaded("engine.save_checkpoint")
        engine = self._engine
        if self._part.is_accumulating:
            raise CheckpointingException(
                f"engine.save_checkpoint was called after micro-step {engine.micro_steps}, with "
                f"{engine.gradient_accumulation_steps()} to a step: accumulated gradients are not "
                f"saved. Call it at a boundary, after engine.global_steps has grown. Nothing was "
                f"saved"
            )
        step = engine.global_steps
        tag = f"global_step{step}" if tag is None else str(tag)
        if self._part.saved_step == step:
            logger.warning(
                "step %d is saved, with the tag %r; the nodes keep one checkpoint of a step, and "
                "that with the tag %r was left out",
                *(step, self._part.tag, tag),
            )
            return True
        with self._part.labelled(tag, client_state or {}):
            if step != self._last_step:
                self._last_step = step
                self.checkpointer.step(step)
            self.checkpointer.save(step)
        return True

    def step(
        self,
        client_state: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> bool:
        """Note the end of a step, and save if it is time; all ranks call it after ``engine.step``.

        Call it in every micro-step: those within a step of the optimizer are left out. It takes the
        place of ``engine.save_checkpoint``, whose cadence is then ``every=`` of :func:`install`.

        Args:
            client_state: What ``load_checkpoint`` is to return beside DeepSpeed's own values.
            metrics: As for :meth:`localckpt.Checkpointer.step`.

        Returns:
            Whether the job is to stop: some rank was asked to. The state of this step is then safe,
            or the log says what is not.

        Raises:
            CheckpointingException: ``engine.load_checkpoint`` was not called before; or as for
                :meth:`localckpt.Checkpointer.step`.
        """
        self._require_loaded("step()")
        if self._stop_requests is None:
            # Not before: who never calls step() would not learn of a signal that is caught here.
            take_back = self.checkpointer.manager.take_back_attempt
            self._stop_requests = StopRequests(self._signals, None, None, lambda _: take_back())
        step = self._engine.global_steps
        if step == self._last_step or self._part.is_accumulating:
            return self.checkpointer.stopped is not None
        self._last_step = step
        with self._part.labelled(f"global_step{step}", client_state or {}):
            return self.checkpointer.step(step, metrics=metrics)

    def export(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Save to ``save_dir`` in DeepSpeed's own form, as ``engine.save_checkpoint`` did before.

        The arguments are those of that method; all ranks call it.
        """
        self._part.own_save(save_dir, tag, dict(client_state or {}), **options)

    def close(self) -> None:
        """Finish the saves under way, and give the engine its own methods back; all ranks call it.

        It may be called twice.

        Raises:
            CheckpointingException: As for :meth:`localckpt.Checkpointer.close`.
        """
        try:
            self.checkpointer.close()
        finally:
            self._uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.checkpointer.__exit__(*error)
        finally:
            self._uninstall()

    def _uninstall(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._stop_requests is not None:
            self._stop_requests.close()
        del self._engine.save_checkpoint, self._engine.load_checkpoint
        self._part.close()

    def _why_stop(self) -> str | None:
        received = None if self._stop_requests is None else self._stop_requests.why()
        return received or (None if self._stop_when is None else self._stop_when())

    def _require_loaded(self, what: str) -> None:
        if self._is_closed:
            raise CheckpointingException("the checkpoints of this engine are closed: install anew")
        if self._last_step is None:
            raise CheckpointingException(
                f"call engine.load_checkpoint(load_dir) once before {what}, also for a new run: "
                f"what is saved would else overrule the checkpoints that are there. A call with "
                f"load_module_only=True and the like loads from load_dir, and does not count. "
                f"Nothing was saved"
            )


def _step_of_own(load_dir: str | os.PathLike[str], tag: str | None, latest: str) -> int | None:
    """Return the step of DeepSpeed's own checkpoint, 0 if its tag does not say it.

    Returns ``None`` if there is no such checkpoint. ``latest`` is the name of the file that tells
    the latest.
    """
    folder = Path(load_dir)
    if tag is None and (folder / latest).is_file():
        tag = (folder / latest).read_text().strip()
    if tag is None or not (folder / str(tag)).is_dir():
        return None
    numbered = _OWN_TAG.fullmatch(str(tag))
    return 0 if numbered is None else int(numbered[1])
