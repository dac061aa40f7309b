"""Transformers' own ``Trainer`` goes on bit for bit where it was killed, or stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from localckpt import Checkpointer, Every
from tests.cli.commands import call
from tests.integrations.trainings import (
    Jobs,
    Run,
    assert_resumed,
    assert_stopped,
    example,
    leave_out,
    run_example,
)
from tests.managers.jobs import assert_same, damage, error_of
from tests.ranks import node_store
from tests.upstream.environment import import_upstream, needs

pytestmark = [pytest.mark.framework, needs("transformers", "accelerate", "peft")]


def _program() -> Any:
    return import_upstream("examples.integrations.transformers_training")


def _callback(**options: Any) -> Any:
    plug_in = import_upstream("localckpt.integrations.transformers")
    return plug_in.LocalCheckpointCallback(**options)


def _train_adapters(run: Run) -> None:
    """Train adapters, evaluated after each epoch.

    The order of the batches is drawn from the random number generators.
    """
    program, peft = _program(), import_upstream("peft")
    make_model, drawn = program.GPT2LMHeadModel, {"use_seedable_sampler": False}
    config = peft.LoraConfig(target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    program.GPT2LMHeadModel = lambda about: peft.get_peft_model(make_model(about), config)
    told = {"eval_strategy": "epoch", "accelerator_config": drawn}
    example("transformers_training", 18, **told)(run)


def _resume_from_paths(rank: int, world_size: int) -> None:
    """Resume beside checkpoints of the trainer's own, and from a damaged one."""
    base = node_store() / "paths"

    def first_of(store: str, every: int, path: Path | None = None, **arguments: Any) -> int:
        steps: list[Any] = []
        trainer = _program().make_trainer(f"{base}/output", max_steps=6, **arguments)
        _callback(local=base / store, every=Every(steps=every)).attach(trainer)
        noting = register_optimizer_step_post_hook(lambda *_: steps.append(None))
        trainer.train(resume_from_checkpoint=None if path is None else str(path))
        noting.remove()
        return 6 - len(steps)

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
    assert began == [0, 2, 3, 3]


def _wrong_uses(rank: int, world_size: int) -> list[str]:
    """Use the callback in ways that are wrong; the errors that this raises."""
    local = node_store() / "wrong"
    trainer = partial(_program().make_trainer, f"{local}/output")
    alone, jit = trainer(), trainer()
    alone.add_callback(_callback(local=local))
    # An argument that older releases do not have.
    jit.args.enable_jit_checkpoint = True
    twice, attach = _callback(local=local), _callback(local=local).attach
    told = [error_of(alone.train)]
    twice.attach(alone)
    wrong = (attach, trainer(auto_find_batch_size=True)), (attach, jit), (twice.attach, trainer())
    return told + [error_of(partial(*use)) for use in wrong]


def _export(rank: int, world_size: int) -> None:
    """``from_pretrained`` makes the same model of an exported checkpoint."""
    local = node_store() / "export"
    model = _program().make_trainer(f"{local}/output").model
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
        found = type(model).from_pretrained(local / name).state_dict()
        assert_same(dict(found), dict(model.state_dict()))


def run_jobs() -> dict[str, Any]:
    leave_out()
    jobs, train = Jobs(), example("transformers_training", 10)
    for run in (_resume_from_paths, _export):
        jobs.run(run, 1)
    return {
        # After step 4 there was an evaluation. That of the first epoch was made after step 9.
        "ddp within an epoch": jobs.killed("ddp", train, 6),
        "adapters between epochs": jobs.killed("adapters", _train_adapters, 10, ranks=1),
        "stopped": jobs.stopped(train, 1),
        "wrong uses": jobs.run(_wrong_uses, 1),
    }


@pytest.mark.parametrize(
    ("job", "first"), [("ddp within an epoch", 4), ("adapters between epochs", 9)]
)
def test_a_run_goes_on_bit_for_bit_after_a_kill(
    job: str, first: int, outcomes: dict[str, Any]
) -> None:
    assert_resumed(outcomes[job], first)


def test_a_signal_on_one_rank_stops_all_after_the_same_step(outcomes: dict[str, Any]) -> None:
    assert_stopped(outcomes["ddp within an epoch"][0], outcomes["stopped"])


def test_wrong_uses_are_told(outcomes: dict[str, Any]) -> None:
    (errors,) = outcomes["wrong uses"]

    told = ["attach(trainer)", "give the size", "leave enable_jit_checkpoint out", "another one"]
    assert all(words in error for words, error in zip(told, errors, strict=True))


@pytest.mark.example
def test_the_example_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    printed = run_example("transformers_training", tmp_path, [6, 12], leave_out)

    assert printed == ["trained up to step 6", "trained up to step 12"]
