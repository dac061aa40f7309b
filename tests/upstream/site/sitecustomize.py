"""Lets Megatron-Core and NVRx run without a GPU, in each process that finds this file first.

Python imports it when it starts, so it reaches the workers that upstream's queues spawn, too.
"""

from typing import Any

import torch


def _same(value: Any = None, *_: Any, **__: Any) -> Any:
    return value


# The CPU stands in for the one GPU.
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = torch.cuda.synchronize = _same  # type: ignore[assignment]
torch.Tensor.cuda = _same  # type: ignore[method-assign,assignment]
torch.nn.Module.cuda = _same  # type: ignore[method-assign,assignment]
# Importing Megatron-Core compiles functions that no test calls often.
torch.compile = lambda function=None, **_: function or _same  # type: ignore[assignment]
