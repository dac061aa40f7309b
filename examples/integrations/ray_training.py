"""Ray Train on local checkpoints. Run it twice: it resumes. --workers 0 starts no cluster."""

import argparse
from typing import Any

import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from localckpt import Every
from localckpt.integrations.ray import RayCheckpointer


def train(config: dict[str, Any]) -> None:
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with RayCheckpointer(state, local=config["local"], every=Every(steps=5)) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, config["steps"]):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer.step(step):
                break
            if step % 10 == 9:
                checkpointer.report({"loss": loss.item()})
        checkpointer.save(step)
        checkpointer.wait_until_finished()
        checkpointer.report({"first": first, "last": step})


def main(local: str, workers: int, steps: int) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"local": local, "steps": steps},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="example",
            storage_path=f"{local}/results",
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    metrics = trainer.fit().metrics
    print(f"trained step {metrics['first']} to step {metrics['last']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/tmp/localckpt-ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="more than the last time")
    arguments = parser.parse_args()
    main(arguments.directory, arguments.workers, arguments.steps)
