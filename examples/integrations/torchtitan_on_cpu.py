"""Lets torchtitan's trainer run without a GPU, to try things out; by itself it needs one."""

import sys
import types
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule

__all__ = ["on_cpu", "prepare"]


def prepare() -> None:
    """Have torchtitan find a CPU where it looks for a GPU; called before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    memory = types.SimpleNamespace(total_memory=psutil.virtual_memory().total)
    for name, value in {
        "current_device": 0,
        "get_device_name": "CPU",
        "get_device_properties": memory,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }.items():
        setattr(torch.cpu, name, _giving(value))
    if not hasattr(dist, "set_timeout"):
        # torchtitan 0.3.0 is for a torch that has it; 2.13 has not.
        setattr(dist, "set_timeout", _set_pg_timeout)  # noqa: B010
    # These kernels are for triton, which torch has on GPUs only. No CPU calls them.
    kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = _giving(None)  # type: ignore[method-assign]
    sys.modules[kernels.__name__] = kernels


def on_cpu(config: Any) -> Any:
    """A config of torchtitan's trainer, with what it has no CPU implementation of left out."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    parallelize = config.model_spec.parallelize_fn

    def parallelize_with_sums(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        model = parallelize(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo cannot divide while it sums.
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = parallelize_with_sums
    return config


def _giving(value: Any) -> Callable[..., Any]:
    return lambda *_: value
