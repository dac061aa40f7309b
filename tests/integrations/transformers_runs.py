"""Runs of Transformers' ``Trainer`` whose losses tell whether they were resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.utils._pytree
import xxhash
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from localckpt import Checkpointer, Every
from localckpt.integrations.transformers import LocalCheckpointCallback
from tests.cli.commands import call
from tests.integrations.trainings import Run
from tests.managers.jobs import assert_same, damage, error_of
from tests.ranks import node_store

__all__ = ["export", "resume_from_paths", "train", "train_adapters", "wrong_uses"]

# An epoch of one rank has 11 steps of 2 batches; one of two ranks 5, and one of the last batch.
_SAMPLES = 22


class _Recording(Trainer):
    """Notes what each batch is, and its loss; ends the process where it is told to."""

    run: Run

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        step = self.state.global_step
        callbacks = self.callback_handler.callbacks
        self.run.may_end(step, getattr(callbacks[-1], "checkpointer", None))
        samples = inputs["input_ids"].sum().item()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        half = "" if self.accelerator.sync_gradients else "a"
        self.run.note(f"{step}{half}", samples, loss.item())
        return loss


class _NoteEvaluations(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self._run = run

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.note(f"{state.global_step}e", kwargs["metrics"]["eval_loss"])


def train(run: Run, *, adapters: bool = False, **arguments: Any) -> dict[str, Any]:
    """Train a model, or adapters of one that is frozen, as far as this run gets."""
    trainer = _trainer(run, arguments, adapters=adapters)
    patience = EarlyStoppingCallback(early_stopping_patience=1000)
    trainer.add_callback(_NoteEvaluations(run))
    trainer.add_callback(patience)
    checkpoints = LocalCheckpointCallback(
        local=run.local, every=Every(steps=run.every), max_attempts=None
    )
    checkpoints.attach(trainer)
    trainer.train()
    run.is_stopped = checkpoints.stopped is not None
    state = trainer.state
    return {
        "known": [state.global_step, state.epoch, state.total_flos, state.best_metric],
        "patience": patience.early_stopping_patience_counter,
        "parameters": _digest(trainer.model.state_dict()),
        "optimizer": _digest(trainer.optimizer.state_dict()["state"]),
        "rate": trainer.lr_scheduler.get_last_lr(),
    }


def train_adapters(run: Run) -> dict[str, Any]:
    """Train adapters, evaluated after each epoch.

    The order of the batches is drawn from the random number generators.
    """
    sampler = {"use_seedable_sampler": False}
    return train(run, adapters=True, eval_strategy="epoch", accelerator_config=sampler)


def resume_from_paths(rank: int, world_size: int) -> None:
    """Resume beside checkpoints of the trainer's own, and from a damaged one."""
    base = node_store() / "paths"

    def first_of(store: str, every: int, path: Path | None = None, **arguments: Any) -> str:
        arguments |= {"max_steps": 6, "eval_strategy": "no"}
        run = Run(rank, world_size, base, is_new=False)
        trainer = _trainer(run, arguments)
        LocalCheckpointCallback(local=base / store, every=Every(steps=every)).attach(trainer)
        trainer.train(resume_from_checkpoint=None if path is None else str(path))
        return run.noted[0].split()[0]

    saved = base / "output" / "checkpoint-2"
    began = [
        first_of("a", 4, save_strategy="steps", save_steps=2),
        first_of("b", 2, saved),
        # The node has a newer one.
        first_of("a", 100, saved),
    ]
    (newest,) = (base / "b").rglob("*05.*.safetensors")
    damage(newest)
    began.append(first_of("b", 100))
    assert began == ["0a", "2a", "3a", "3a"]


def wrong_uses(rank: int, world_size: int) -> list[str]:
    """Use the callback in ways that are wrong; the errors that this raises."""
    local = node_store() / "wrong"

    def trainer(**arguments: Any) -> Any:
        return _trainer(Run(rank, world_size, local), arguments)

    alone, jit = trainer(), trainer()
    alone.add_callback(LocalCheckpointCallback(local=local))
    # An argument that older releases do not have.
    jit.args.enable_jit_checkpoint = True
    twice = LocalCheckpointCallback(local=local)
    attach = LocalCheckpointCallback(local=local).attach
    told = [error_of(alone.train)]
    twice.attach(alone)
    told += [error_of(partial(attach, trainer(auto_find_batch_size=True)))]
    return [*told, error_of(partial(attach, jit)), error_of(partial(twice.attach, trainer()))]


def export(rank: int, world_size: int) -> None:
    """``from_pretrained`` makes the same model of an exported checkpoint."""
    local = node_store() / "export"
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with Checkpointer({"model": model}, local=local / "node", quiet=True) as checkpointer:
        checkpointer.resume()
        checkpointer.step(0)
    for name, most_gb in ("one", "5"), ("several", "0.00001"):
        model.config.save_pretrained(local / name)
        out = local / name / "model.safetensors"
        told = call(
            *("export", local / "node", "--part", "model", "--out", out),
            *("--max-file-size", most_gb),
        )
        assert told.status == 0, told.err
        found = GPT2LMHeadModel.from_pretrained(local / name).state_dict()
        assert_same(dict(found), dict(model.state_dict()))


def _trainer(run: Run, arguments: dict[str, Any], *, adapters: bool = False) -> Any:
    logging.set_verbosity_error()
    torch.manual_seed(100)
    model: Any = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    )
    tokens = torch.randint(32, (_SAMPLES, 8))
    if adapters:
        config = peft.LoraConfig(target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        model = peft.get_peft_model(model, config)
    # What is trained is drawn anew in each process, and must be replaced.
    run.seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    defaults: dict[str, Any] = {
        "output_dir": str(run.local / "output"),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "logging_steps": 4,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        # Older releases do not find it in a model with adapters.
        "label_names": ["labels"],
        "log_level": "error",
    }
    trainer = _Recording(
        model,
        TrainingArguments(**defaults | arguments),
        train_dataset=samples,
        eval_dataset=samples[:4],
    )
    trainer.run = run
    trainer.remove_callback(PrinterCallback)
    return trainer


def _digest(state: Any) -> str:
    digest = xxhash.xxh3_64()
    for leaf in torch.utils._pytree.tree_leaves(state):
        digest.update(torch.as_tensor(leaf).detach().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
