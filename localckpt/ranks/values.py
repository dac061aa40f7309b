"""Values of any size in the job's store, which takes some MiB at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import Store

__all__ = ["delete", "if_there", "look", "look_all", "put"]

# A store takes values of 8 MiB at most (libuv's part of torch's TCPStore).
_PART_NBYTES = 4 << 20
_ABSENT = "\0absent"


def put(store: Store, key: str, value: bytes) -> None:
    """Set a value: what does not fit into one follows under further keys."""
    parts = [value[i : i + _PART_NBYTES] for i in range(0, len(value), _PART_NBYTES)]
    for i, part in enumerate(parts[1:]):
        store.set(f"{key}.{i}", part)  # type: ignore[arg-type]
    head = len(parts[1:]).to_bytes(4, "little")
    store.set(key, head + b"".join(parts[:1]))  # type: ignore[arg-type]


def look(store: Store, key: str) -> bytes:
    """What :func:`put` has set. Waits for the key, as long as the store waits."""
    return _whole(store, key, store.get(key))


def look_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """As :func:`look`, for keys that are all there; one message where the store takes it."""
    extended = store.has_extended_api()  # type: ignore[attr-defined]
    heads = store.multi_get(list(keys)) if extended else [store.get(key) for key in keys]
    return [_whole(store, key, head) for key, head in zip(keys, heads, strict=True)]


def delete(store: Store, key: str) -> None:
    """Delete what :func:`put` has set, if it is there."""
    head = if_there(store, key)
    if head is not None:
        for i in range(int.from_bytes(head[:4], "little")):
            store.delete_key(f"{key}.{i}")
        store.delete_key(key)


def if_there(store: Store, key: str) -> bytes | None:
    """The value of a key; ``None`` if it is not there. Never waits."""
    # In one step, since a ``get`` of a key that is deleted meanwhile would wait for it.
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


def _whole(store: Store, key: str, head: bytes) -> bytes:
    more = range(int.from_bytes(head[:4], "little"))
    return b"".join([head[4:], *(store.get(f"{key}.{i}") for i in more)])
