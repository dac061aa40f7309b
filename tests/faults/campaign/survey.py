"""What lies on the nodes, read without the code under test but for the bytes an image must have."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import xxhash

from localckpt.errors import MismatchError
from localckpt.ids import SAVES_AN_ATTEMPT, Generation, ShardIdentity
from localckpt.lineage import Lineage
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.image import pack
from tests.faults.campaign.job import SESSION, state_of_attempt

__all__ = ["Copy", "Survey", "Version", "look", "newest_first", "session_files"]


class Version(NamedTuple):
    """Names a checkpoint. Which one is newer, :func:`newest_first` says."""

    epoch: int
    iteration: int
    sequence: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Copy:
    """One file that may be a shard."""

    node: str
    path: Path
    owner: int = -1
    version: Version | None = None
    """``None`` if its header cannot be read."""
    attempt: int | None = None
    """Whose state it holds, bit for bit; ``None`` if nobody's."""
    lineage: Lineage | None = None

    @property
    def is_good(self) -> bool:
        return self.attempt is not None

    @property
    def is_named_right(self) -> bool:
        """Whether nothing else can come to have its name."""
        words = self.path.name.split(".")
        return self.version is not None and words[:2] == [
            f"{self.version.iteration:012d}",
            str(self.owner),
        ]


@dataclass(frozen=True)
class Survey:
    """All shards on all nodes that are there."""

    world_size: int
    copies: tuple[Copy, ...]

    def complete(self, *, good: bool) -> list[Version]:
        """Checkpoints of which each rank's shard is there, the newest first.

        Args:
            good: Whether only undamaged copies count.
        """
        owners: dict[Version, set[int]] = defaultdict(set)
        for copy in self.copies:
            if copy.version is not None and (copy.is_good or not good):
                owners[copy.version].add(copy.owner)
        everyone = set(range(self.world_size))
        return [v for v in newest_first(self) if owners.get(v, set()) >= everyone]

    def places(self, version: Version) -> set[tuple[str, int]]:
        """(node, owner) of its good copies that must stay.

        One that has the name of another shard is as good, and is overwritten when a new copy is
        made of that shard.
        """
        return {
            (copy.node, copy.owner)
            for copy in self.copies
            if copy.version == version and copy.is_good and copy.is_named_right
        }

    def attempts(self, version: Version) -> set[int]:
        """Whose states its good copies hold."""
        return {c.attempt for c in self.copies if c.version == version and c.attempt is not None}

    def version_of(self, attempt: int) -> Version | None:
        """What the states of an attempt were saved as."""
        versions = {c.version for c in self.copies if c.attempt == attempt}
        assert len(versions) <= 1, f"attempt {attempt} was saved as {versions}"
        return versions.pop() if versions else None


def newest_first(*surveys: Survey) -> list[Version]:
    """All checkpoints of which something is there, in the order in which a restart tries them.

    As docs/guarantees.md says it: what was given up on purpose counts last, all else by iteration.
    """
    lineages = {copy.version: copy.lineage for s in surveys for copy in s.copies if copy.version}
    left, ordered = set(lineages), list[Version]()
    while left:
        alive: list[Version] = []
        for version in sorted(left, reverse=True):
            if not any(_gives_up(later, version, lineages) for later in alive):
                alive.append(version)
        ordered += sorted(alive, key=lambda v: (v.iteration, v), reverse=True)
        left -= set(alive)
    return ordered


def _gives_up(later: Version, version: Version, lineages: Mapping[Version, Lineage | None]) -> bool:
    lineage = lineages[later]
    if later.epoch <= version.epoch:
        return False
    if lineage is None:
        return lineages[version] is None
    return version.iteration > lineage.resumed_at and any(
        epoch == (version.epoch, version.sequence // SAVES_AN_ATTEMPT)
        and version.iteration <= up_to
        for epoch, up_to in lineage.given_up
    )


def look(
    nodes: Mapping[str, Path], world_size: int, attempts_at: Callable[[int], Iterable[int]]
) -> Survey:
    """Read all shards.

    Args:
        nodes: Each node's store.
        world_size: Ranks of the job.
        attempts_at: The attempts that saved an iteration.
    """
    copies = [
        _identify(node, path, world_size, attempts_at)
        for node, store in nodes.items()
        for path in session_files(store, (".safetensors",))
    ]
    return Survey(world_size, tuple(copies))


def session_files(store: Path, endings: Collection[str]) -> list[Path]:
    """Files of a store by the ends of their names."""
    paths = store.glob(f"session-{SESSION}/*/*")
    return sorted(path for path in paths if path.name.endswith(tuple(endings)))


def _identify(
    node: str, path: Path, world_size: int, attempts_at: Callable[[int], Iterable[int]]
) -> Copy:
    content = path.read_bytes()
    try:
        stop = 8 + int.from_bytes(content[:8], "little")
        said = json.loads(content[8:stop])["__metadata__"]
        version = Version(*(int(said[key]) for key in ("epoch", "iteration", "sequence")))
        owner = int(said["rank"])
        told = said.get("lineage")
        lineage = None if told is None else Lineage.from_json(json.loads(told))
    except (ValueError, KeyError, TypeError, MismatchError):
        return Copy(node, path)
    digest = xxhash.xxh3_128_digest(content)
    for attempt in attempts_at(version.iteration):
        if 0 <= owner < world_size and digest == _digest(
            version, lineage, owner, world_size, attempt
        ):
            return Copy(node, path, owner, version, attempt, lineage)
    return Copy(node, path, owner, version, lineage=lineage)


@lru_cache(maxsize=500)
def _digest(
    version: Version, lineage: Lineage | None, owner: int, world_size: int, attempt: int
) -> bytes:
    """Of the image that a rank's shard of an attempt must be."""
    generation = Generation(version.epoch, version.sequence)
    identity = ShardIdentity(
        SESSION, generation, version.iteration, owner, world_size, lineage=lineage
    )
    image = pack(wrapped(state_of_attempt(owner, version.iteration, attempt)), identity)
    return xxhash.xxh3_128_digest(image.view)
