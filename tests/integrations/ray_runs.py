"""Runs of Ray Train's ``TorchTrainer`` whose losses tell whether they were resumed."""

from __future__ import annotations

import contextlib
import io
import json
import random
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from examples.integrations import ray_training
from localckpt import CheckpointingException, Every
from localckpt.integrations.ray import RayCheckpointer, Reference
from localckpt.waiting import wait_until
from tests.checkpointer.loops import Loader, make_model
from tests.integrations.ray_cluster import Cluster
from tests.managers.jobs import error_of
from tests.ranks import node_store

__all__ = ["fit", "lose_a_node", "refuse", "run_example", "train"]

# For each thing that a run waits for.
_LONGEST_S = 300.0


def train(config: dict[str, Any]) -> None:
    """The function of each worker.

    Args:
        config: ``notes``, a directory that keeps what each attempt has done; ``steps``;
            ``max_attempts``; ``wait_at``, for each rank the step at which one attempt of it waits
            to be killed.
    """
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    notes = Path(config["notes"])
    note = notes / f"{rank}-{len(list(notes.glob(f'{rank}-*')))}-{uuid.uuid4().hex[:8]}"
    torch.set_num_threads(1)
    model = make_model("ddp" if world_size > 1 else "plain")
    torch.manual_seed(rank)
    random.seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    loader = Loader(rank)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    options = {"every": Every(steps=2), "timeout_s": 60.0, "max_attempts": config["max_attempts"]}
    with (
        note.open("w", buffering=1) as noted,
        RayCheckpointer(state, local=node_store(), **options) as checkpointer,
    ):
        first = checkpointer.resume()
        _note(noted, {"first": first})
        for step in range(first, config["steps"]):
            batch = loader.next()
            loss = model(batch * random.uniform(0.5, 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            _note(noted, [step, float(loss.item()).hex()])
            checkpointer.step(step)
            if step % 3 == 2:
                checkpointer.wait_until_finished()
                checkpointer.report({"step": step})
            _wait_if_told(config, rank, step)
    weights = [bytes(p.detach().reshape(-1).view(torch.uint8).tolist()) for p in model.parameters()]
    moments = [
        s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    with note.open("a") as noted:
        told = [b"".join(weights).hex(), str([m.tolist() for m in moments]), random.random()]
        _note(noted, {"last": [*told, torch.rand(3).tolist()]})


def _note(noted: TextIO, value: Any) -> None:
    # Ray Train 2.51 puts a print() of its own in place, which writes something else to a file.
    noted.write(f"{json.dumps(value)}\n")


def fit(
    run: str, directory: Path, workers: int = 2, failures: int = 0, **config: Any
) -> ray.train.Result:
    """Run ``TorchTrainer.fit``; the notes of the workers are in ``directory / run``."""
    notes = directory / run
    notes.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={"notes": str(notes), "max_attempts": 3, "wait_at": {}, **config},
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
        fitting = pool.submit(
            *(fit, "faulty", directory),
            failures=-1,
            steps=steps,
            wait_at=waits_at,
            max_attempts=None,
        )

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
