"""``localckpt ls``: what lies in one node's store, or in a root on shared storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.availability.coverage import complete_checkpoints, newest_first
from localckpt.availability.inventory import Inventory
from localckpt.availability.retention import Reason, Retention, Version, metrics_to_json
from localckpt.cli.output import (
    JsonOption,
    StoreArgument,
    age,
    counted,
    one_line_errors,
    plural,
    say,
    say_json,
    say_table,
    size,
    store_or_default,
)
from localckpt.failure_texts import ranges
from localckpt.global_tier.folders import (
    CommitRecord,
    Folder,
    SharedCheckpoint,
    SharedSession,
    find_shared_sessions,
    why_kept,
)
from localckpt.global_tier.places import Place, place_of
from localckpt.ids import Checkpoint, ShardRecord
from localckpt.replication.schemes import SCHEMES
from localckpt.storage.catalog import (
    Removable,
    SessionFolder,
    ShardFile,
    UncountedFile,
    find_sessions,
    node_token,
)
from localckpt.trust import Trusts, choose, resumed_in_vain


def ls(directory: StoreArgument = None, json: JsonOption = False) -> None:
    """List the checkpoints in a store, or on shared storage.

    "Complete here" means that this node alone holds the shards of all ranks; with several nodes
    that is neither usual nor needed: ask `localckpt explain` with the stores of all of them.
    """
    with one_line_errors():
        place = place_of(directory or store_or_default(None))
        if shared := [look(session) for session in find_shared_sessions(place)]:
            _say_shared(place, shared, json)
            return
        root = store_or_default(directory)
        listings = [_look(session) for session in find_sessions(root)]
        node = node_token(root)
        if json:
            sessions = [listing.to_json() for listing in listings]
            say_json({"store": str(root), "shared": False, "node": node, "sessions": sessions})
            return
        say(f"{root}: node {node}" if node else f"{root}: of a node that has no name")
        for listing in listings:
            _say_listing(listing)
        if not listings:
            say("No job has used it yet.")


def _say_shared(root: Place, listings: Sequence[SharedListing], json: bool) -> None:
    if json:
        sessions = [{"session": s.session.session_id, **s.to_json()} for s in listings]
        say_json({"store": str(root), "shared": True, "sessions": sessions})
        return
    say(f"{root}: shared storage")
    for listing in listings:
        say("", f"session {listing.session.session_id!r}")
        listing.say()


@dataclass(frozen=True, slots=True)
class _Row:
    """One checkpoint, as far as it is on this node."""

    checkpoint: Checkpoint
    ranks: tuple[int, ...]
    copies: int
    others: Mapping[str, int]
    """Number of files of each kind of piece beside shards."""
    nbytes: int
    saved_at: float
    is_complete: bool

    def to_json(self) -> dict[str, Any]:
        epoch, sequence = self.checkpoint.generation
        return {
            "iteration": self.checkpoint.iteration,
            "epoch": epoch,
            "sequence": sequence,
            "world_size": self.checkpoint.world_size,
            "ranks": list(self.ranks),
            "copies": self.copies,
            **{plural(kind): self.others.get(kind, 0) for kind in SCHEMES},
            "nbytes": self.nbytes,
            "saved_at": self.saved_at,
            "complete_here": self.is_complete,
        }


@dataclass(frozen=True, slots=True)
class _Listing:
    """One session on this node."""

    session_id: str
    rows: tuple[_Row, ...]
    uncounted: tuple[UncountedFile, ...]
    leftovers: tuple[Removable, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session_id,
            "checkpoints": [row.to_json() for row in self.rows],
            "uncounted": [
                {
                    "path": str(file.path),
                    "nbytes": file.nbytes,
                    "fault": file.problem.kind,
                    "why": file.description,
                }
                for file in self.uncounted
            ],
            "leftovers": {
                name: {"files": len(files), "nbytes": sum(f.nbytes for f in files)}
                for name, files in _by_kind(self.leftovers).items()
            },
        }


def _describe(leftovers: Iterable[Removable]) -> list[str]:
    """A line for each kind of which there are any."""
    meanings = {
        "dirty_live": "being written",
        "dirty_dead": "left unfinished by processes that are gone",
        "recycled_live": "to be overwritten by the next saves",
        "recycled_dead": "to be overwritten, of processes that are gone",
        "corrupt": "in quarantine",
    }
    return [
        f"{counted(len(files), 'file')} {meanings[name]} "
        f"({size(sum(file.nbytes for file in files))})"
        for name, files in _by_kind(leftovers).items()
        if files
    ]


def _look(session: SessionFolder) -> _Listing:
    shards, uncounted = session.shards()
    rows = _rows(shards)
    return _Listing(session.session_id, rows, tuple(uncounted), tuple(session.leftovers()))


def _rows(shards: Sequence[ShardFile]) -> tuple[_Row, ...]:
    records = [shard.record for shard in shards]
    inventory = Inventory.found({"here": records}, codes=SCHEMES)
    complete = complete_checkpoints(inventory)
    by_checkpoint: dict[Checkpoint, list[ShardRecord]] = {}
    saved_at: dict[Checkpoint, float] = {}
    for shard in shards:
        checkpoint = shard.record.identity.checkpoint
        by_checkpoint.setdefault(checkpoint, []).append(shard.record)
        saved_at[checkpoint] = max(shard.modified_at, saved_at.get(checkpoint, 0.0))
    return tuple(
        _Row(
            checkpoint,
            tuple(sorted({r.identity.rank for r in found if r.identity.is_shard})),
            sum(record.identity.is_shard for record in found),
            Counter(r.identity.kind for r in found if not r.identity.is_shard),
            sum(record.nbytes for record in found),
            saved_at[checkpoint],
            checkpoint in complete,
        )
        for checkpoint in newest_first(by_checkpoint, inventory.lineages)
        for found in [by_checkpoint[checkpoint]]
    )


def _by_kind(leftovers: Iterable[Removable]) -> dict[str, list[Removable]]:
    kinds = ("dirty_live", "dirty_dead", "recycled_live", "recycled_dead", "corrupt")
    found: dict[str, list[Removable]] = {kind: [] for kind in kinds}
    for file in leftovers:
        # A file in quarantine belongs to nobody any more.
        owner = "" if file.kind == "corrupt" else "_live" if file.is_live else "_dead"
        found[f"{file.kind}{owner}"].append(file)
    return found


def _say_listing(listing: _Listing) -> None:
    say("", f"session {listing.session_id!r}")
    if listing.rows:
        # Only where there is any.
        kinds = sorted({kind for row in listing.rows for kind in row.others})
        others = [plural(kind) for kind in kinds]
        names = ["iteration", "generation", "ranks here", "copies", *others]
        rows = [
            (
                str(row.checkpoint.iteration),
                str(row.checkpoint.generation),
                f"{ranges(row.ranks) or 'none'} of {row.checkpoint.world_size}",
                str(row.copies),
                *(str(row.others.get(kind, 0)) for kind in kinds),
                size(row.nbytes),
                age(row.saved_at),
                "yes" if row.is_complete else "no",
            )
            for row in listing.rows
        ]
        numbers = ("iteration", "generation", "copies", *others, "size", "age")
        say_table([*names, "size", "age", "complete here"], rows, right=numbers)
    else:
        say("no shard")
    for file in listing.uncounted:
        say(f"not counted: {file.path}: {file.description}", red=True)
    say(*_describe(listing.leftovers))


@dataclass(frozen=True, slots=True)
class SharedListing:
    """One session of a root."""

    session: SharedSession
    checkpoints: tuple[SharedCheckpoint, ...]
    leftovers: int
    kept: Mapping[Version, tuple[Reason, ...]]
    """Why each checkpoint stays; those that are not in it go at the job's next save."""
    trusts: Trusts
    """Notes on starts of the job in vain."""

    @property
    def loads(self) -> SharedCheckpoint | None:
        """The checkpoint that a restart loads from it, as far as records and notes tell."""
        whole = {c.folder.as_checkpoint: c for c in self.checkpoints if c.problem is None}
        usable = choose([*whole], self.trusts, self.trusts.most_starts).usable
        return whole[usable[0]] if usable else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        return {
            "root": str(self.session.path),
            "loads": None if self.loads is None else self._to_json(self.loads),
            "checkpoints": [self._to_json(c) for c in self.checkpoints if c.problem is None],
            "retention": self._retention.to_json(),
            "uncounted": [
                {"path": str(c.folder.path), "why": str(c.problem)}
                for c in self.checkpoints
                if c.problem is not None
            ],
            "leftovers": self.leftovers,
        }

    def say(self) -> None:
        # Only where some rule says more than that all are kept.
        says_why = any(
            set(reasons) - {"newest", "resumed from", "all"} for reasons in self.kept.values()
        )
        rows = [
            (
                str(known.folder.iteration),
                str(known.folder.epoch),
                str(known.record.world_size),
                str(len(known.record.files)),
                size(known.record.nbytes),
                age(known.saved_at),
                *([self._why_kept(known.folder, known.record)] * says_why),
            )
            for known in self.checkpoints
            if known.problem is None
        ]
        names = ["iteration", "epoch", "ranks", "files", "size", "age"]
        if rows:
            say_table([*names, *["kept"] * says_why], rows, right=names)
        else:
            say("no checkpoint")
        for known in self.checkpoints:
            if count := self.trusts[known.folder.as_checkpoint].failed_starts:
                say(f"of iteration {known.folder.iteration}: {resumed_in_vain(count)}")
            if known.problem is not None:
                say(f"not counted: {known.folder.path}: {known.problem}", red=True)
        if self.leftovers:
            say(
                f"{counted(self.leftovers, 'unfinished save')}: under way, or cut off; the job's "
                f"next save removes what was cut off"
            )

    @property
    def _retention(self) -> Retention:
        """Rules of the job that saved the newest checkpoint."""
        return Retention() if self.loads is None else self.loads.record.retention

    def _why_kept(self, folder: Folder, record: CommitRecord) -> str:
        rules = self._retention
        words: dict[Reason, str] = {
            "all": "",
            "last": f"last {rules.last}",
            "every": f"every {rules.every}",
            "ahead": "ahead of the job",
        }
        if rules.best is not None and rules.best.metric in record.metrics:
            words["best"] = f"best {rules.best.metric} {record.metrics[rules.best.metric]:g}"
        reasons = self.kept.get(folder.version, ())
        said = ", ".join(filter(None, (words.get(reason, reason) for reason in reasons)))
        return said if reasons else "until the next save"

    def _to_json(self, known: SharedCheckpoint) -> dict[str, Any]:
        record = known.record
        return {
            "path": str(known.folder.path),
            "iteration": known.folder.iteration,
            "epoch": known.folder.epoch,
            "world_size": record.world_size,
            "files": len(record.files),
            "nbytes": record.nbytes,
            "saved_at": known.saved_at,
            "metrics": metrics_to_json(record.metrics),
            "pinned": known.is_pinned,
            "kept": list(self.kept.get(known.folder.version, ())),
        }


def look(session: SharedSession) -> SharedListing:
    """List one session; raises StorageError."""
    checkpoints = tuple(session.checkpoints())
    return SharedListing(
        *(session, checkpoints, len(session.leftovers()), why_kept(checkpoints)),
        session.noted_trusts(),
    )
