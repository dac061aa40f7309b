"""Runs of Ray Train's ``TorchTrainer`` whose steps tell whether they were resumed.

The nodes of their cluster are on this machine, each with a directory that plays its disk. All that
Ray makes lies in one directory, and its processes are children of the one that made the cluster.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster as RayCluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.optim.optimizer import register_optimizer_step_post_hook

from examples.integrations import ray_training
from localckpt import CheckpointingException
from localckpt.integrations.ray import RayCheckpointer, Reference
from localckpt.waiting import wait_until
from tests.integrations.trainings import Run
from tests.managers.jobs import error_of
from tests.ranks import NODE_STORE, node_store

__all__ = ["fit", "lose_a_node", "refuse", "run_example", "start_cluster", "train"]

# For each thing that a run waits for.
_LONGEST_S = 300.0


def train(config: dict[str, Any]) -> None:
    """The function of each worker: that of the example, which leaves a line for each of its steps.

    Args:
        config: As for the example; ``notes``, a directory that keeps what each attempt has done;
            ``wait_at``, for each rank the step at which one attempt of it waits to be killed.
    """
    context = ray.train.get_context()
    rank, notes = context.get_world_rank(), Path(config["notes"])
    note = notes / f"{rank}-{len(list(notes.glob(f'{rank}-*')))}-{uuid.uuid4().hex[:8]}"
    # A save is over before the next report.
    run = Run(rank, context.get_world_size(), node_store(), pause_s=0.2)
    with note.open("w", buffering=1) as noted:

        def leave(*_: Any) -> None:
            # Ray Train 2.51 puts a print() of its own in place, which writes to no file.
            noted.write(f"{run.noted[-1]}\n")
            _wait_if_told(config, rank, len(run.noted) - 1)

        torch.set_num_threads(1)
        torch.manual_seed(rank)
        run.watch()
        leaving = register_optimizer_step_post_hook(leave)
        ray_training.train(config | {"local": str(node_store())})
        leaving.remove()


def fit(
    run: str, directory: Path, workers: int = 2, failures: int = 0, **config: Any
) -> ray.train.Result:
    """Run ``TorchTrainer.fit``; the notes of the workers are in ``directory / run``."""
    notes = directory / run
    notes.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={"notes": str(notes), "wait_at": {}, **config},
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        # As far as there are as many nodes.
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=run,
            storage_path=str(directory / "results"),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def lose_a_node(cluster: Cluster, directory: Path, steps: int) -> dict[str, Any]:
    """Fit while a node that runs a worker is lost near the end, with its disk.

    Returns:
        What Ray Train keeps of the run.
    """
    waits_at, notes = dict.fromkeys((0, 1), steps - 4), directory / "faulty"
    with ThreadPoolExecutor(1) as pool:
        options: dict[str, Any] = {"failures": -1, "steps": steps, "wait_at": waits_at}
        fitting = pool.submit(fit, "faulty", directory, **options)

        def waiting() -> list[Path]:
            stores = [Path(path.read_text()) for path in notes.glob("wait_at-*")]
            return [store for store in stores if cluster.can_lose(store)]

        _await(fitting, lambda: bool(waiting()))
        cluster.lose(waiting()[0])
        return _told(fitting.result(_LONGEST_S))


def _await(fitting: Future[Any], has_happened: Callable[[], bool]) -> None:
    assert wait_until(lambda: fitting.done() or has_happened(), _LONGEST_S), "it takes too long"
    if fitting.done():
        raise AssertionError(f"the run has ended before: {fitting.result()}")


def _begun(local: Any) -> str:
    try:
        with RayCheckpointer({"model": torch.nn.Linear(2, 2)}, local=local) as checkpointer:
            return f"resumed at step {checkpointer.resume()}"
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"


def refuse(directory: Path) -> list[str]:
    """Errors of wrong uses, and of runs of which nothing is left."""
    errors = [error_of(lambda: RayCheckpointer({"model": torch.nn.Linear(2, 2)}, memory=True))]

    def refused(config: dict[str, Any]) -> None:
        for local, lost_session in [("relative", ""), (directory, "run"), (directory, "other run")]:
            # As an earlier attempt has left it.
            told = ray.train.Checkpoint.from_directory(directory)
            lost = Reference(lost_session, 7, 1, str(directory), None)
            told.set_metadata({"localckpt": asdict(lost)})
            ray.train.report({}, checkpoint=told)
            errors.append(_begun(local))

    trainer = TorchTrainer(
        refused,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(directory)),
    )
    trainer.fit()
    return errors


def run_example(directory: Path, workers: int) -> list[str]:
    """Run the example twice; what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for steps in (8, 16):
            ray_training.main(str(directory), workers, steps)
    return [line for line in printed.getvalue().splitlines() if line.startswith("trained")]


def _told(result: ray.train.Result) -> dict[str, Any]:
    """What Ray Train keeps of a run, as plain values."""
    assert result.best_checkpoints is not None
    references = [Reference.of(kept) for kept, _ in result.best_checkpoints]
    newest = Reference.of(result.checkpoint)
    assert newest is not None
    return {
        "metrics": result.metrics,
        "kept": [reference and reference.step for reference in references],
        "newest": asdict(newest),
    }


def _wait_if_told(config: dict[str, Any], rank: int, step: int) -> None:
    """Wait to be killed, if this is the first attempt of the rank that comes to that step."""
    reached = Path(config["notes"]) / f"wait_at-{rank}"
    if config["wait_at"].get(rank) == step and not reached.exists():
        # Whole at once, for the one that looks at it.
        written = reached.with_name(f".{reached.name}")
        written.write_text(str(node_store()))
        written.rename(reached)
        wait_until(lambda: False, _LONGEST_S)
        raise TimeoutError("was not killed")


_STORE_NBYTES = 80 << 20
_LEAVING_S = 30.0
_SYSTEM = {
    # No worker of these would have the environment that Ray Train wants.
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # A node whose process is gone refuses connections, and is dead after seconds instead of half a
    # minute. One that is slow to answer has as long as otherwise.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_timeout_ms": 10_000,
}


class Cluster:
    """A cluster with a node for each of some directories.

    Args:
        stores: The directories. The node of the first one cannot be lost.
        workers: Number of workers that the first node has room for. The others have room for one.
        directory: Has the sockets, whose paths would be too long in that of Ray's session.
    """

    def __init__(self, stores: Sequence[Path], workers: int, directory: Path) -> None:
        self._directory = directory
        head = {"_system_config": _SYSTEM, "no_monitor": True, "include_log_monitor": False}
        self._cluster = RayCluster(
            initialize_head=True, head_node_args=head | self._options(stores[0], workers)
        )
        # Before there are others, to one of which this process might be connected.
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        self._nodes = {
            store: self._cluster.add_node(wait=False, **self._options(store, 1))
            for store in stores[1:]
        }
        self._cluster.wait_for_nodes()

    def can_lose(self, store: Path) -> bool:
        """Whether the driver goes on without the node of this directory."""
        return store in self._nodes

    def lose(self, store: Path) -> None:
        """End a node as a loss of power does, and its disk with it."""
        workers = _processes_of(store)
        for process in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(self._nodes.pop(store), allow_graceful=False)
        _, left = psutil.wait_procs(workers, timeout=_LEAVING_S)
        assert not left
        shutil.rmtree(store)

    def close(self) -> None:
        ray.shutdown()
        processes = psutil.Process().children(recursive=True)
        self._cluster.shutdown()
        _, left = psutil.wait_procs(processes, timeout=_LEAVING_S)
        assert not left, [process.cmdline() for process in left]

    def _options(self, store: Path, workers: int) -> dict[str, Any]:
        return {
            "num_cpus": workers,
            "env_vars": {NODE_STORE: str(store)},
            "object_store_memory": _STORE_NBYTES,
            "include_dashboard": False,
            "plasma_store_socket_name": str(self._directory / f"{store.name}.plasma"),
            "raylet_socket_name": str(self._directory / f"{store.name}.raylet"),
        }


@contextlib.contextmanager
def start_cluster(stores: Sequence[Path], workers: int) -> Iterator[Cluster]:
    """Start a :class:`Cluster`, and connect this process to it."""
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        os.environ["RAY_TMPDIR"] = directory
        Path(directory, "ray").mkdir()
        with contextlib.closing(Cluster(stores, workers, Path(directory))) as cluster:
            yield cluster


def _processes_of(store: Path) -> list[psutil.Process]:
    """The processes of a node, by the directory that they have in their environment."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(NODE_STORE) == str(store):
                found.append(process)
    return found
