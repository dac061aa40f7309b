"""Values of any size in the job's store, which takes some MiB at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

# A store takes values of 8 MiB at most (libuv's part of torch's TCPStore).
_PART_NBYTES = 4 << 20
_MOST_PARTS = 1024
_ABSENT = "\0absent"


@dataclass(frozen=True, slots=True)
class Message:
    """Record, anything that JSON can carry, and bytes of any size beside it."""

    record: Any = None
    data: bytes = b""

    def to_bytes(self) -> bytes:
        record = json.dumps(self.record).encode()
        return b"".join([len(record).to_bytes(4, "little"), record, self.data])

    @classmethod
    def from_bytes(cls, packed: bytes) -> Message:
        end = 4 + int.from_bytes(packed[:4], "little")
        return cls(json.loads(packed[4:end]), packed[end:])


def put(store: Store, key: str, value: bytes) -> None:
    """Set a value: what does not fit into one follows under further keys."""
    store.set(key, _put_all_but_the_head(store, key, value))  # type: ignore[arg-type]


def put_first(store: Store, key: str, value: bytes) -> bytes:
    """Set a value unless the key is there; return the one that holds."""
    head = _put_all_but_the_head(store, key, value)
    held: bytes = store.compare_set(key, "", head)  # type: ignore[arg-type]
    # Of a value that came too late nothing stays.
    for i in range(int.from_bytes(held[:4], "little"), int.from_bytes(head[:4], "little")):
        store.delete_key(f"{key}.{i}")
    return whole(store, key, held)


def _put_all_but_the_head(store: Store, key: str, value: bytes) -> bytes:
    parts = [value[i : i + _PART_NBYTES] for i in range(0, len(value), _PART_NBYTES)]
    for i, part in enumerate(parts[1:]):
        store.set(f"{key}.{i}", part)  # type: ignore[arg-type]
    # The number of further keys, and the first part.
    return len(parts[1:]).to_bytes(4, "little") + b"".join(parts[:1])


def look(store: Store, key: str) -> bytes | None:
    """Read a value that :func:`put` has set, without waiting; ``None`` if the key is not there.

    Raises ValueError if it is not whole: another rank may be deleting it.
    """
    head = if_there(store, key)
    return None if head is None else whole(store, key, head)


def look_all(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """Read values as :func:`look` does; those that are all there in one message if the store can.

    Keys that are there are not deleted meanwhile.
    """
    if not store.has_extended_api() or not store.check(list(keys)):  # type: ignore[attr-defined]
        return [look(store, key) for key in keys]
    heads = store.multi_get(list(keys))
    return [whole(store, key, head) for key, head in zip(keys, heads, strict=True)]


def take(store: Store, key: str) -> bytes:
    """Read a value as :func:`look` does, and delete it; raises ValueError if it is not there."""
    if (value := look(store, key)) is None:
        raise ValueError(f"{key} is not there")
    drop(store, key, len(value))
    return value


def drop(store: Store, key: str, nbytes: int) -> None:
    """Delete a value of a known size, if it is there."""
    for i in range((nbytes - 1) // _PART_NBYTES):
        store.delete_key(f"{key}.{i}")
    store.delete_key(key)


def delete(store: Store, key: str) -> None:
    head = if_there(store, key)
    if head is not None:
        for i in range(min(int.from_bytes(head[:4], "little"), _MOST_PARTS)):
            store.delete_key(f"{key}.{i}")
        store.delete_key(key)


def if_there(store: Store, key: str) -> bytes | None:
    """The value of a key; ``None`` if it is not there. Never waits."""
    # In one step, since a ``get`` of a key that is deleted meanwhile would wait for it.
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


def whole(store: Store, key: str, head: bytes) -> bytes:
    """Return a value of which the first part is ``head``; raises ValueError as :func:`look`."""
    more = int.from_bytes(head[:4], "little")
    if len(head) < 4 or more > _MOST_PARTS:
        raise ValueError(f"{key} is said to have {more} further parts")
    parts = [if_there(store, f"{key}.{i}") for i in range(more)]
    if None in parts:
        raise ValueError(f"{key} is not whole")
    return b"".join([head[4:], *filter(None, parts)])
