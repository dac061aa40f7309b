"""DeepSpeed's engine with local checkpoints: its own calls save to the nodes, and resume from them.

What ``save_checkpoint`` would write to several files is one shard of the rank, captured in the call
and saved behind training. ``load_checkpoint`` is given the files of the newest complete checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.checkpointer.elsewhere import Elsewhere
from localckpt.checkpointer.stopping import StopRequests
from localckpt.errors import CheckpointingException
from localckpt.integrations.versions import at_least

with at_least("deepspeed"):
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

__all__ = ["LocalCheckpointEngine", "LocalCheckpoints", "install"]

logger = logging.getLogger(__name__)

# Name of the engine's part of the state, and of the directory for DeepSpeed in the rank's folder.
_OWN = "deepspeed"
# DeepSpeed gets it in place of the caller's tag, which may be no name of a directory.
_TAG = "checkpoint"
# What DeepSpeed's states are made of, beside tensors and plain values.
_CLASSES = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_OWN_TAG = re.compile(r"global_step(\d+)(?:_universal)?")
_MP_RANK = re.compile(r"mp_rank_\d+")


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
    _check_engine(engine)
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
        self._part = _EngineState(engine)
        self._signals = stop_signals
        self._stop_requests: StopRequests | None = None
        self._stop_when: Callable[[], str | None] | None = options.get("stop_when")
        # Step of the last call that came between two steps; None before load_checkpoint.
        self._last_step: int | None = None
        self._is_closed = False
        self.checkpointer = Checkpointer(
            {_OWN: self._part, **state},
            safe_globals=(*_CLASSES, *safe_globals),
            **{**options, "stop_signals": (), "stop_when": self._why_stop},
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

        step = self._part.own_step(load_dir, tag)
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
        if _is_accumulating(engine):
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
        if step == self._last_step or _is_accumulating(self._engine):
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            self.checkpointer.__exit__(kind, error, where)
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


class LocalCheckpointEngine(CheckpointEngine):
    """DeepSpeed's checkpoint engine whose files are values in memory, this rank's own.

    Args:
        files: Values by name of file, to load; none to save.

    Attributes:
        files: Values by name of file.
    """

    def __init__(self, files: Mapping[str, Any] | None = None) -> None:
        super().__init__(None)
        self.name = type(self).__name__
        self.files = dict(files or {})

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        self.files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make no directory: there are no files."""

    def save(self, state_dict: Any, path: str) -> None:
        """Take the value of a file. Its tensors may change once the checkpoint is committed."""
        self.files[os.path.basename(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the value of a file, with the tensors where they are.

        Raises:
            CheckpointingException: This rank has saved no such file.
        """
        name = os.path.basename(path)
        # DeepSpeed looks into the first file of all tensor-parallel ranks, to count them.
        alike = {_MP_RANK.sub("", own): own for own in self.files if "model_states" in own}
        name = name if name in self.files else alike.get(_MP_RANK.sub("", name), name)
        if name not in self.files:
            raise CheckpointingException(
                f"DeepSpeed asks for {name}, and this rank has saved {', '.join(self.files)}: make "
                f"the engine with the configuration that it was saved with"
            )
        return self.files[name]

    def commit(self, info: Any) -> bool:
        """Say that all files are there."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return ``True``: a rank finds all that it loads in its own shard."""
        return True

    def is_decoupled(self) -> bool:
        """Return ``True``: no file says which checkpoint is the latest."""
        return True

    def set_commit_info(self, info: Any) -> None:
        """Note nothing: there is no checkpoint to commit later."""

    def get_commit_info(self) -> None:
        """Return ``None``, for DeepSpeed to commit none before its next step."""

    def preserves_storage_sharing(self) -> bool:
        """Return ``False``: of a view its own bytes are saved, so DeepSpeed need not copy it."""
        return False

    def cleanup(self) -> None:
        """Let go of the values."""
        self.files = {}


class _EngineState:
    """State of an engine, as DeepSpeed saves and loads it: a part of a :class:`Checkpointer`'s.

    Attributes:
        own_save, own_load: The engine's own methods.
        tag: Tag of the checkpoint that was saved or loaded last.
        saved_step: Its step; ``None`` for none.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.own_save: Callable[..., Any] = engine.save_checkpoint
        self.own_load: Callable[..., Any] = engine.load_checkpoint
        self.tag = ""
        self.saved_step: int | None = None
        self._client_state: Mapping[str, Any] = {}
        self._loaded: Mapping[str, Any] | None = None
        # DeepSpeed copies scripts into the directory of a checkpoint, and asks whether its files
        # are there before it has its engine load them.
        self._scratch = Path()

    def open(self, scratch: Path) -> None:
        """Make the directory for DeepSpeed anew, in the folder that this rank has claimed."""
        self._scratch = scratch
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._scratch)

    @contextmanager
    def labelled(self, tag: str, client_state: Mapping[str, Any]) -> Iterator[None]:
        """Have what is saved inside of the ``with`` carry a tag and a client state."""
        before, self.tag, self._client_state = self.tag, tag, client_state
        try:
            yield
        finally:
            self._client_state = {}
            if self.saved_step != self._engine.global_steps:
                self.tag = before

    def state_dict(self) -> dict[str, Any]:
        """Return the files that DeepSpeed would write; all ranks do so in the same step."""
        files = LocalCheckpointEngine()
        with self._using(files):
            client_state = dict(self._client_state)
            self.own_save(str(self._scratch), _TAG, client_state=client_state, save_latest=False)
        self.saved_step = self._engine.global_steps
        return {
            "tag": self.tag,
            # DeepSpeed does not save it, and finds the boundaries by it.
            "micro_steps": self._engine.micro_steps,
            "files": files.files,
        }

    def own_step(self, load_dir: str | os.PathLike[str], tag: str | None) -> int | None:
        """Return the step of DeepSpeed's own checkpoint, 0 if its tag does not say it.

        Args:
            load_dir: Directory of such checkpoints.
            tag: Tag of one; ``None`` for the latest.

        Returns:
            The step; ``None`` if there is no such checkpoint.
        """
        is_universal = self._engine.load_universal_checkpoint()
        latest = Path(load_dir) / ("latest_universal" if is_universal else "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        if tag is None or not (Path(load_dir) / str(tag)).is_dir():
            return None
        numbered = _OWN_TAG.fullmatch(str(tag))
        return 0 if numbered is None else int(numbered[1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Note what was loaded, for DeepSpeed to take once no rank can fail any more."""
        self._loaded = state
        self.tag = state["tag"]

    def take_loaded(self, is_strict: bool) -> tuple[str, dict[str, Any]]:
        """Have DeepSpeed take what was loaded; all ranks do so.

        Returns:
            The name of the file with the model's state, and the client state.
        """
        state, self._loaded = self._loaded, None
        assert state is not None, "a checkpoint was loaded"
        files = LocalCheckpointEngine(state["files"])
        folder = self._scratch / _TAG
        folder.mkdir()
        for name in files.files:
            for rank in range(self._engine.mp_world_size):
                (folder / _MP_RANK.sub(f"mp_rank_{rank:02d}", name)).touch()
        try:
            with self._using(files):
                path, client_state = self.own_load(str(self._scratch), _TAG, is_strict)
        finally:
            shutil.rmtree(folder)
        self._engine.micro_steps = state["micro_steps"]
        self.saved_step = self._engine.global_steps
        return os.path.basename(path), client_state

    @contextmanager
    def _using(self, files: LocalCheckpointEngine) -> Iterator[None]:
        """Have the engine save all of this rank's state to ``files``, or load it from there."""
        engine = self._engine
        is_partitioned = hasattr(engine.optimizer, "dp_process_group")
        changed = {
            "checkpoint_engine": files,
            "save_non_zero_checkpoint": True,
            "save_zero_checkpoint": is_partitioned,
            # A run that began from such a checkpoint goes on from one that is none.
            "load_universal_checkpoint": lambda: False,
        }
        before = {name: vars(engine)[name] for name in changed if name in vars(engine)}
        vars(engine).update(changed)
        try:
            yield
        finally:
            for name in changed:
                del vars(engine)[name]
            vars(engine).update(before)


def _is_accumulating(engine: DeepSpeedEngine) -> bool:
    """Return whether the engine has gradients of a part of a step."""
    # None as long as DeepSpeed counts the micro-steps itself. It has no public name.
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
        return False
    is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    return is_managed and engine.micro_steps % engine.gradient_accumulation_steps() != 0


def _check_engine(engine: Any) -> None:
    """Raise CheckpointingException if an engine's state cannot be saved rank by rank."""
    if not isinstance(engine, DeepSpeedEngine):
        raise CheckpointingException(
            f"install() was given a {type(engine).__name__}: give it the engine, which is what "
            f"deepspeed.initialize returns first"
        )
    if "save_checkpoint" in vars(engine):
        raise CheckpointingException(
            "the engine's save_checkpoint was replaced before: install() once, or close() what was "
            "installed first"
        )
    offloads = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    why = None
    if isinstance(engine, PipelineEngine):
        why = "a pipeline's ranks each write a part of the layers that others load"
    elif engine.has_moe_layers:
        why = "of a model with experts only the first rank writes what all others load"
    elif any(offload is not None and offload.device == "nvme" for offload in offloads):
        why = "with offload to NVMe the state is in files of DeepSpeed's"
    elif engine.zero_elastic_checkpoint():
        why = "with elastic_checkpoint each rank loads the files of all others"
    if why is not None:
        raise CheckpointingException(
            f"this engine cannot be saved to the nodes: {why}. Leave install() out, or change the "
            f"configuration. Nothing was made"
        )
