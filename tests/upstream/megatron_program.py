"""Program of Megatron-Core that records its losses.

``megatron_program.py ALGORITHM QUEUE DIRECTORY``: it saves and resumes as Megatron-LM's
``training.py`` does, by the names of NVRx. The queue is Megatron-Core's, or the one of these names.
"""

from __future__ import annotations

import random
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from localckpt.integrations import nvrx
from tests.upstream.gpt import Training
from tests.upstream.kills import record, record_end

ITERATIONS = 130
_SAVED_EVERY = 3
_NVRX = "nvidia_resiliency_ext.checkpointing"
_QUEUES = {
    "megatron": "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvrx": f"{_NVRX}.async_ckpt.core",
}


def train(algorithm: str, queue_name: str, directory: Path) -> None:
    """Train to the end, from the beginning or from what is on the nodes."""
    rank = dist.get_rank()
    strategies = import_module(f"{_NVRX}.local.replication.strategies")
    managers = import_module(f"{_NVRX}.local.ckpt_managers.local_manager")
    manager = managers.LocalCheckpointManager(
        directory / f"node{rank}",
        repl_strategy=strategies.CliqueReplicationStrategy.from_replication_params(1, 2),
    )
    queue = import_module(_QUEUES[queue_name]).AsyncCallsQueue(persistent=True)
    training, first = _begin(manager, algorithm)
    for iteration in range(first, ITERATIONS + 1):
        record(iteration, training.step(), rank)
        queue.maybe_finalize_async_calls(blocking=False)
        if iteration % _SAVED_EVERY == 0:
            state = training.tensor_aware(iteration, algorithm)
            # Megatron-LM finalizes the save before, if it is not yet.
            queue.maybe_finalize_async_calls(blocking=True)
            queue.schedule_async_request(manager.save(state, iteration, is_async=True))
    queue.maybe_finalize_async_calls(blocking=True)
    record_end(training.tensors(), rank)
    queue.close()
    manager.close()


def _begin(manager: Any, algorithm: str) -> tuple[Training, int]:
    """Make the training, as it was saved last; return the iteration to go on with, too."""
    # The ranks share the weights, or with equal weights the optimizer, where the algorithms differ.
    tensor_parallel = 2 if algorithm == "atomic" else 1
    is_new = manager.find_latest() < 0
    seed = [1 if is_new else random.SystemRandom().randrange(1 << 32)]
    dist.broadcast_object_list(seed)
    training = Training(seed[0], tensor_parallel=tensor_parallel)
    if is_new:
        # Ranks with the same weights train on tokens of their own.
        torch.manual_seed(training.group.rank())
        return training, 1
    loaded, _ = manager.load()
    return training, training.take_over(loaded, algorithm)["iteration"] + 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    nvrx.install()
    dist.init_process_group("gloo")
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    dist.destroy_process_group()
