"""Runs of a DeepSpeed engine whose losses tell whether they were resumed.

The batches and dropout draw random numbers, so a loss is the same bit for bit only if the
parameters, the optimizer, the schedule, the counters and all generators are.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule

from localckpt import CheckpointingException, Every
from localckpt.integrations.deepspeed import LocalCheckpoints, install

__all__ = [
    "Run",
    "change_over",
    "errors_of_wrong_use",
    "stop_and_go_on",
    "train",
    "train_until_cut_off",
    "use_no_compiler",
]

_ACCUMULATED = 2
# The last number of micro-steps that a run gets to, and one that is within a step.
_END, _CUT_OFF = 14, 9

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


class Run:
    """A run of an engine.

    Args:
        local: Directory of the node.
        stage: ZeRO's.
        precision: ``"fp32"`` or ``"bf16"``.
        is_new: Whether the run begins here; else it begins with other random numbers and weights.
        zero: More of ZeRO's configuration.
        options: Of :func:`install`.

    Attributes:
        lines: What was seen at each micro-step.
        found: What ``load_checkpoint`` has returned.
    """

    def __init__(
        self,
        local: Path,
        stage: int,
        precision: str = "fp32",
        *,
        is_new: bool = True,
        zero: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        rank = int(os.environ["RANK"])
        torch.manual_seed(rank if is_new else random.SystemRandom().randrange(1 << 32))
        self.lines: list[str] = []
        self.engine = _engine(stage, precision, **(zero or {}))
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        options = {"session_id": f"zero {stage} {precision}"} | options
        self.checkpoints: LocalCheckpoints = install(self.engine, local=local, **options)
        self.found = self.engine.load_checkpoint(str(local / "own"))

    def micro_steps(self, until: int, pause_s: float = 0.0) -> Iterator[int]:
        """Train; yield the number of micro-steps that are over."""
        engine = self.engine
        for number in range(engine.micro_steps, until):
            loss = engine(torch.randn(2, 4).to(self._dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            counters = engine.global_steps, engine.global_samples, engine.skipped_steps
            rate = engine.optimizer.param_groups[0]["lr"]
            self.lines.append(f"{number}: {loss.item().hex()} {rate.hex()} {counters}")
            time.sleep(pause_s)
            yield engine.micro_steps

    def state(self) -> str:
        """Digest of all that the engine has: weights, masters, moments, schedule, counters."""
        engine = self.engine
        partitions = [getattr(p, "ds_tensor", None) for p in engine.module.parameters()]
        states = [part.state_dict() for part in (engine.module, engine.optimizer)]
        counters = engine.micro_steps, engine.global_steps, engine.lr_scheduler.state_dict()
        digest = hashlib.sha256()
        for text in _texts([partitions, states, counters]):
            digest.update(text)
        return digest.hexdigest()


def train(
    local: Path, stage: int, precision: str, zero: Any = None, *, is_new: bool
) -> tuple[list[str], str, str]:
    """Train to the end, from the beginning or from what is on the nodes; close nothing before.

    Returns:
        What was seen at each micro-step, and the digests of the state at the end and at the
        beginning.
    """
    run = Run(local, stage, precision, is_new=is_new, zero=zero)
    first = run.state()
    for _ in run.micro_steps(_END):
        pass
    state = run.state()
    run.checkpoints.close()
    return run.lines, state, first


def train_until_cut_off(local: Path, stage: int, precision: str, zero: Any = None) -> str:
    """Train, and save after each step, up to the middle of a step; all saves are complete.

    Returns:
        The digest of the state that was saved last.
    """
    run = Run(local, stage, precision, zero=zero)
    for over in run.micro_steps(_CUT_OFF):
        if over % _ACCUMULATED == 0:
            run.engine.save_checkpoint("/nowhere", client_state={"over": over})
            saved = run.state()
    run.checkpoints.checkpointer.wait_until_finished()
    return saved


def stop_and_go_on(local: Path, is_asked: bool) -> tuple[list[str], list[str]]:
    """Train until all ranks are stopped, and some steps more; then do these steps again.

    Args:
        local: Directory of the node.
        is_asked: Whether this rank gets the signal. No cadence saves.
    """
    run = Run(local, 2, session_id="stopped", every=Every(steps=10**6))
    for over in run.micro_steps(10**4, pause_s=0.01):
        if run.checkpoints.step({"over": over}):
            break
        if over == 3 and is_asked:
            os.kill(os.getpid(), signal.SIGTERM)
    stopped_at = run.engine.micro_steps
    run.checkpoints.close()
    for _ in run.micro_steps(stopped_at + 3):
        pass
    again = Run(local, 2, session_id="stopped", is_new=False)
    assert again.found[1]["over"] == stopped_at
    for _ in again.micro_steps(stopped_at + 3):
        pass
    again.checkpoints.close()
    return [*run.lines[-3:], run.state()], [*again.lines, again.state()]


def change_over(local: Path) -> dict[str, Any]:
    """Go from DeepSpeed's own files to checkpoints on the nodes, and back; what was loaded."""
    own = str(local / "own")
    before = _engine(1)
    before.save_checkpoint(own, client_state={"name": "own"})
    first = Run(local, 1)
    for _ in first.micro_steps(2):
        pass
    first.engine.save_checkpoint(own, client_state={"name": "node"})
    first.engine.save_checkpoint(own, tag="other", client_state={"name": "left out"})
    # Not all releases have this script.
    own_files = sorted(set(os.listdir(own)) - {"zero_to_torch.py"})
    first.checkpoints.export(str(local / "exported"), client_state={"name": "exported"})
    state = first.state()
    first.checkpoints.close()
    second = Run(local, 1, is_new=False)
    is_same = second.state() == state
    weights_only = second.engine.load_checkpoint(own, load_module_only=True)
    second.checkpoints.close()
    # A run on other nodes got further, and has left files.
    after = _engine(1)
    _, after_state = after.load_checkpoint(str(local / "exported"))
    after.global_steps = 3
    after.save_checkpoint(own)
    newer = Run(local, 1, is_new=False)
    newer.checkpoints.close()
    shared = {"shared": local / "shared", "shared_every": Every(steps=1)}
    third = Run(local / "third", 1, session_id="shared", **shared)
    for _ in third.micro_steps(2):
        third.checkpoints.step()
    third.checkpoints.close()
    fourth = Run(local / "fourth", 1, session_id="shared", **shared)
    fourth.checkpoints.close()
    return {
        "first": first.found[1]["name"],
        "own files": own_files,
        "second": (os.path.basename(os.path.dirname(second.found[0])), second.found[1]["name"]),
        "is same": is_same,
        "weights only": weights_only[1]["name"],
        "after": after_state["name"],
        "newer": (os.path.basename(os.path.dirname(newer.found[0])), newer.engine.global_steps),
        "from shared storage": fourth.engine.global_steps,
        "left": [path.name for path in local.glob("session-*/0/deepspeed")],
    }


def errors_of_wrong_use(local: Path) -> dict[str, str]:
    """What the user is told, by what was done."""
    engine = _engine(1)
    told = {
        "no engine": _told(lambda: install(engine.module, local=local)),
        "key": _told(lambda: install(engine, local=local, state={"deepspeed": engine})),
        "finite": _told(lambda: install(engine, local=local, finite=True)),
        "elastic": _told(lambda: install(_engine(1, elastic_checkpoint=True), local=local)),
        "experts": _told(lambda: install(_engine(0, model=_with_experts()), local=local)),
        "pipeline": _told(lambda: install(_pipeline(), local=local)),
    }
    checkpoints = install(engine, local=local)
    told["twice"] = _told(lambda: install(engine, local=local))
    told["not loaded"] = _told(lambda: engine.save_checkpoint("/nowhere"))
    told["not loaded, step"] = _told(checkpoints.step)
    checkpoints.close()
    told["closed"] = _told(checkpoints.step)
    run = Run(local, 1)
    for over in run.micro_steps(3):
        if over == 2:
            run.engine.save_checkpoint("/nowhere", tag="good")
    told["within"] = _told(lambda: run.engine.save_checkpoint("/nowhere"))
    assert not run.checkpoints.step()
    for _ in run.micro_steps(4):
        pass
    told["training"] = _told(lambda: run.engine.load_checkpoint("/nowhere"))
    run.checkpoints.close()
    again = install(_engine(1), local=local, session_id="zero 1 fp32")
    told["tag"] = _told(lambda: again.load_checkpoint("/nowhere", tag="bad"))
    again.close()
    other = install(_engine(2, model=torch.nn.Linear(4, 2)), local=local, session_id="zero 1 fp32")
    told["other model"] = _told(lambda: other.load_checkpoint("/nowhere"))
    other.close()
    return told


def _told(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointingException as error:
        return str(error)
    return "no error"


def _with_experts() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), MoE(4, torch.nn.Linear(4, 4), num_experts=2))


def _pipeline() -> Any:
    return _engine(0, model=PipelineModule([torch.nn.Linear(4, 1)], num_stages=1))


def _texts(value: Any) -> Iterator[bytes]:
    """Bytes of all that a state is made of."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__"):
        yield from _texts(vars(value))
    else:
        yield repr(value).encode()
