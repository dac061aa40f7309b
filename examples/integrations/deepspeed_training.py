"""DeepSpeed on local checkpoints. Run it twice, under `deepspeed` or `torchrun`: it resumes."""

import argparse

import deepspeed
import torch

from localckpt import Every
from localckpt.integrations.deepspeed import install

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main(local: str, steps: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    checkpoints = install(engine, local=local, every=Every(steps=2))
    # What is not on the nodes, it looks for here, as DeepSpeed does without install().
    engine.load_checkpoint("/nowhere")
    first = engine.global_steps
    while engine.global_steps < steps:
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        if checkpoints.step():
            break
    checkpoints.close()
    print(f"trained from step {first} to step {engine.global_steps}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/tmp/localckpt-deepspeed")
    parser.add_argument("--steps", type=int, default=20)
    # The launcher of DeepSpeed gives it.
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    main(arguments.directory, arguments.steps)
