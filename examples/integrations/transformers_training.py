"""Transformers on local checkpoints. Run it twice, alone or with `torchrun`: it resumes."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from localckpt import Every
from localckpt.integrations.transformers import LocalCheckpointCallback


def main(local: str, steps: int) -> None:
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    )
    tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=f"{local}/output",
        max_steps=steps,
        per_device_train_batch_size=2,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=data)
    LocalCheckpointCallback(local=local, every=Every(steps=5)).attach(trainer)
    trained = trainer.train()
    print(f"trained up to step {trained.global_step}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/tmp/localckpt-transformers", steps=40)
