"""Reads of shared storage by a team: what several ranks want is read once, and passed on.

Ranks that read the same parts of the same tensors, as those of data parallelism, are divided into
teams. Each member reads its share into its own tensors, and sends it to the others from there. A
trial at the beginning tells whether that takes less time than to read everything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from localckpt.global_tier.metadata import StorageInfo
from localckpt.memory.tensor_bytes import copy_values
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.ranks.verdict import PerRank
from localckpt.replication.parts import PARCEL_NBYTES, exchange_parts
from localckpt.replication.retrieval import new_name
from localckpt.replication.transport import connect
from localckpt.state_dict.boxes import rectangles_of, whole

# More members read less each, and have more memory and connections for the parts of the others.
_MOST_MEMBERS = 8
# To read less than that takes no longer than to agree on it.
_LEAST_NBYTES = 64 << 20
# Smaller ones may differ between ranks that have all else alike, as random generators do.
_LEAST_ITEM_NBYTES = 64 << 10
# What each member reads and sends in the trial.
_TRIED_NBYTES = 2 * PARCEL_NBYTES
# Times that the sending may take longer than the trial's.
_PATIENCE = 10


class Team(NamedTuple):
    """Ranks that read the same; ``name`` is that of their connections."""

    name: str
    ranks: tuple[int, ...]


class _Part(NamedTuple):
    """Part of a tensor: what is read, and the tensor's own memory for it."""

    item: ReadItem
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def values_in(self, memory: memoryview) -> torch.Tensor:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(self.tensor.dtype).view(self.tensor.shape)


class TeamRead:
    """One load of one rank; all ranks make it, and call :meth:`read`.

    Args:
        read_items: Reads items of the plan into the planner's tensors.
    """

    def __init__(
        self,
        plan: LoadPlan,
        planner: DefaultLoadPlanner,
        places: Mapping[Any, StorageInfo],
        ranks: Ranks,
        what: str,
        read_items: Callable[[list[ReadItem]], None],
    ) -> None:
        self._planner, self._ranks, self._what = planner, ranks, what
        self._read_items = read_items
        self._connected = 0
        self._plan, self._places = plan, places
        self._parts: list[_Part] = []
        self._alone: list[ReadItem] = []

    def read(self) -> None:
        """Read what is planned; raises the same errors on all ranks."""
        team = self._form_team()
        if team is None:
            self._on_all("load", lambda: self._read(self._parts, self._alone))
            return
        shares = _shares(self._parts, len(team.ranks))
        tried = [_first(share, _TRIED_NBYTES) for share in shares]
        rest = [share[len(those) :] for share, those in zip(shares, tried, strict=True)]
        mine = team.ranks.index(self._ranks.rank)
        read_s = self._on_all("read parts of", lambda: self._read(tried[mine], self._alone))
        timeout_s = self._ranks.timeout_s
        sent_s = self._on_all("pass on parts of", lambda: self._pass_on(team, tried, timeout_s))
        nbytes, of_trial = (sum(p.nbytes for share in s for p in share) for s in (rest, tried))
        expected_s = self._ranks.decide(
            f"see how fast the parts of {self._what} come",
            lambda: [sent_s, (len(team.ranks) - 1) * read_s, nbytes / max(1, of_trial)],
            _expected_s,
            read=shaped(float | None),
        )
        if expected_s is None:
            self._on_all("load", lambda: self._read([part for share in rest for part in share]))
            return
        within_s = timeout_s + _PATIENCE * expected_s
        self._on_all("read", lambda: self._read(rest[mine]), within_s)
        self._on_all("pass on", lambda: self._pass_on(team, rest, within_s), within_s)

    def _form_team(self) -> Team | None:
        """Find the ranks that read the same; ``None`` on all ranks if there are none anywhere."""

        def report() -> list[Any]:
            self._find_parts()
            digest = xxhash.xxh3_128()
            for item, tensor in self._parts:
                digest.update(f"{item.storage_index}{item.storage_offsets}{item.lengths}".encode())
                digest.update(str(tensor.dtype).encode())
            return [digest.hexdigest(), sum(part.nbytes for part in self._parts)]

        what = f"find the ranks that read the same of {self._what}"
        name, team = self._ranks.decide(
            what, report, _teams, read=shaped((str | None, list | None))
        )
        return None if name is None else Team(f"{name}/{min(team)}", tuple(team))

    def _find_parts(self) -> None:
        """Find what a team may share; the rest is read alone."""
        parts: list[_Part] = []
        planner, places = self._planner, self._places
        for item in self._plan.items:
            tensor, place = None, places.get(item.storage_index)
            if item.type == LoadItemType.TENSOR and 0 not in item.lengths:
                tensor = planner.resolve_tensor(item).detach()
            # What is wrong with an item is said by who reads it.
            is_good = tensor is not None and place is not None and tensor.shape == item.lengths
            if tensor is None or not is_good or tensor.nbytes < _LEAST_ITEM_NBYTES:
                self._alone.append(item)
            elif place is not None and place.transform_descriptors:
                parts.append(_Part(item, tensor))
            else:
                parts += _divided(item, tensor)

        def in_files(part: _Part) -> tuple[str, int, tuple[int, ...]]:
            info = places[part.item.storage_index]
            return info.relative_path, info.offset, tuple(part.item.storage_offsets)

        self._parts = sorted(parts, key=in_files)

    def _on_all(self, does: str, work: Callable[[], None], timeout_s: float | None = None) -> float:
        """Do work on all ranks; return the seconds that it took here."""
        took_s = 0.0

        def timed() -> None:
            nonlocal took_s
            began = time.monotonic()
            work()
            took_s = time.monotonic() - began

        what = f"{does} {self._what}"
        self._ranks.commit(what, timed, lambda _: None, timeout_s=timeout_s)
        return took_s

    def _read(self, parts: Iterable[_Part], alone: Iterable[ReadItem] = ()) -> None:
        self._read_items([*alone, *(part.item for part in parts)])

    def _pass_on(self, team: Team, shares: Sequence[Sequence[_Part]], timeout_s: float) -> None:
        """Send this member's share to the others, and take theirs."""
        of_rank = dict(zip(team.ranks, shares, strict=True))
        mine = of_rank.pop(self._ranks.rank)
        if not of_rank:
            return

        def read(placed: list[tuple[_Part, memoryview]]) -> None:
            for part, memory in placed:
                copy_values(part.values_in(memory), part.tensor)

        def take(part: _Part, memory: memoryview) -> None:
            with torch.no_grad():
                copy_values(part.tensor, part.values_in(memory))
            self._planner.commit_tensor(part.item, part.tensor)

        self._connected += 1
        name = f"{team.name}/{self._connected}"
        where = name, team.ranks, self._ranks.rank, self._ranks.timeout_s
        with closing(connect(*where)) as transport:
            sent = dict.fromkeys(of_rank, mine)
            exchange_parts(transport, sent, of_rank, read, take, timeout_s)


def _divided(item: ReadItem, tensor: torch.Tensor) -> Iterator[_Part]:
    """Divide what is read of a tensor into parts of at most a parcel each."""
    for offsets, sizes in rectangles_of(whole(item.lengths), PARCEL_NBYTES // tensor.itemsize):
        part = tensor
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, start, size)
        yield _Part(
            replace(
                item,
                dest_offsets=_sum(item.dest_offsets, offsets),
                storage_offsets=_sum(item.storage_offsets, offsets),
                lengths=torch.Size(sizes),
            ),
            part,
        )


def _sum(one: Sequence[int], other: Sequence[int]) -> torch.Size:
    return torch.Size(a + b for a, b in zip(one, other, strict=True))


def _shares(parts: Sequence[_Part], count: int) -> list[list[_Part]]:
    """Divide parts among so many members, in their order, by bytes."""
    total, before = max(1, sum(part.nbytes for part in parts)), 0
    shares: list[list[_Part]] = [[] for _ in range(count)]
    for part in parts:
        shares[min(count - 1, (2 * before + part.nbytes) * count // (2 * total))].append(part)
        before += part.nbytes
    return shares


def _first(parts: Sequence[_Part], nbytes: int) -> list[_Part]:
    first: list[_Part] = []
    for part in parts:
        if first and sum(one.nbytes for one in first) + part.nbytes > nbytes:
            break
        first.append(part)
    return first


def _teams(reports: Sequence[Sequence[Any]]) -> PerRank:
    """Form teams of ranks that report the same digest, and bytes that are worth it."""
    by_digest = sorted((report, rank) for rank, report in enumerate(map(tuple, reports)))
    teams: dict[int, list[int]] = {}
    is_worth_it = False
    for (_, nbytes), same in groupby(by_digest, key=lambda found: found[0]):
        ranks = [rank for _, rank in same]
        count = math.ceil(len(ranks) / _MOST_MEMBERS) if nbytes >= _LEAST_NBYTES else len(ranks)
        for number in range(count):
            team = ranks[number * len(ranks) // count : (number + 1) * len(ranks) // count]
            is_worth_it |= len(team) > 1
            teams |= dict.fromkeys(team, team)
    return PerRank(new_name() if is_worth_it else None, teams if is_worth_it else {})


def _expected_s(reports: Sequence[Sequence[float]]) -> float | None:
    """Return how long the rest takes at most, by the trial; ``None`` if to read all is faster."""
    sent_s, read_s, times = (max(column) for column in zip(*reports, strict=True))
    return max(sent_s, read_s) * times if sent_s < read_s else None
