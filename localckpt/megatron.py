"""Names of NVRx and Megatron-Core, under which programs that were written for them find ours.

Also the parts of torch.distributed.checkpoint that such programs call themselves. Those that every
program with a manager needs are in :mod:`localckpt`, too.
"""

# One list of names, which ruff would write as an import for each.
# ruff: noqa: I001

from __future__ import annotations

from localckpt import (
    AsyncCall as AsyncCall,
    AsyncCaller as AsyncCaller,
    AsyncCallsQueue as AsyncCallsQueue,
    AsyncRequest as AsyncRequest,
    BaseCheckpointManager as BaseCheckpointManager,
    BasicTensorAwareStateDict as BasicTensorAwareStateDict,
    CachedMetadataFileSystemReader as CachedMetadataFileSystemReader,
    CheckpointingException as CheckpointingException,
    CkptID as CkptID,
    CliqueReplicationStrategy as CliqueReplicationStrategy,
    ExchangePlan as ExchangePlan,
    FileSystemWriterAsync as FileSystemWriterAsync,
    GroupWrapper as GroupWrapper,
    LazyCliqueReplicationStrategy as LazyCliqueReplicationStrategy,
    LocalCheckpointManager as LocalCheckpointManager,
    NoReplicasAvailableError as NoReplicasAvailableError,
    PersistentAsyncCaller as PersistentAsyncCaller,
    ReplicationStrategy as ReplicationStrategy,
    ReshardingLoadPlanner as ReshardingLoadPlanner,
    SameMachineReplicationException as SameMachineReplicationException,
    TemporalAsyncCaller as TemporalAsyncCaller,
    TensorAwareStateDict as TensorAwareStateDict,
    ThreadAsyncCaller as ThreadAsyncCaller,
    parse_group_sequence as parse_group_sequence,
    save_state_dict_async_finalize as save_state_dict_async_finalize,
    save_state_dict_async_plan as save_state_dict_async_plan,
)
