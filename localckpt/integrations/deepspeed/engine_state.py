"""State of an engine as DeepSpeed's own code makes it, and takes it back."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from localckpt.errors import CheckpointingException
from localckpt.state_dict.stateful import Freedom

CLASSES = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""What DeepSpeed's states are made of, beside tensors and plain values."""

# DeepSpeed gets it in place of the caller's tag, which may be no name of a directory.
_TAG = "checkpoint"
# Part of a file's name that tells the tensor-parallel rank.
_MP_RANK = re.compile(r"mp_rank_\d+")


class EngineState:
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

    @property
    def is_accumulating(self) -> bool:
        """Whether the engine has gradients of a part of a step."""
        engine = self._engine
        # None as long as DeepSpeed counts the micro-steps itself. It has no public name.
        if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
            return False
        is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
        return is_managed and engine.micro_steps % engine.gradient_accumulation_steps() != 0

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

    @property
    def freedom(self) -> Freedom:
        """All values but those of the module; all ranks ask in the same step."""
        files = self.state_dict()["files"].items()
        of_files = {
            f"files.{name}.{key}"
            for name, content in files
            if isinstance(content, Mapping)
            for key in content
            if key != "module"
        }
        return Freedom(frozenset({"tag", "micro_steps", *of_files}))

    def state_dict(self) -> dict[str, Any]:
        """Return the files that DeepSpeed would write; all ranks do so in the same step."""
        files = MemoryFiles()
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Note what was loaded, for DeepSpeed to take once no rank can fail any more."""
        self._loaded = state
        self.tag = state["tag"]

    def take_loaded(self, is_strict: bool) -> tuple[str, dict[str, Any]]:
        """Have DeepSpeed take what was loaded; all ranks do so.

        Returns the name of the file with the model's state, and the client state.
        """
        state, self._loaded = self._loaded, None
        assert state is not None, "a checkpoint was loaded"
        files = MemoryFiles(state["files"])
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
    def _using(self, files: MemoryFiles) -> Iterator[None]:
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


def check_engine(engine: Any) -> None:
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


class MemoryFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine whose files are values in memory, this rank's own.

    ``files`` has the values to load by name of file.

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
        """Return the value of a file, with the tensors where they are."""
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
