"""``localckpt inspect``: what one file says that it is; nothing in it is run or unpickled."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from localckpt.cli.output import (
    BAD,
    JsonOption,
    counted,
    one_line_errors,
    say,
    say_json,
    say_table,
    size,
)
from localckpt.errors import CorruptShardError, StorageError
from localckpt.failure_texts import ranges
from localckpt.ids import SHARD_KIND, ShardRecord
from localckpt.state_dict.header import DIGESTS, SKELETON, kind_of, parse_safetensors
from localckpt.state_dict.layout import TensorSlot
from localckpt.state_dict.source import read_verified_record
from localckpt.storage.files import FileSource
from localckpt.storage.names import DIRTY, RECYCLED, local_path

# No header may be longer, and no table of tensors is.
_MAX_NBYTES = 100_000_000
_WIDTH = 120
_FORMAT = re.compile(r"localckpt-\d+")
# Kinds of files that are none of ours.
_FOREIGN = {
    "safetensors": "a safetensors file, and no shard of localckpt",
    "unknown": "no safetensors file, as far as it can be read",
}


def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", readable=False, help="A shard, or any .safetensors file."),
    ],
    json: JsonOption = False,
) -> None:
    """Show whose state a file is, and its tensors.

    Files that are damaged (*.corrupt) or half written (*.dirty) are shown if their header can be
    read. The exit status is 1 if something in the header is wrong, else 0; the tensors' bytes are
    looked at by `localckpt verify`.
    """
    with one_line_errors():
        seen = _look(local_path(file))
    if json:
        say_json(seen.to_json())
    else:
        _say(seen)
    raise typer.Exit(BAD if seen.problems else 0)


@dataclass(slots=True)
class _Seen:
    """Content of a file, as far as it could be read."""

    path: Path
    nbytes: int
    record: ShardRecord | None = None
    metadata: dict[str, Any] | None = None
    tensors: list[TensorSlot] = field(default_factory=list)
    """Their offsets count from the start of the file."""
    skeleton: TensorSlot | None = None
    digests: TensorSlot | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        if self.metadata and _FORMAT.fullmatch(str(self.metadata.get("format"))):
            return kind_of(self.metadata)
        return "safetensors" if self.metadata or self.tensors else "unknown"

    @property
    def tensors_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        identity = None
        if self.record is not None:
            i = self.record.identity
            epoch, sequence = i.generation
            identity = {
                "session": i.session_id,
                "epoch": epoch,
                "sequence": sequence,
                "iteration": i.iteration,
                "rank": i.rank,
                "world_size": i.world_size,
            }
        return {
            "path": str(self.path),
            "nbytes": self.nbytes,
            "kind": self.kind,
            "identity": identity,
            "metadata": self.metadata,
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "offset": tensor.offset,
                    "nbytes": tensor.nbytes,
                }
                for tensor in self.tensors
            ],
            "tensors_nbytes": self.tensors_nbytes,
            "skeleton_nbytes": self.skeleton and self.skeleton.nbytes,
            "digests_nbytes": self.digests and self.digests.nbytes,
            "problems": self.problems,
        }


def _look(path: Path) -> _Seen:
    try:
        # Elsewhere than in a store, files are often links.
        source = FileSource(Path(os.path.realpath(path)))
    except StorageError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else error
        raise StorageError(f"{path} cannot be read: {reason}") from error
    try:
        first = bytes(source.read(0, min(8, source.nbytes)))
        start = 8 + int.from_bytes(first, "little")
        seen = _Seen(path, source.nbytes)
        if len(first) < 8 or start > _MAX_NBYTES:
            seen.problems.append(f"its header would take {start} bytes")
            return seen
        try:
            metadata, slots = parse_safetensors(source.read(0, min(start, source.nbytes)))
        except CorruptShardError as error:
            seen.problems.append(str(error))
            return seen
        seen.metadata = metadata if isinstance(metadata, dict) else None
        found = {slot.name: slot._replace(offset=start + slot.offset) for slot in slots}
        seen.skeleton, seen.digests = found.pop(SKELETON, None), found.pop(DIGESTS, None)
        seen.tensors = [*found.values()]
        if seen.kind not in _FOREIGN:
            _judge_shard(seen, source)
        else:
            _judge_length(seen, start)
        return seen
    finally:
        source.close()


def _judge_shard(seen: _Seen, source: FileSource) -> None:
    try:
        seen.record = read_verified_record(source)
    except CorruptShardError as error:
        why = str(error)
        if error.shard:
            why = f"it claims to be {error.shard}, and {error.damage}"
        seen.problems = [*(p for p in seen.problems if p not in why), why]


def _judge_length(seen: _Seen, start: int) -> None:
    described = max((tensor.offset + tensor.nbytes for tensor in seen.tensors), default=start)
    if seen.nbytes != described:
        has = counted(seen.nbytes, "byte")
        seen.problems.append(f"it has {has}, and its header describes {described}")


def _say(seen: _Seen) -> None:
    what = _FOREIGN.get(seen.kind, f"{seen.kind} of shards of localckpt")
    if seen.kind == SHARD_KIND:
        what = "a shard of localckpt"
    say(f"{seen.path}: {what}, {counted(seen.nbytes, 'byte')} ({size(seen.nbytes)})")
    if seen.path.name.endswith((DIRTY, RECYCLED)):
        say("It is being written, or will be: what it holds may be of several saves.")
    for problem in seen.problems:
        say(f"problem: {problem}", red=True)
    if seen.record is not None:
        i = seen.record.identity
        say(
            "",
            f"session     {i.session_id!r}",
            f"iteration   {i.iteration}",
            f"generation  {i.generation}",
            f"rank        {i.rank} of {i.world_size}",
        )
        if (group := seen.record.group) is not None:
            say(f"{i.kind:11} {group.tolerated} of ranks {ranges(group.ranks)}")
    elif seen.metadata:
        say("", *(f"{key}: {value}" for key, value in seen.metadata.items()))
    if seen.tensors:
        names = ("tensor", "dtype", "shape", "offset", "bytes")
        rows = [
            (
                tensor.name,
                tensor.dtype,
                str(list(tensor.shape)),
                str(tensor.offset),
                str(tensor.nbytes),
            )
            for tensor in seen.tensors
        ]
        say("")
        say_table(names, rows, ("offset", "bytes"), _WIDTH)
    parts = [f"{counted(len(seen.tensors), 'tensor')} of {size(seen.tensors_nbytes)}"]
    if seen.skeleton is not None:
        parts.append(f"the object around them {size(seen.skeleton.nbytes)}")
    if seen.digests is not None:
        parts.append(f"digests {size(seen.digests.nbytes)}")
    say("", ", ".join(parts))
