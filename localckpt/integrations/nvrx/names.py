"""Table of NVRx's modules and names that this package replaces, with the home of each name."""

from __future__ import annotations

__all__ = ["CHECKPOINTING", "MODULES", "PACKAGE", "VERSION"]

PACKAGE = "nvidia_resiliency_ext"
CHECKPOINTING = f"{PACKAGE}.checkpointing"

VERSION = "0.6.0"
"""NVRx release with these names, as ``__version__`` for Megatron-Core."""

_OURS = "localckpt.integrations.nvrx"
_ERRORS = "localckpt.errors"
_PLAN = "localckpt.replication.exchange"
_STRATEGIES = "localckpt.replication.strategies"
_CALLERS = "localckpt.async_save.callers"

_BASE_MANAGER = {
    "BaseCheckpointManager": "localckpt.managers.local",
    "CheckpointingException": _ERRORS,
    "CkptID": "localckpt.ids",
    "SameMachineReplicationException": _ERRORS,
}
_GROUPS = {
    "ExchangePlan": _PLAN,
    "ExchangePlanEntry": _PLAN,
    "GroupWrapper": f"{_OURS}.groups",
    "ProcessGroupLike": f"{_OURS}.groups",
    "parse_group_sequence": "localckpt.replication.groups",
}
_STATE = {"TensorAwareStateDict": "localckpt.state_dict.basic"}

MODULES: dict[str, dict[str, str]] = {
    CHECKPOINTING: {},
    f"{CHECKPOINTING}.local": {},
    f"{CHECKPOINTING}.local.base_state_dict": _STATE,
    f"{CHECKPOINTING}.local.basic_state_dict": {
        "BasicTensorAwareStateDict": "localckpt.state_dict.basic",
        **_STATE,
    },
    f"{CHECKPOINTING}.local.ckpt_managers": {},
    f"{CHECKPOINTING}.local.ckpt_managers.base_manager": _BASE_MANAGER,
    f"{CHECKPOINTING}.local.ckpt_managers.local_manager": {
        "LocalCheckpointManager": f"{_OURS}.manager",
        **_BASE_MANAGER,
    },
    f"{CHECKPOINTING}.local.replication": {},
    f"{CHECKPOINTING}.local.replication.group_utils": _GROUPS,
    f"{CHECKPOINTING}.local.replication.strategies": {
        "CliqueReplicationStrategy": _STRATEGIES,
        "LazyCliqueReplicationStrategy": _STRATEGIES,
        "NoReplicasAvailableError": _ERRORS,
        "ReplicationStrategy": _STRATEGIES,
        **_GROUPS,
    },
    f"{CHECKPOINTING}.local.replication.utils": {"zip_strict": f"{_OURS}.groups"},
    f"{CHECKPOINTING}.async_ckpt": {},
    f"{CHECKPOINTING}.async_ckpt.core": {
        "AsyncCaller": _CALLERS,
        "AsyncCallsQueue": f"{_OURS}.queue",
        "AsyncRequest": "localckpt.async_save.request",
        "PersistentAsyncCaller": _CALLERS,
        "TemporalAsyncCaller": _CALLERS,
        "abort_nvrx_checkpoint": f"{_OURS}.queue",
    },
    f"{CHECKPOINTING}.async_ckpt.filesystem_async": {
        "FileSystemWriterAsync": f"{_OURS}.global_save",
        "_get_write_results_queue": f"{_OURS}.global_save",
        "_results_queue": f"{_OURS}.global_save",
        "get_write_results_queue": f"{_OURS}.global_save",
    },
    f"{CHECKPOINTING}.async_ckpt.state_dict_saver": {
        "CheckpointMetadataCache": f"{_OURS}.global_save",
        "save_state_dict_async_finalize": f"{_OURS}.global_save",
        "save_state_dict_async_plan": f"{_OURS}.global_save",
    },
    f"{CHECKPOINTING}.async_ckpt.cached_metadata_filesystem_reader": {
        "CachedMetadataFileSystemReader": f"{_OURS}.global_save",
    },
}
"""For each module of NVRx its names, and the module of localckpt that defines each."""
