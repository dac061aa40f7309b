"""Releases of the frameworks: the oldest that each plug-in works with, and the check for it."""

from __future__ import annotations

import inspect
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

NEWEST = {"torchtitan": "0.3.0", "transformers": "5.23.0"}
"""Newest release that a plug-in is tested with which takes the place of a framework's methods."""

_RELEASE = re.compile(r"\d+(?:\.\d+)*")


class UnsupportedVersionError(CheckpointingException, ImportError):
    """A framework is older, or otherwise, than its plug-in works with; nothing was changed.

    ``gone`` are methods in whose place the plug-in would put its own, and that are not called.
    """

    def __init__(self, framework: str, installed: str, oldest: str, gone: str = "") -> None:
        text = f"needs {oldest} or newer: run `pip install '{framework}>={oldest}'`"
        if gone:
            newest = NEWEST[framework]
            text = (
                f"puts its own in place of {gone}, which this release does not call any more: "
                f"nothing would be saved or loaded. It works with releases from {oldest} on, and "
                f"was tested up to {newest}: run `pip install '{framework}=={newest}'`"
            )
        super().__init__(
            f"{framework} {installed} is installed, and localckpt's plug-in for it {text}. Nothing "
            f"was changed"
        )
        self.framework = framework
        self.installed = installed
        self.oldest = oldest
        self.gone = gone

    def __reduce__(self) -> tuple[type[UnsupportedVersionError], tuple[str, str, str, str]]:
        return type(self), (self.framework, self.installed, self.oldest, self.gone)


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


def require_called(framework: str, owner: type, *methods: str) -> None:
    """Check that a class of a framework calls methods of its own that a plug-in overrides.

    Raises:
        UnsupportedVersionError: It has one no more, or no method of the class calls it by its name.
    """
    found = (m for kind in owner.__mro__ for m in vars(kind).values() if callable(m))
    codes = (getattr(inspect.unwrap(method), "__code__", None) for method in found)
    called = {name for code in codes if code is not None for name in code.co_names}
    if gone := [name for name in methods if name not in called or not hasattr(owner, name)]:
        try:
            installed = version(framework)
        except PackageNotFoundError:
            installed = "of an unknown release"
        raise UnsupportedVersionError(framework, installed, OLDEST[framework], ", ".join(gone))


def _release(text: str) -> tuple[int, ...]:
    """Numbers of a version, without zeros at the end; a pre-release counts as its release."""
    numbers = _RELEASE.match(text)
    found = [int(number) for number in numbers[0].split(".")] if numbers else []
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)
