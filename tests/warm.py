"""What every rank has imported when it starts: the server that it is forked from imports this."""

import hypothesis
import pytest

import localckpt.async_save.queue
import localckpt.managers.local
import localckpt.managers.memory
import tests.ranks

__all__ = ["hypothesis", "localckpt", "pytest", "tests"]
