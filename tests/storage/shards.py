"""What the tests of this room share: shards of small states, and processes that hold a store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from localckpt.ids import Generation, ShardIdentity
from localckpt.memory.copying import Copier
from localckpt.memory.gpu_copies import SideStreams
from localckpt.state_dict.image import ImagePlanner, unpack
from localckpt.state_dict.source import MemorySource
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.store import Slot
from localckpt.storage.write import ShardWrite, write_shard

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def identity(iteration: int, rank: int = 0, session: str = "run") -> ShardIdentity:
    """A shard's identity; each iteration is its own save."""
    return ShardIdentity(session, Generation(1, iteration), iteration, rank, 8)


def everything(_: ShardIdentity) -> bool:
    """For ``prune``: no shard stays."""
    return True


def older_than(who: ShardIdentity) -> Callable[[ShardIdentity], bool]:
    """For ``prune``: shards of earlier saves go."""
    return lambda shard: shard.iteration < who.iteration


def state(iteration: int, nbytes: int = 100_000) -> dict[str, Any]:
    """A state that can be told from that of any other iteration, all through."""
    words = torch.arange(nbytes // 8) * 1000 + iteration
    return {"iteration": iteration, "weight": words, "bias": torch.tensor(float(iteration))}


def filled(
    store: DirectoryStore, who: ShardIdentity, nbytes: int = 100_000, content: Any = None
) -> Slot:
    """Reserve a slot for a shard, and fill it; its digests are still to be computed."""
    capture = ImagePlanner().capture(content or state(who.iteration, nbytes))
    slot = store.reserve(who, capture.nbytes(who), 5.0)
    written = capture.write(slot.image, who, Copier(1), SideStreams())
    slot.filled(written.covered_nbytes, MemorySource(slot.image), is_complete=False)
    return slot


def staged(store: DirectoryStore, who: ShardIdentity, nbytes: int = 100_000) -> ShardWrite:
    """Fill a slot with a shard, and give what the job that commits it writes."""
    (write,) = store.writes([filled(store, who, nbytes)])
    return write


def slots_of(store: DirectoryStore, who: ShardIdentity) -> list[Slot]:
    return [slot for slot in store.slots if slot.identity == who]


def save(store: DirectoryStore, who: ShardIdentity, nbytes: int = 100_000) -> ShardIdentity:
    """Fill a slot, write it, find the shard, and give the slot back."""
    write_shard(staged(store, who, nbytes))
    assert store.holds(who)
    store.release(slots_of(store, who))
    return who


def assert_loads(store: DirectoryStore, who: ShardIdentity, nbytes: int = 100_000) -> None:
    """The store gives back exactly what was saved, every block verified."""
    with closing(store.open(who)) as source:
        loaded, saved = unpack(source, expect=who), state(who.iteration, nbytes)
    assert loaded.keys() == saved.keys()
    assert torch.equal(loaded["weight"], saved["weight"])
    assert torch.equal(loaded["bias"], saved["bias"])


def found(store: DirectoryStore) -> set[ShardIdentity]:
    return {stored.record.identity for stored in store.list_stored() if stored.record}


def names(folder: Path) -> set[str]:
    """What lies in a folder, by the last part of each name."""
    return {path.name.rpartition(".")[2] for path in folder.iterdir()}


HOLD = """
import sys, time
from pathlib import Path
from localckpt.ids import Generation, ShardIdentity
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.directory import MemoryStore
kind, root, session, rank = sys.argv[1:5]
if kind == "memory":
    store = MemoryStore(root, session, int(rank), 5.0)
else:
    store = DirectoryStore(root, session, int(rank), 5.0)
who = ShardIdentity(session, Generation(1, 1), 1, int(rank), 8)
slot = store.reserve(who, 100_000, 5.0)
slot.filled(90_000, None, is_complete=False)
(job,) = store.writes([slot])
if kind != "memory":
    job.dirty.write_bytes(b"half of a shard")
assert "torch" not in sys.modules
print("holds", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(
    kind: str, root: Path, session: str = "run", rank: int = 0, within: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A process that has opened a store and is in the middle of a save; killed at the end.

    A command may start it ``within`` something.
    """
    process = subprocess.Popen(
        [*within, sys.executable, "-c", HOLD, kind, str(root), session, str(rank)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=PATIENCE_S)
