"""Names of NVRx and Megatron-Core, under which programs that were written for them find ours.

Also the parts of torch.distributed.checkpoint that such programs call themselves. Those that every
program with a manager needs are in :mod:`localckpt`, too.
"""

from __future__ import annotations

from localckpt import (
    AsyncCall,
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    BaseCheckpointManager,
    BasicTensorAwareStateDict,
    CachedMetadataFileSystemReader,
    CheckpointingException,
    CkptID,
    CliqueReplicationStrategy,
    ExchangePlan,
    FileSystemWriterAsync,
    GroupWrapper,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
    NoReplicasAvailableError,
    PersistentAsyncCaller,
    ReplicationStrategy,
    ReshardingLoadPlanner,
    SameMachineReplicationException,
    TemporalAsyncCaller,
    TensorAwareStateDict,
    ThreadAsyncCaller,
    parse_group_sequence,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

__all__ = [
    "AsyncCall",
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "BaseCheckpointManager",
    "BasicTensorAwareStateDict",
    "CachedMetadataFileSystemReader",
    "CheckpointingException",
    "CkptID",
    "CliqueReplicationStrategy",
    "ExchangePlan",
    "FileSystemWriterAsync",
    "GroupWrapper",
    "LazyCliqueReplicationStrategy",
    "LocalCheckpointManager",
    "NoReplicasAvailableError",
    "PersistentAsyncCaller",
    "ReplicationStrategy",
    "ReshardingLoadPlanner",
    "SameMachineReplicationException",
    "TemporalAsyncCaller",
    "TensorAwareStateDict",
    "ThreadAsyncCaller",
    "parse_group_sequence",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]
