"""Runs of Transformers' ``Trainer`` whose losses tell whether they were resumed.

Dropout and the order of the batches draw random numbers, so a loss is the same bit for bit only if
the parameters, the optimizer, the schedule, the position and all generators are.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
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

from localckpt import Checkpointer, CheckpointingException, Every
from localckpt.integrations.transformers import LocalCheckpointCallback
from tests.cli.commands import call
from tests.managers.jobs import damage

__all__ = ["export", "resume_from_paths", "train", "train_adapters", "wrong_uses"]

# An epoch of one rank has 11 steps of 2 batches; one of two ranks 5, and one of the last batch.
_SAMPLES = 22
_Note = Callable[[int, str], None]


class _Recording(Trainer):
    """Notes what each batch is, and its loss; ends the process where it is told to."""

    note: _Note
    end: dict[int, int]
    pause_s: float

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        step = self.state.global_step
        if (number := self.end.pop(step, None)) is not None:
            # Else the step that the run is resumed at would depend on how fast saves are.
            self.callback_handler.callbacks[-1].checkpointer.wait_until_finished()
            os.kill(os.getpid(), number)
        time.sleep(self.pause_s)
        samples = inputs["input_ids"].sum().item()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        half = "" if self.accelerator.sync_gradients else "a"
        self.note(f"{step}{half}", f"{samples} {loss.item().hex()}")
        return loss


class _NoteEvaluations(TrainerCallback):
    def __init__(self, note: _Note) -> None:
        self._note = note

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(f"{state.global_step}e", kwargs["metrics"]["eval_loss"].hex())


def train(
    rank: int,
    world_size: int,
    local: Path,
    every: int,
    end: dict[int, dict[int, int]],
    *,
    is_new: bool = True,
    pause_s: float = 0.0,
    adapters: bool = False,
    **arguments: Any,
) -> tuple[list[str], dict[str, Any]]:
    """Train a model, as far as this run gets.

    Args:
        local: Directory of the node.
        every: Steps between saves.
        end: For ranks, signals that they send themselves, by step.
        is_new: Whether the run begins here; else it begins with other parameters.
        pause_s: Length of each batch, in seconds.
        adapters: Whether to train adapters of a model that is frozen.
        arguments: Further training arguments.

    Returns:
        The losses of the batches and evaluations that this run has made; and what is known at its
        end.
    """
    noted: list[str] = []

    def note(step: str, text: str) -> None:
        noted.append(f"{step} {text}")

    seed = 0 if is_new else random.SystemRandom().randrange(1 << 32)
    trainer = _trainer(local, seed, note, arguments, adapters=adapters)
    trainer.end, trainer.pause_s = dict(end.get(rank, {})), pause_s
    patience = EarlyStoppingCallback(early_stopping_patience=1000)
    trainer.add_callback(_NoteEvaluations(note))
    trainer.add_callback(patience)
    checkpoints = LocalCheckpointCallback(local=local, every=Every(steps=every), max_attempts=None)
    checkpoints.attach(trainer)
    trainer.train()
    state = trainer.state
    return noted, {
        "known": [state.global_step, state.epoch, state.total_flos, state.best_metric],
        "patience": patience.early_stopping_patience_counter,
        "parameters": _digest(trainer.model.state_dict()),
        "optimizer": _digest(trainer.optimizer.state_dict()["state"]),
        "rate": trainer.lr_scheduler.get_last_lr(),
        "is_stopped": checkpoints.stopped is not None,
    }


def train_adapters(*args: Any, **kwargs: Any) -> tuple[list[str], dict[str, Any]]:
    """Train as :func:`train` does, adapters, evaluated after each epoch.

    The order of the batches is drawn from the random number generators.
    """
    return train(
        *args,
        **kwargs,
        adapters=True,
        eval_strategy="epoch",
        accelerator_config={"use_seedable_sampler": False},
    )


def resume_from_paths(rank: int, world_size: int, local: Path) -> list[list[str]]:
    """Resume beside checkpoints of the trainer's own, and from a damaged one.

    Returns:
        What each run has noted: one with all 6 steps; one from the trainer's checkpoint of step 2;
        one with the same path, and a newer checkpoint on the node, of step 3; and one without a
        path, whose newest checkpoint, of step 5, is damaged.
    """
    runs: list[list[str]] = []

    def run(store: str, every: int, path: Path | None = None, **arguments: Any) -> None:
        runs.append([])
        noted = runs[-1]
        arguments |= {"max_steps": 6, "eval_strategy": "no"}
        trainer = _trainer(
            local, len(runs), lambda *words: noted.append(" ".join(words)), arguments
        )
        LocalCheckpointCallback(local=local / store, every=Every(steps=every)).attach(trainer)
        trainer.train(resume_from_checkpoint=None if path is None else str(path))

    saved = local / "output" / "checkpoint-2"
    run("a", 4, save_strategy="steps", save_steps=2)
    run("b", 2, saved)
    run("a", 100, saved)
    (newest,) = (local / "b").rglob("*05.*.safetensors")
    damage(newest)
    run("b", 100)
    return runs


def wrong_uses(rank: int, world_size: int, local: Path) -> list[str]:
    """Use the callback in ways that are wrong; the errors that this raises."""
    told = []

    def attempt(fn: Callable[..., Any], *args: Any) -> None:
        try:
            fn(*args)
        except CheckpointingException as error:
            told.append(str(error))

    def trainer(**arguments: Any) -> Any:
        return _trainer(local, 0, lambda *words: None, arguments)

    alone = trainer()
    alone.add_callback(LocalCheckpointCallback(local=local))
    attempt(alone.train)
    attempt(LocalCheckpointCallback(local=local).attach, trainer(auto_find_batch_size=True))
    jit = trainer()
    # An argument that older releases do not have.
    jit.args.enable_jit_checkpoint = True
    attempt(LocalCheckpointCallback(local=local).attach, jit)
    twice = LocalCheckpointCallback(local=local)
    twice.attach(alone)
    attempt(twice.attach, trainer())
    return told


def export(rank: int, world_size: int, local: Path) -> list[bool]:
    """Whether ``from_pretrained`` makes the same model of an exported checkpoint."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with Checkpointer({"model": model}, local=local / "node", quiet=True) as checkpointer:
        checkpointer.resume()
        checkpointer.step(0)
    read = []
    for name, most_gb in ("one", "5"), ("several", "0.00001"):
        model.config.save_pretrained(local / name)
        out = local / name / "model.safetensors"
        told = call(
            *("export", local / "node", "--part", "model", "--out", out),
            *("--max-file-size", most_gb),
        )
        assert told.status == 0, told.err
        found = GPT2LMHeadModel.from_pretrained(local / name).state_dict()
        wanted = model.state_dict()
        read.append(
            found.keys() == wanted.keys() and all(map(torch.equal, found.values(), wanted.values()))
        )
    return read


def _trainer(
    local: Path, seed: int, note: _Note, arguments: dict[str, Any], *, adapters: bool = False
) -> Any:
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
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    defaults: dict[str, Any] = {
        "output_dir": str(local / "output"),
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
    trainer.note, trainer.end, trainer.pause_s = note, {}, 0.0
    trainer.remove_callback(PrinterCallback)
    return trainer


def _digest(state: Any) -> str:
    digest = xxhash.xxh3_64()
    for leaf in torch.utils._pytree.tree_leaves(state):
        digest.update(torch.as_tensor(leaf).detach().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
