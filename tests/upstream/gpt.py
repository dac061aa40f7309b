"""A small GPT of Megatron-Core that trains with tensor or data parallelism on the CPU."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from argparse import Namespace
from importlib import import_module
from typing import Any

import numpy as np
import torch

from tests.upstream import fused_adam

__all__ = ["Training"]

# Megatron-Core looks for it there; of the rest of Apex it finds nothing.
sys.modules.setdefault("apex.optimizers", fused_adam)

_LENGTH, _VOCABULARY = 16, 64


def _state_class() -> Any:
    # Megatron-LM imports it where it saves only.
    core = import_module("megatron.core.dist_checkpointing.tensor_aware_state_dict")
    return core.MCoreTensorAwareStateDict


class Training:
    """Model, optimizer and random state of this rank; all ranks make it together.

    Args:
        seed: Of the weights it begins with.
        tensor_parallel: Number of ranks that share the weights; the others share the optimizer.
    """

    def __init__(self, seed: int, *, tensor_parallel: int = 2) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        from megatron.core.transformer.transformer_config import TransformerConfig

        # There is no CUDA generator, and nothing is dropped out.
        type(get_cuda_rng_tracker()).fork = lambda *_: contextlib.nullcontext()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
        )
        self.model = GPTModel(config, get_gpt_layer_local_spec(), _VOCABULARY, _LENGTH)
        self.parallel = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), self.model
        )
        options = OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-5, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(options, [self.parallel])
        self._scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-3,
            min_lr=1e-5,
            lr_warmup_steps=2,
            lr_decay_steps=200,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.1,
            wd_incr_steps=200,
            wd_incr_style="linear",
        )
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._cached: Any = None
        self._metadata = {
            "distrib_optim_sharding_type": "dp_reshardable",
            "dp_cp_group": self.group,
        }

    def step(self) -> float:
        """Train on random tokens; return the loss."""
        tokens = torch.randint(0, _VOCABULARY, (2, _LENGTH))
        positions = torch.arange(_LENGTH).expand(2, _LENGTH)
        mask = torch.triu(torch.ones(_LENGTH, _LENGTH), 1).bool()[None, None]
        self.parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.parallel(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        self.parallel.finish_grad_sync()
        self.optimizer.step()
        self._scheduler.step(increment=1)
        return float(loss)

    def sharded_state(self, iteration: int = 0, *, is_loading: bool = False) -> dict[str, Any]:
        """What Megatron-LM's ``save_checkpoint`` puts together, and ``load_checkpoint`` fills."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        model = self.model.sharded_state_dict(metadata=self._metadata)
        generators = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
        }
        rank = torch.distributed.get_rank()
        state = {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=self._metadata
            ),
            "opt_param_scheduler": self._scheduler.state_dict(),
            "rng_state": ShardedObject("rng_state", [generators], (1, 2), (0, rank)),
        }
        return state if is_loading else state | self._common_state(iteration)

    def tensor_aware(self, iteration: int, algorithm: str = "fully_parallel") -> Any:
        """The state as Megatron-LM gives it to a manager."""
        made, self._cached = _state_class().from_state_dict(
            self.sharded_state(iteration),
            algo=algorithm,
            cached_metadata=self._cached,
            parallelization_group=self.group,
        )
        return made

    def take_over(self, loaded: Any, algorithm: str = "fully_parallel") -> dict[str, Any]:
        """Load what a manager has loaded."""
        state: dict[str, Any] = loaded.to_state_dict(
            self.sharded_state(is_loading=True), algo=algorithm, parallelization_group=self.group
        )
        self._load(state)
        return state

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["opt_param_scheduler"])
        generators = state["rng_state"][0]
        random.setstate(generators["random_rng_state"])
        np.random.set_state(generators["np_rng_state"])
        torch.set_rng_state(generators["torch_rng_state"])

    def tensors(self) -> list[torch.Tensor]:
        names = ("exp_avg", "exp_avg_sq")
        moments = [state[name] for state in self._adam.state.values() for name in names]
        steps = [torch.tensor(group["step"]) for group in self._adam.param_groups]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments, *steps)]

    @property
    def _adam(self) -> torch.optim.Optimizer:
        adam: torch.optim.Optimizer = self.optimizer.chained_optimizers[0].optimizer
        return adam

    def _common_state(self, iteration: int) -> dict[str, Any]:
        from megatron.core.enums import ModelType
        from megatron.core.rerun_state_machine import RerunMode, RerunState
        from megatron.core.transformer.enums import AttnBackend

        arguments = Namespace(
            attention_backend=AttnBackend.auto,
            model_type=ModelType.encoder_or_decoder,
            params_dtype=torch.bfloat16,
            exit_signal=signal.SIGTERM,
            tensor_model_parallel_size=2,
        )
        return {
            "args": arguments,
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "rerun_state_machine": {
                "mode": RerunMode.DISABLED,
                "state": RerunState.NOT_RUNNING_YET,
            },
        }
