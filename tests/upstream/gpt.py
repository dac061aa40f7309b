"""A small GPT of Megatron-Core that trains with tensor parallelism on the CPU."""

from __future__ import annotations

import contextlib
import random
import signal
from argparse import Namespace
from typing import Any

import numpy as np
import torch

__all__ = ["Training"]

_LENGTH, _VOCABULARY = 16, 64


class Training:
    """Model, optimizer and random state of this rank; all ranks make it together.

    Args:
        seed: Of the weights it begins with.
    """

    def __init__(self, seed: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        from megatron.core.transformer.transformer_config import TransformerConfig

        # There is no CUDA generator, and nothing is dropped out.
        type(get_cuda_rng_tracker()).fork = lambda *_: contextlib.nullcontext()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
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
        options = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(options, [self.parallel])
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._metadata = {
            "distrib_optim_sharding_type": "dp_reshardable",
            "dp_cp_group": self.group,
        }

    def step(self) -> None:
        """Train on random tokens."""
        tokens = torch.randint(0, _VOCABULARY, (2, _LENGTH))
        positions = torch.arange(_LENGTH).expand(2, _LENGTH)
        mask = torch.triu(torch.ones(_LENGTH, _LENGTH), 1).bool()[None, None]
        self.parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.parallel(tokens, positions, mask, labels=tokens).mean().backward()
        self.parallel.finish_grad_sync()
        self.optimizer.step()

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
            "rng_state": ShardedObject("rng_state", [generators], (1, 2), (0, rank)),
        }
        return state if is_loading else state | self._common_state(iteration)

    def load(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        # Without Transformer Engine, Megatron-Core saves the step and does not take it over.
        (step,) = {g["step"] for g in state["optimizer"]["optimizer"]["param_groups"]}
        for moments in self._adam.state.values():
            moments["step"] = torch.tensor(step)
        generators = state["rng_state"][0]
        random.setstate(generators["random_rng_state"])
        np.random.set_state(generators["np_rng_state"])
        torch.set_rng_state(generators["torch_rng_state"])

    def tensors(self) -> list[torch.Tensor]:
        """Weights and optimizer state, copied."""
        names = ("exp_avg", "exp_avg_sq", "step")
        moments = [state[name] for state in self._adam.state.values() for name in names]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]

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
