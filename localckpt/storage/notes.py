"""Notes of a rank's folder: its last epoch, and trust in checkpoints; one file beside the shards.

The file is replaced as a whole, by the process that has claimed the folder. A start of the job is
noted with its process: as long as that lives, the start has not failed.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localckpt.errors import MismatchError
from localckpt.ids import MOST_DIGITS, Checkpoint
from localckpt.lineage import Lineage
from localckpt.own_folders import file_mode
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import NOTES_NAME
from localckpt.storage.owner import Owner, Running, read_note
from localckpt.storage.write import replace_file, sync_folder
from localckpt.trust import Trust, Trusts

logger = logging.getLogger(__name__)

_MOST_NBYTES = 64 << 10
_NO_TRUST = Trust()


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes of one rank's folder: its last epoch (0 for none), and trust in checkpoints.

    ``starts`` has the process of the last start that resumed from each checkpoint.
    """

    epoch: int = 0
    lineage: Lineage | None = None
    noted: Trusts = field(default_factory=Trusts)
    starts: Mapping[Checkpoint, Owner] = field(default_factory=dict)

    def trusts(self, running: Running) -> Trusts:
        """Return the trust in checkpoints, with the starts whose processes have ended."""
        trusts = Trusts(self.noted)
        for checkpoint, owner in self.starts.items():
            if owner not in running:
                known = trusts[checkpoint]
                trusts[checkpoint] = replace(known, failed_starts=known.failed_starts + 1)
        return trusts

    def with_each(
        self, change: Callable[[Checkpoint, Trust], Trust], also: Collection[Checkpoint] = ()
    ) -> Notes:
        """Return these notes with changed trust in each checkpoint that they, or ``also``, name."""
        changed = {c: change(c, self.noted[c]) for c in (*self.noted, *also)}
        return replace(self, noted=Trusts({c: t for c, t in changed.items() if t != _NO_TRUST}))

    def but(self, checkpoint: Checkpoint, **changes: Any) -> Notes:
        """Return these notes with changed fields of the trust in one checkpoint."""
        trust = replace(self.noted[checkpoint], **changes)
        return self.with_each(lambda c, old: trust if c == checkpoint else old, [checkpoint])

    def without(self, checkpoint: Checkpoint) -> Notes:
        noted = Trusts({c: trust for c, trust in self.noted.items() if c != checkpoint})
        starts = {c: owner for c, owner in self.starts.items() if c != checkpoint}
        return replace(self, noted=noted, starts=starts)

    def without_starts(self) -> Notes:
        """Return these notes without all that is counted of starts."""
        notes = self.with_each(lambda _, old: replace(old, failed_starts=0, most_starts=0))
        return replace(notes, starts={})

    def to_text(self) -> str:
        # What a restart decides by is dropped last, and of that what is oldest first.
        decides = {c for c, trust in self.noted.items() if trust.mark or trust.most_starts}
        kept = sorted(self.noted, key=lambda c: (c in decides, c.iteration))
        while True:
            entries = Trusts({c: self.noted[c] for c in kept}).to_json()
            starts = [str(self.starts.get(c, "")) for c in kept]
            noted = [[*entry, start] for entry, start in zip(entries, starts, strict=True)]
            lineage = self.lineage and self.lineage.to_json()
            text = json.dumps({"epoch": self.epoch, "lineage": lineage, "checkpoints": noted})
            if len(text) <= _MOST_NBYTES:
                return text
            del kept[0]

    @classmethod
    def parse(cls, text: str) -> Notes:
        """Read the result of :meth:`to_text` as far as possible; raises ValueError."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
        epoch, lineage_json, lineage = fields.get("epoch"), fields.get("lineage"), None
        # A greater number than a header can have is ignored.
        if type(epoch) is not int or not 0 <= epoch < 10 ** (MOST_DIGITS - 1):
            epoch = 0
        # The headers of shards hold the lineage as well.
        with suppress(MismatchError):
            lineage = Lineage.from_json(lineage_json) if lineage_json else None
        noted, starts = Trusts(), dict[Checkpoint, Owner]()
        checkpoints = fields.get("checkpoints")
        for entry in checkpoints if isinstance(checkpoints, list) else ():
            with suppress(MismatchError, TypeError, ValueError):
                *trust, start = entry
                one = Trusts.from_json([trust])
                noted |= one
                if (owner := Owner.parse(str(start))) is not None:
                    starts |= dict.fromkeys(one, owner)
        return cls(epoch, lineage, noted, starts)


def read_notes(folder: Path) -> Notes:
    """Read the notes of a folder; none if there are none, or if they are damaged."""
    return parsed(read_note(folder / NOTES_NAME, _MOST_NBYTES), folder / NOTES_NAME)


def parsed(text: str, place: object) -> Notes:
    """Parse notes that a place has; none if there are none, or if they are damaged."""
    try:
        return Notes.parse(text) if text else Notes()
    except (ValueError, RecursionError) as error:
        logger.warning("%s is damaged, and what it noted is lost: %s", place, error)
        return Notes()


class TrustNotes:
    """Keeper of notes on trust in checkpoints, which keeps none; its methods raise StorageError."""

    def change(self, change: Callable[[Notes], Notes], *, in_handler: bool = False) -> None:
        """Change the notes durably, if that changes any.

        A call in a signal handler never waits for another change, which it may have interrupted:
        then this one follows that.
        """

    def note_trust(self, checkpoint: Checkpoint, **changes: Any) -> None:
        self.change(lambda notes: notes.but(checkpoint, **changes))

    def keep_metrics(
        self, metrics: Mapping[Checkpoint, tuple[str, float]], under_way: Collection[int]
    ) -> None:
        """Note the metrics of checkpoints, and no others but of iterations under way."""

        def keep(checkpoint: Checkpoint, old: Trust) -> Trust:
            is_over = checkpoint.iteration not in under_way or checkpoint in metrics
            return replace(old, metric=metrics.get(checkpoint)) if is_over else old

        self.change(lambda notes: notes.with_each(keep, metrics))

    def note_drained(self, checkpoint: Checkpoint, complete: Collection[Checkpoint]) -> None:
        """Note that a checkpoint was drained, and forget it of those that are not complete."""

        def note(c: Checkpoint, old: Trust) -> Trust:
            return replace(old, is_drained=c == checkpoint or (old.is_drained and c in complete))

        self.change(lambda notes: notes.with_each(note, [checkpoint]))

    def count_start(self, checkpoint: Checkpoint, failed_starts: int, most_starts: int) -> None:
        """Note that this process resumes from a checkpoint, after some starts that failed."""

        def count(notes: Notes) -> Notes:
            notes = notes.but(checkpoint, failed_starts=failed_starts, most_starts=most_starts)
            return replace(notes, starts={**notes.starts, checkpoint: Owner.me()})

        self.change(count)

    def take_back_start(self, checkpoint: Checkpoint) -> None:
        """Undo :meth:`count_start`; a signal handler may call this."""

        def take_back(notes: Notes) -> Notes:
            if not notes.noted[checkpoint].failed_starts:
                notes = notes.but(checkpoint, most_starts=0)
            return replace(notes, starts={c: o for c, o in notes.starts.items() if c != checkpoint})

        self.change(take_back, in_handler=True)

    def forget_starts(self) -> None:
        """Count no start so far any more."""
        self.change(Notes.without_starts)


class NotesFile(TrustNotes):
    """Notes in a folder, which may be missing until the first one is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place: object = folder / NOTES_NAME
        self._writing = threading.Lock()
        self._left: deque[Callable[[Notes], Notes]] = deque()

    def trusts(self) -> Trusts:
        """Read the trust in checkpoints, and ignore what is damaged; raises StorageError."""
        with storage_errors("read", self._place):
            return self._read().trusts(Running())

    def change(self, change: Callable[[Notes], Notes], *, in_handler: bool = False) -> None:
        if in_handler:
            self._left.append(change)
        else:
            with self._writing:
                self._rewrite(change)
        # Whoever holds the lock looks again once it is released.
        while self._left and self._writing.acquire(blocking=False):
            try:
                self._rewrite(self._left.popleft())
            finally:
                self._writing.release()

    def _rewrite(self, change: Callable[[Notes], Notes]) -> None:
        with storage_errors("write", self._place):
            before = self._read()
            if (after := change(before)) != before:
                self._write(None if after == Notes() else after.to_text().encode())

    def _read(self) -> Notes:
        return read_notes(self._folder)

    def _write(self, data: bytes | None) -> None:
        path = self._folder / NOTES_NAME
        if data is None:
            path.unlink(missing_ok=True)
        else:
            # A team reads what it notes on shared storage.
            replace_file(path, data, file_mode(self._folder))
        sync_folder(self._folder)
