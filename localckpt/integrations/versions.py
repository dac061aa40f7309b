"""Releases of the frameworks: the oldest that each plug-in works with, and the check for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from localckpt.errors import CheckpointingException

OLDEST = {
    "accelerate": "1.3.0",
    "deepspeed": "0.18.6",
    "lightning": "2.5.3",
    "megatron-core": "0.15.0",
    "ray": "2.51.0",
    "torchft": "0.2.0",
    "torchtitan": "0.3.0",
    "transformers": "4.57.1",
}
"""Oldest release of each distribution that its plug-in is tested with."""

_RELEASE = re.compile(r"\d+(?:\.\d+)*")


class UnsupportedVersionError(CheckpointingException, ImportError):
    """A framework is older than what its plug-in works with; nothing was changed."""

    def __init__(self, framework: str, installed: str, oldest: str) -> None:
        super().__init__(
            f"{framework} {installed} is installed, and localckpt's plug-in for it needs {oldest} "
            f"or newer: run `pip install '{framework}>={oldest}'`. Nothing was changed"
        )
        self.framework = framework
        self.installed = installed
        self.oldest = oldest

    def __reduce__(self) -> tuple[type[UnsupportedVersionError], tuple[str, str, str]]:
        return type(self), (self.framework, self.installed, self.oldest)


def require(framework: str, distribution: str | None = None) -> None:
    """Check the version of a framework, without an import of it.

    One without a version passes: it is not installed as a distribution, such as a checkout on
    ``PYTHONPATH``, or it is one that calls itself 0.0.0.

    ``framework`` is a key of :data:`OLDEST`; ``distribution`` a name that it may be installed under
    as well.
    """
    oldest = OLDEST[framework]
    for name in filter(None, (framework, distribution)):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if () < _release(installed) < _release(oldest):
            raise UnsupportedVersionError(name, installed, oldest)
        return


@contextmanager
def at_least(framework: str, distribution: str | None = None) -> Iterator[None]:
    """Check a version as :func:`require` does, before the imports inside of the ``with``."""
    require(framework, distribution)
    yield


def _release(text: str) -> tuple[int, ...]:
    """Numbers of a version, without zeros at the end; a pre-release counts as its release."""
    numbers = _RELEASE.match(text)
    found = [int(number) for number in numbers[0].split(".")] if numbers else []
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)
