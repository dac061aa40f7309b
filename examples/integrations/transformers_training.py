"""Transformers on local checkpoints. Run it twice, alone or with `torchrun`: it resumes."""

import sys
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from localckpt import Every
from localckpt.integrations.transformers import LocalCheckpointCallback


def make_trainer(output: str, **arguments: Any) -> Trainer:
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    )
    tokens = torch.randint(64, (36, 16), generator=torch.Generator().manual_seed(0))
    usual: dict[str, Any] = {
        "output_dir": output,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "metric_for_best_model": "eval_loss",
        "label_names": ["labels"],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(
        model,
        TrainingArguments(**{**usual, **arguments}),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1000)],
    )


def main(local: str, steps: int, **arguments: Any) -> None:
    trainer = make_trainer(f"{local}/output", max_steps=steps, **arguments)
    LocalCheckpointCallback(local=local, every=Every(steps=5)).attach(trainer)
    trained = trainer.train()
    print(f"trained up to step {trained.global_step}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/tmp/localckpt-transformers", steps=40)
