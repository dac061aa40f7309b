"""Runs of a DeepSpeed engine whose losses tell whether they were resumed."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule

from localckpt import Every
from localckpt.integrations.deepspeed import LocalCheckpoints, install
from tests.integrations.trainings import Run, digest_of
from tests.managers.jobs import error_of
from tests.ranks import node_store

__all__ = ["change_over", "errors_of_wrong_use", "train", "use_no_compiler"]

_ACCUMULATED = 2
# The last number of micro-steps that a run gets to.
_END = 30

# Of the parameters that ZeRO 3 keeps whole, releases before 0.19.8 start all gathers at once after
# a step, a save or a load, and wait for the last alone. With gloo that says nothing of the others.
_GATHERS = {"stage3_allgather_sequential": True}
_WAITS_FOR_ALL_SINCE = (0, 19, 8)


def use_no_compiler() -> None:
    """Have DeepSpeed exchange by gloo alone; else it compiles an operation at its first use."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class _Model(torch.nn.Module):
    # Sizes that two ranks share evenly: ZeRO 3 leaves what pads a part as it finds the memory.
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += len(batch)
        result: torch.Tensor = self.layers(batch) * self.frozen.sum()
        return result


def _engine(stage: int, precision: str = "fp32", model: Any = None, **zero: Any) -> Any:
    model = model or _Model()
    release = tuple(int(part) for part in re.findall(r"\d+", deepspeed.__version__)[:3])
    gathers = {} if release >= _WAITS_FOR_ALL_SINCE else _GATHERS
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": _ACCUMULATED,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **gathers, **zero},
        # DeepSpeed's own AdamW is compiled at its first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class _Trained:
    """An engine with its checkpoints, which has loaded what there is."""

    def __init__(
        self,
        local: Path,
        stage: int = 1,
        precision: str = "fp32",
        *,
        is_new: bool = True,
        zero: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        rank = int(os.environ["RANK"])
        torch.manual_seed(rank if is_new else random.SystemRandom().randrange(1 << 32))
        self.engine = _engine(stage, precision, **(zero or {}))
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        options = {"session_id": f"zero {stage} {precision}"} | options
        self.checkpoints: LocalCheckpoints = install(self.engine, local=local, **options)
        self.found = self.engine.load_checkpoint(str(local / "own"))

    def micro_steps(self, until: int) -> Iterator[tuple[int, list[Any]]]:
        """Train; yield the number of each micro-step that is over, and what was seen at it."""
        engine = self.engine
        for number in range(engine.micro_steps, until):
            loss = engine(torch.randn(2, 4).to(self._dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            counters = engine.global_steps, engine.global_samples, engine.skipped_steps
            yield number, [loss.item(), engine.optimizer.param_groups[0]["lr"], counters]

    def train(self, until: int) -> None:
        for _ in self.micro_steps(until):
            pass

    def state(self) -> str:
        """Digest of all that the engine has: weights, masters, moments, schedule, counters."""
        engine = self.engine
        partitions = [getattr(p, "ds_tensor", None) for p in engine.module.parameters()]
        states = [part.state_dict() for part in (engine.module, engine.optimizer)]
        counters = engine.micro_steps, engine.global_steps, engine.lr_scheduler.state_dict()
        return digest_of([partitions, states, counters])


def train(run: Run, stage: int, precision: str, zero: Any = None) -> None:
    """Train as far as the run gets; it notes the digest of the state after each step."""
    options = {"every": Every(steps=run.every), "max_attempts": None}
    trained = _Trained(run.local, stage, precision, is_new=run.is_new, zero=zero, **options)
    if not run.is_new:
        assert trained.found[1]["over"] == trained.engine.micro_steps
    for number, seen in trained.micro_steps(_END):
        is_step = (number + 1) % _ACCUMULATED == 0
        run.note(number, *seen, trained.state() if is_step else "within a step")
        if trained.checkpoints.step({"over": number + 1}):
            run.is_stopped = True
            break
        run.may_end(number, trained.checkpoints.checkpointer)
    trained.checkpoints.close()


def change_over(rank: int, world_size: int) -> None:
    """Go from DeepSpeed's own files to checkpoints on the nodes, and back."""
    local = node_store() / "over"
    own = str(local / "own")
    before = _engine(1)
    before.save_checkpoint(own, client_state={"name": "own"})
    first = _Trained(local)
    assert first.found[1]["name"] == "own"
    first.train(2)
    first.engine.save_checkpoint(own, client_state={"name": "node"})
    first.engine.save_checkpoint(own, tag="other", client_state={"name": "left out"})
    # What DeepSpeed has written before, and nothing of what was saved to the node. Not all releases
    # have the script that is left out.
    found = sorted(set(os.listdir(own)) - {"zero_to_torch.py"})
    assert found == ["global_step0", "latest", "zero_to_fp32.py"]
    first.checkpoints.export(str(local / "exported"), client_state={"name": "exported"})
    first.checkpoints.close()
    second = _Trained(local, is_new=False)
    assert second.state() == first.state()
    assert (Path(second.found[0]).parent.name, second.found[1]["name"]) == ("global_step1", "node")
    assert second.engine.load_checkpoint(own, load_module_only=True)[1]["name"] == "own"
    second.checkpoints.close()
    # A run on other nodes got further, and has left files.
    after = _engine(1)
    assert after.load_checkpoint(str(local / "exported"))[1]["name"] == "exported"
    after.global_steps = 3
    after.save_checkpoint(own)
    newer = _Trained(local, is_new=False)
    assert (Path(newer.found[0]).parent.name, newer.engine.global_steps) == ("global_step3", 3)
    newer.checkpoints.close()
    shared = {"shared": local / "shared", "shared_every": Every(steps=1), "session_id": "shared"}
    third = _Trained(local / "third", **shared)
    for _ in third.micro_steps(2):
        third.checkpoints.step()
    third.checkpoints.close()
    fourth = _Trained(local / "fourth", **shared)
    assert fourth.engine.global_steps == 1
    fourth.checkpoints.close()
    assert not list(local.glob("session-*/0/deepspeed"))


def errors_of_wrong_use(rank: int, world_size: int) -> dict[str, str]:
    """What the user is told, by what was done."""
    local, engine = node_store() / "wrong", _engine(1)
    told = {
        "no engine": error_of(lambda: install(engine.module, local=local)),
        "key": error_of(lambda: install(engine, local=local, state={"deepspeed": engine})),
        "finite": error_of(lambda: install(engine, local=local, finite=True)),
        "elastic": error_of(lambda: install(_engine(1, elastic_checkpoint=True), local=local)),
        "experts": error_of(lambda: install(_engine(0, model=_with_experts()), local=local)),
        "pipeline": error_of(lambda: install(_pipeline(), local=local)),
    }
    checkpoints = install(engine, local=local)
    told["twice"] = error_of(lambda: install(engine, local=local))
    told["not loaded"] = error_of(lambda: engine.save_checkpoint("/nowhere"))
    told["not loaded, step"] = error_of(checkpoints.step)
    checkpoints.close()
    told["closed"] = error_of(checkpoints.step)
    trained = _Trained(local)
    trained.train(2)
    trained.engine.save_checkpoint("/nowhere", tag="good")
    trained.train(3)
    told["within"] = error_of(lambda: trained.engine.save_checkpoint("/nowhere"))
    assert not trained.checkpoints.step()
    trained.train(4)
    told["training"] = error_of(lambda: trained.engine.load_checkpoint("/nowhere"))
    trained.checkpoints.close()
    again = install(_engine(1), local=local, session_id="zero 1 fp32")
    told["tag"] = error_of(lambda: again.load_checkpoint("/nowhere", tag="bad"))
    again.close()
    other = install(_engine(2, model=torch.nn.Linear(4, 2)), local=local, session_id="zero 1 fp32")
    told["other model"] = error_of(lambda: other.load_checkpoint("/nowhere"))
    other.close()
    return told


def _with_experts() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), MoE(4, torch.nn.Linear(4, 4), num_experts=2))


def _pipeline() -> Any:
    return _engine(0, model=PipelineModule([torch.nn.Linear(4, 1)], num_stages=1))
