"""Engines whose state cannot be saved rank by rank."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from localckpt.errors import CheckpointingException

__all__ = ["check_engine"]


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
