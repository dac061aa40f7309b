"""Ray Train's ``TorchTrainer`` with local checkpoints: a :class:`Checkpointer` for its workers.

Shards stay on the nodes. Ray Train is given references to them, which keep its own record of
checkpoints in order, and no bytes.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import xxhash

from localckpt.checkpointer.checkpointer import Checkpointer
from localckpt.checkpointer.resume import Elsewhere
from localckpt.errors import CheckpointingException, NoReplicasAvailableError
from localckpt.integrations.versions import at_least
from localckpt.storage.names import local_path

with at_least("ray"):
    import ray.train

logger = logging.getLogger(__name__)

_METADATA_KEY = "localckpt"


@dataclass(frozen=True, slots=True)
class Reference:
    """Content of a ``ray.train.Checkpoint`` that :meth:`RayCheckpointer.report` has made.

    Attributes:
        session_id: Name of the training run.
        step: Step of the checkpoint that was the newest on the nodes.
        world_size: Number of workers that saved it.
        local: Directory on the nodes; ``None`` for the default one in their memory.
        shared: Directory on shared storage, where checkpoints of other steps may be; ``None`` for
            none.
    """

    session_id: str
    step: int
    world_size: int
    local: str | None
    shared: str | None

    @classmethod
    def of(cls, checkpoint: ray.train.Checkpoint) -> Reference | None:
        """Read a checkpoint of Ray Train's; ``None`` if it is not a reference."""
        found = checkpoint.get_metadata().get(_METADATA_KEY)
        return None if found is None else cls(**{f.name: found[f.name] for f in fields(cls)})


class RayCheckpointer(Checkpointer):
    """A :class:`Checkpointer` for the function that ``TorchTrainer`` runs in each worker.

    It is made, and used, as any other one. A run that Ray Train starts again, because a worker or
    a node was lost, goes on from the newest checkpoint, whichever nodes the workers are on then.

    Args:
        state: As for :class:`Checkpointer`.
        session_id: Name of the training run; ``None`` for that of Ray's (``RunConfig(name=...)``).
        stop_signals: Empty by default, because Ray Train runs the function in a thread, which no
            signal can reach.
        options: Other arguments of :class:`Checkpointer`: at least ``local=`` or ``memory=True``.
            Directories are absolute.

    Raises:
        CheckpointingException: It was not made in a worker of Ray Train, a directory is not
            absolute, or the arguments make no sense; nothing was made.
        StorageError: As for :class:`Checkpointer`.
        SameMachineReplicationException: As for :class:`Checkpointer`.
    """

    def __init__(
        self,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stop_signals: Sequence[signal.Signals] = (),
        **options: Any,
    ) -> None:
        try:
            context = ray.train.get_context()
        except RuntimeError as error:
            raise CheckpointingException(
                f"RayCheckpointer is made in the function that TorchTrainer runs in each worker, "
                f"and this is none of Ray Train's ({error}). Elsewhere use localckpt.Checkpointer"
            ) from error
        for name in ("local", "shared"):
            _require_absolute(name, options.get(name))
        if session_id is None:
            session_id = context.get_experiment_name()
        self._reference: dict[str, Any] = {
            "session_id": session_id,
            "world_size": context.get_world_size(),
            "local": _text(options.get("local")),
            "shared": _text(options.get("shared")),
        }
        # Of one name for the run, so that each start finds what one that was killed has left. No
        # worker reports before all of them are made.
        self._folder = _report_folder(session_id)
        if context.get_local_rank() == 0 and self._folder.exists():
            shutil.rmtree(self._folder)
        self._is_first = context.get_world_rank() == 0
        self._reported: int | None = None
        super().__init__(state, session_id=session_id, stop_signals=stop_signals, **options)

    def resume(self, elsewhere: Elsewhere | None = None, **options: Any) -> int:
        """Load the newest checkpoint that can be had, in place; all workers call it.

        Args:
            elsewhere, options: As for :meth:`Checkpointer.resume`.

        Returns:
            The next step: 0 if there is no checkpoint.

        Raises:
            NoReplicasAvailableError: There is none, although Ray Train was told of one of this run:
                nothing is started over by itself. Or as for :meth:`Checkpointer.resume`.
            MismatchError: As for :meth:`Checkpointer.resume`; also where an elastic run comes back
                with another number of workers, and parts of the state belong to single ones.
            PeerLostError: As for :meth:`Checkpointer.resume`.
        """
        step = super().resume(elsewhere, **options)
        if options.get("step") is not None:
            return step
        known = self._ranks.decide("read what Ray Train was told", self._known_step, _first)
        if known < step:
            return step
        if step > 0:
            logger.warning(
                "Ray Train was told of step %d, and the newest checkpoint that the nodes of these "
                "workers, or shared storage, have is that of step %d",
                *(known, step - 1),
            )
            return step
        raise NoReplicasAvailableError(
            f"Ray Train was told of a checkpoint of step {known}, and neither the nodes of these "
            f"workers nor shared storage have one of session {self._reference['session_id']!r}: "
            f"the workers are on other nodes than before, or the directories were emptied. Nothing "
            f"was started over. Have Ray place the workers on the nodes that have checkpoints, or "
            f"give shared=; to start from the beginning, give another session_id or "
            f"RunConfig(name=...)"
        )

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Call ``ray.train.report``, with a reference to the newest checkpoint on the nodes.

        All workers call it in the same step. It saves nothing and waits for no save: without a
        checkpoint that is newer than that of the report before, metrics alone are reported.

        Args:
            metrics: Numbers to report; those of the first worker count.

        Raises:
            CheckpointingException: The checkpointer is closed.
        """
        self._require_open()
        newest = self.newest
        is_new, self._reported = newest != self._reported, newest
        if newest is None or not is_new or not self._is_first:
            ray.train.report(dict(metrics))
            return
        self._folder.mkdir(mode=0o700)
        try:
            checkpoint = ray.train.Checkpoint.from_directory(self._folder)
            reference = Reference(step=newest, **self._reference)
            checkpoint.set_metadata({_METADATA_KEY: asdict(reference)})
            # Ray Train copies the folder to its storage before the call returns.
            ray.train.report(dict(metrics), checkpoint=checkpoint)
        finally:
            shutil.rmtree(self._folder)

    def _known_step(self) -> int:
        """Step of this run that Ray Train was last told of, on the first worker; -1 for none."""
        checkpoint = ray.train.get_checkpoint() if self._is_first else None
        reference = None if checkpoint is None else Reference.of(checkpoint)
        if reference is None or reference.session_id != self._reference["session_id"]:
            return -1
        return reference.step


def _report_folder(session_id: str) -> Path:
    """Return the path of the folder that the first worker of a run hands to Ray Train."""
    run = xxhash.xxh3_64_hexdigest(session_id.encode())
    return Path(tempfile.gettempdir(), f"localckpt-report-{os.getuid()}-{run}")


def _first(steps: list[int]) -> int:
    return steps[0]


def _require_absolute(name: str, path: str | os.PathLike[str] | None) -> None:
    if path is not None and local_path(path) != Path(path):
        raise CheckpointingException(
            f"{name}={os.fspath(path)!r} is not absolute: Ray Train runs the workers in a "
            f"directory that goes with its session, and checkpoints there would go with it. Give "
            f"the whole path. Nothing was made"
        )


def _text(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)
