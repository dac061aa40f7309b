"""What every rank has imported when it starts: the server that it is forked from imports this."""

import gc

import hypothesis
import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import examples.two_tiers
import localckpt.async_save.queue
import localckpt.global_tier.manager
import localckpt.managers.local
import tests.cli.commands
import tests.managers.jobs
import tests.ranks

__all__ = ["examples", "hypothesis", "localckpt", "pytest", "tests", "torch"]

# A collection in a rank would look through all of this, and so copy every page that it is on.
gc.collect()
gc.freeze()
