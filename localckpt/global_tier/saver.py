"""The two ends of an asynchronous save of torch.distributed.checkpoint: planning, and finishing.

Between them the writer's function runs behind training, in whatever queue the job has. The names
and the order of the arguments are those of Megatron-Core and NVRx.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from localckpt.errors import CheckpointingException
from localckpt.global_tier.planning import Written, plan_save
from localckpt.global_tier.rounds import Meeting
from localckpt.global_tier.writer import FileSystemWriterAsync

__all__ = ["save_state_dict_async_finalize", "save_state_dict_async_plan"]


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    *,
    timeout_s: float = 300.0,
) -> tuple[FileSystemWriterAsync, Metadata | None, Meeting]:
    """Plan a save and prepare this rank's part of it; all ranks call it.

    With a writer that has saved before, and is turned to its next checkpoint by ``reset``, nothing
    is planned again unless some rank's structure changed.

    Args:
        state_dict: This rank's state; values may be ``Stateful``.
        storage_writer: Writes it.
        process_group: The ranks that save; ``None`` for all.
        coordinator_rank: Which of them writes the metadata.
        planner: Made for this save; torch's default one by default.
        timeout_s: How long the ranks wait for each other, in seconds.

    Returns:
        What :func:`save_state_dict_async_finalize` is to be called with: the writer, the metadata
        on the coordinator, and the ranks.

    Raises:
        CheckpointingException: It failed on some rank; the same on every rank. What fails after the
            ranks have agreed is raised when the save is finalized.
    """
    if not isinstance(storage_writer, FileSystemWriterAsync):
        raise CheckpointingException(
            f"storage_writer is a {type(storage_writer).__name__}; it must be localckpt's "
            f"FileSystemWriterAsync"
        )
    planner = planner or DefaultSavePlanner()
    meeting = Meeting("global save", process_group, coordinator_rank, timeout_s)
    save = plan_save(
        meeting,
        state_dict,
        planner,
        storage_writer,
        tag=str(storage_writer.path),
        word=lambda: storage_writer.save_id,
        prepare=storage_writer.prepare_local_plan,
    )
    storage_writer.save_id = save.word
    try:
        storage_writer.prepare_write_data(planner.finish_plan(save.plan), planner)
    except Exception as error:  # noqa: BLE001 - raised on every rank when it is finalized
        storage_writer.give_up(error)
    return storage_writer, save.metadata, meeting


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: Meeting
) -> None:
    """Make a checkpoint of what all ranks have written; all ranks call it when theirs is done.

    Args:
        storage_writer, global_metadata, dist_wrapper: What :func:`save_state_dict_async_plan` gave.

    Raises:
        CheckpointingException: Writing failed on some rank; the same on every rank, with its text.
        PeerLostError: Some rank did not come in time.
    """

    plans = storage_writer.plans

    def answer(said: list[bytes]) -> list[bytes]:
        assert global_metadata is not None, "the coordinator has planned"
        written, _ = plans.hear_written(said)
        results = [storage_writer.named(part.results) for part in written]
        storage_writer.finish(global_metadata, results)
        return [b""]

    try:
        with plans.kept_if_all_is_well():
            dist_wrapper.hold(
                f"finish the checkpoint {storage_writer.path}",
                lambda: plans.say_written(Written(storage_writer.retrieve_unnamed_results(), {})),
                answer,
                name=f"finish {storage_writer.save_id}",
            )
    except BaseException as error:
        storage_writer.give_up(error)
        raise
