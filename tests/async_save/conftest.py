"""What the tests of the callers and of the queue share."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest


@pytest.fixture
def our_children() -> Callable[[], list[psutil.Process]]:
    """The children that this process has got since the test began; others may have theirs."""
    before = set(psutil.Process().children())

    return lambda: [child for child in psutil.Process().children() if child not in before]
