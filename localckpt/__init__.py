"""Node-local, replicated checkpoints for PyTorch training.

Public names are loaded when first used, so a process that only writes a buffer to disk does not
import torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if sys.platform != "linux":
    raise ImportError(f"localckpt runs on Linux only, and this is {sys.platform}")

if TYPE_CHECKING:
    from localckpt.async_save.callers import AsyncCaller as AsyncCaller
    from localckpt.async_save.callers import PersistentAsyncCaller as PersistentAsyncCaller
    from localckpt.async_save.callers import TemporalAsyncCaller as TemporalAsyncCaller
    from localckpt.async_save.callers import ThreadAsyncCaller as ThreadAsyncCaller
    from localckpt.async_save.queue import AsyncCallsQueue as AsyncCallsQueue
    from localckpt.async_save.request import AsyncCall as AsyncCall
    from localckpt.async_save.request import AsyncRequest as AsyncRequest
    from localckpt.availability.explanation import Explanation as Explanation
    from localckpt.availability.retention import Best as Best
    from localckpt.availability.retention import Retention as Retention
    from localckpt.checkpointer.cadence import Every as Every
    from localckpt.checkpointer.checkpointer import Checkpointer as Checkpointer
    from localckpt.checkpointer.parts import Values as Values
    from localckpt.checkpointer.resume import Elsewhere as Elsewhere
    from localckpt.checkpointer.resume import Rejoined as Rejoined
    from localckpt.checkpointer.workers import worker_init_fn as worker_init_fn
    from localckpt.cli.opened import SavedCheckpoint as SavedCheckpoint
    from localckpt.cli.opened import open_checkpoint as open_checkpoint
    from localckpt.cli.survival import Scheme as Scheme
    from localckpt.cli.survival import Survival as Survival
    from localckpt.cli.survival import survivability as survivability
    from localckpt.errors import AbortedError as AbortedError
    from localckpt.errors import CheckpointingException as CheckpointingException
    from localckpt.errors import CorruptShardError as CorruptShardError
    from localckpt.errors import DivergenceError as DivergenceError
    from localckpt.errors import FormatVersionError as FormatVersionError
    from localckpt.errors import MismatchError as MismatchError
    from localckpt.errors import NoReplicasAvailableError as NoReplicasAvailableError
    from localckpt.errors import PeerLostError as PeerLostError
    from localckpt.errors import RestoreError as RestoreError
    from localckpt.errors import (
        SameMachineReplicationException as SameMachineReplicationException,
    )
    from localckpt.errors import SaveFailedError as SaveFailedError
    from localckpt.errors import StorageError as StorageError
    from localckpt.errors import UnsafeGlobalError as UnsafeGlobalError
    from localckpt.errors import WorkerDiedError as WorkerDiedError
    from localckpt.global_tier.load import ReshardingLoadPlanner as ReshardingLoadPlanner
    from localckpt.global_tier.manager import GlobalCheckpointManager as GlobalCheckpointManager
    from localckpt.global_tier.storage_reader import (
        CachedMetadataFileSystemReader as CachedMetadataFileSystemReader,
    )
    from localckpt.global_tier.storage_writer import FileSystemWriterAsync as FileSystemWriterAsync
    from localckpt.global_tier.storage_writer import (
        save_state_dict_async_finalize as save_state_dict_async_finalize,
    )
    from localckpt.global_tier.storage_writer import (
        save_state_dict_async_plan as save_state_dict_async_plan,
    )
    from localckpt.ids import CkptID as CkptID
    from localckpt.lineage import Lineage as Lineage
    from localckpt.managers.local import BaseCheckpointManager as BaseCheckpointManager
    from localckpt.managers.local import InMemoryCheckpointManager as InMemoryCheckpointManager
    from localckpt.managers.local import LocalCheckpointManager as LocalCheckpointManager
    from localckpt.managers.manager import CheckpointManager as CheckpointManager
    from localckpt.managers.replica_check import replicated as replicated
    from localckpt.parity.strategy import ParityReplicationStrategy as ParityReplicationStrategy
    from localckpt.replication.exchange import ExchangePlan as ExchangePlan
    from localckpt.replication.groups import GroupWrapper as GroupWrapper
    from localckpt.replication.groups import parse_group_sequence as parse_group_sequence
    from localckpt.replication.strategies import (
        CliqueReplicationStrategy as CliqueReplicationStrategy,
    )
    from localckpt.replication.strategies import (
        LazyCliqueReplicationStrategy as LazyCliqueReplicationStrategy,
    )
    from localckpt.replication.strategies import ReplicationStrategy as ReplicationStrategy
    from localckpt.spare import Spare as Spare
    from localckpt.state_dict.basic import BasicTensorAwareStateDict as BasicTensorAwareStateDict
    from localckpt.state_dict.basic import TensorAwareStateDict as TensorAwareStateDict

__version__ = "0.1.0"

# Names by the module that defines them.
_PUBLIC = {
    "async_save.queue": "AsyncCallsQueue",
    "async_save.request": "AsyncRequest",
    "availability.explanation": "Explanation",
    "availability.retention": "Best Retention",
    "checkpointer.cadence": "Every",
    "checkpointer.checkpointer": "Checkpointer",
    "checkpointer.resume": "Elsewhere Rejoined",
    "checkpointer.parts": "Values",
    "checkpointer.workers": "worker_init_fn",
    "cli.opened": "open_checkpoint SavedCheckpoint",
    "errors": (
        "AbortedError CheckpointingException CorruptShardError DivergenceError "
        "FormatVersionError MismatchError NoReplicasAvailableError PeerLostError RestoreError "
        "SameMachineReplicationException SaveFailedError StorageError UnsafeGlobalError "
        "WorkerDiedError"
    ),
    "global_tier.manager": "GlobalCheckpointManager",
    "ids": "CkptID",
    "lineage": "Lineage",
    "managers.local": "BaseCheckpointManager InMemoryCheckpointManager LocalCheckpointManager",
    "managers.manager": "CheckpointManager",
    "managers.replica_check": "replicated",
    "parity.strategy": "ParityReplicationStrategy",
    "replication.strategies": (
        "CliqueReplicationStrategy LazyCliqueReplicationStrategy ReplicationStrategy"
    ),
    "spare": "Spare",
}
# Of localckpt.megatron, and of the calculator of losses, for code that imports them from here.
_BESIDE = {
    "async_save.callers": "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller ThreadAsyncCaller",
    "async_save.request": "AsyncCall",
    "cli.survival": "Scheme survivability Survival",
    "global_tier.load": "ReshardingLoadPlanner",
    "global_tier.storage_reader": "CachedMetadataFileSystemReader",
    "global_tier.storage_writer": (
        "FileSystemWriterAsync save_state_dict_async_finalize save_state_dict_async_plan"
    ),
    "replication.exchange": "ExchangePlan",
    "replication.groups": "GroupWrapper parse_group_sequence",
    "state_dict.basic": "BasicTensorAwareStateDict TensorAwareStateDict",
}
# Schemes whose pieces are no copies of shards, by the kind of these; see replication/schemes.py.
SCHEMES_BY_KIND = {"parity": "localckpt.parity.code:ParityCode"}

_HOMES = {name: home for home, names in _PUBLIC.items() for name in names.split()}
_HOMES_BESIDE = {name: home for home, names in _BESIDE.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOMES)]

# Hidden from type checkers, which would accept any name of a module with ``__getattr__``.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name) or _HOMES_BESIDE.get(name)
        if home is None:
            raise AttributeError(f"module 'localckpt' has no attribute {name!r}")
        return getattr(importlib.import_module(f"localckpt.{home}"), name)


def __dir__() -> list[str]:
    return list(__all__)
