"""Stand-ins for the classes, functions and objects of a skeleton, which check how they are used.

A stand-in refuses all arguments but those that a pickler writes. ``call_check.py`` unpickles a
skeleton with stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from localckpt.errors import CorruptShardError

__all__ = [
    "AnyObject",
    "FixedObject",
    "MadeOfLiterals",
    "NamedClass",
    "StandInTensor",
    "conversion",
    "function",
    "refuse",
]


def refuse(what: str) -> NoReturn:
    """Raise CorruptShardError for a skeleton that does what no pickler writes."""
    raise CorruptShardError(f"the skeleton {what}, in a way that no pickle does")


class AnyObject:
    """Stand-in for a class, function or object that accepts any call and any state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass


class FixedObject(AnyObject):
    """Stand-in for an object that a pickle never changes after making it."""

    def __setstate__(self, state: Any) -> None:
        refuse("gives a state to a value that has none")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.add(value)

    def append(self, item: Any) -> None:
        self.add(item)

    def extend(self, items: Any) -> None:
        self.add(items)

    def add(self, item: Any) -> None:
        refuse("puts items into a value that takes none")


class StandInTensor(FixedObject):
    """Stand-in for a tensor.

    Args:
        number: Number of the tensor in the image; ``None`` for one that is made of others.
    """

    def __init__(self, number: int | None = None) -> None:
        self.number = number


class NamedClass(FixedObject):
    """Stand-in for a class that a pickle uses as a value and never calls."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        refuse("calls a class that is not called")


class MadeOfLiterals(AnyObject):
    """Stand-in for a class that a pickle calls with plain containers and texts only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, AnyObject) for value in args):
            refuse("makes a value of another")
        return object.__new__(cls)


def conversion(*kinds: type) -> type[AnyObject]:
    """Make a stand-in for a class that is called with one value of these types, or none."""

    class Conversion(AnyObject):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 or kwargs or any(type(value) not in kinds for value in args):
                refuse("converts a value")
            return object.__new__(cls)

    return Conversion


def function(check: Callable[..., Any]) -> type[AnyObject]:
    """Make a stand-in for a function; ``check(*args)`` returns the stand-in of the result."""

    class Function(NamedClass):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs:
                refuse("names arguments of a function")
            try:
                return check(*args)
            except TypeError:
                refuse("calls a function with other arguments")

    return Function
