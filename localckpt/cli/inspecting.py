"""``localckpt inspect``: what one file says that it is; nothing in it is run or unpickled."""

from __future__ import annotations

import json as json_module
import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
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
from localckpt.state_dict.header import DIGESTS, SKELETON, Skeleton, kind_of, parse_safetensors
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


@dataclass(frozen=True, slots=True)
class _NamedBytes:
    """A named run of bytes, as the header and the tensor table describe it."""

    name: str
    label: str
    shape: tuple[int, ...]
    offset: int
    """From the end of the header."""
    nbytes: int
    dtype: str | None = None
    """torch's name of the type, if the table says."""
    views: int = 0
    """Number of tensors that are views into it."""


@dataclass(slots=True)
class _Seen:
    """Content of a file, as far as it could be read."""

    path: Path
    nbytes: int
    data_start: int | None
    record: ShardRecord | None = None
    metadata: dict[str, Any] | None = None
    tensors: list[_NamedBytes] = field(default_factory=list)
    skeleton: _NamedBytes | None = None
    digests: _NamedBytes | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        if self.metadata and _FORMAT.fullmatch(str(self.metadata.get("format"))):
            return kind_of(self.metadata)
        return "safetensors" if self.metadata or self.tensors else "unknown"

    @property
    def tensors_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def offset(self, tensor: _NamedBytes) -> int | None:
        """From the start of the file; ``None`` if the length of the header is not known."""
        return None if self.data_start is None else self.data_start + tensor.offset

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
                    "label": tensor.label,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "offset": self.offset(tensor),
                    "nbytes": tensor.nbytes,
                    "views": tensor.views,
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
        claimed_start = 8 + int.from_bytes(first, "little")
        start = claimed_start if len(first) == 8 and claimed_start <= _MAX_NBYTES else None
        seen = _Seen(path, source.nbytes, start)
        if start is None:
            seen.problems.append(f"its header would take {claimed_start} bytes")
            return seen
        try:
            metadata, slots = parse_safetensors(source.read(0, min(start, source.nbytes)))
        except CorruptShardError as error:
            seen.problems.append(str(error))
            return seen
        seen.metadata = metadata if isinstance(metadata, dict) else None
        found = {s.name: _NamedBytes(s.name, s.dtype, s.shape, s.offset, s.nbytes) for s in slots}
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
    try:
        _take_table(seen, source)
    except (CorruptShardError, KeyError, ValueError, TypeError, RecursionError):
        seen.problems.append("its table of tensors cannot be read")


def _judge_length(seen: _Seen, start: int) -> None:
    described = start + max((tensor.offset + tensor.nbytes for tensor in seen.tensors), default=0)
    if seen.nbytes != described:
        has = counted(seen.nbytes, "byte")
        seen.problems.append(f"it has {has}, and its header describes {described}")


def _take_table(seen: _Seen, source: FileSource) -> None:
    """Read the JSON in front of the pickle, which tells types that safetensors has no name for."""
    if seen.skeleton is None or seen.data_start is None:
        return
    start = seen.data_start + seen.skeleton.offset
    if start + seen.skeleton.nbytes > seen.nbytes:
        raise ValueError("the skeleton does not end in the file")
    framed = bytes(source.read(start, start + min(seen.skeleton.nbytes, _MAX_NBYTES)))
    rows = json_module.loads(Skeleton.split(framed).table)
    whole: dict[str, tuple[str, tuple[int, ...]]] = {}
    views: Counter[str] = Counter()
    shapes = {tensor.name: tensor.shape for tensor in seen.tensors}
    for slot, dtype, shape, _, _, _, view in rows:
        # A dense tensor is stored in the order of its memory.
        if view is None or (view[0] == 0 and sorted(shape) == sorted(shapes.get(slot, ()))):
            whole[slot] = (str(dtype), tuple(shape))
        else:
            views[slot] += 1
    for number, tensor in enumerate(seen.tensors):
        dtype, shape = whole.get(tensor.name, (None, tensor.shape))
        if not tensor.nbytes and 0 not in shape:
            # The image of another rank holds it.
            shape = tensor.shape
        seen.tensors[number] = replace(tensor, dtype=dtype, shape=shape, views=views[tensor.name])


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
        names = ("tensor", "dtype", "shape", "offset", "bytes", "views")
        rows = [
            (
                tensor.name,
                tensor.dtype or tensor.label,
                str(list(tensor.shape)),
                str(offset) if (offset := seen.offset(tensor)) is not None else "?",
                str(tensor.nbytes),
                str(tensor.views or ""),
            )
            for tensor in seen.tensors
        ]
        say("")
        say_table(names, rows, ("offset", "bytes", "views"), _WIDTH)
    parts = [f"{counted(len(seen.tensors), 'tensor')} of {size(seen.tensors_nbytes)}"]
    if seen.skeleton is not None:
        parts.append(f"the object around them {size(seen.skeleton.nbytes)}")
    if seen.digests is not None:
        parts.append(f"digests {size(seen.digests.nbytes)}")
    say("", ", ".join(parts))
