"""Lets Megatron-Core and NVRx run without a GPU, in each process that finds this file first.

Python imports it when it starts, so it reaches the workers that upstream's queues spawn, too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# All that Megatron-Core before 0.16 lacks in numpy 2.
np.product = np.prod  # type: ignore[attr-defined]

# The CPU stands in for the one GPU. Torch looks these functions up, so none stands for two.
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda device: None
torch.cuda.synchronize = lambda device=None: None
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]

_TYPE = torch.Tensor.type
# Megatron-Core looks at these names to see that parameters are on a GPU.
torch.Tensor.type = lambda self, *args, **options: (  # type: ignore[method-assign,assignment]
    _TYPE(self, *args, **options)
    if args or options
    else str(_TYPE(self)).replace("torch.", "torch.cuda.")
)


def _on_the_cpu(call: Callable[..., Any]) -> Callable[..., Any]:
    def cpu(value: Any) -> Any:
        return "cpu" if isinstance(value, (str, torch.device)) and "cuda" in str(value) else value

    return lambda *args, **options: call(*map(cpu, args), **{n: cpu(options[n]) for n in options})


torch.Tensor.to = _on_the_cpu(torch.Tensor.to)  # type: ignore[method-assign,assignment]
for _name in (
    *("arange", "empty", "empty_like", "full", "load", "ones", "rand", "randn", "tensor"),
    *("zeros", "zeros_like"),
):
    setattr(torch, _name, _on_the_cpu(getattr(torch, _name)))
# Importing Megatron-Core compiles functions that no test calls often.
torch.compile = lambda function=None, **_: function or (lambda compiled: compiled)  # type: ignore[assignment]
