"""Output of the commands: tables and lines for people, JSON for programs, one line for an error."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from localckpt.errors import CheckpointingException, StorageError
from localckpt.storage.names import default_root, local_path

BAD = 1
"""Exit status: something that was looked at is bad."""
_FOLD = "    "

REFUSED = 2
"""Exit status: the command is used wrongly, or cannot read what it was given."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
StoreArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        # Said by what reads it, in one line.
        readable=False,
        help="The directory that the manager was given; this user's store in memory by default.",
        show_default=False,
    ),
]


def stores_argument(what: str) -> Any:
    return typer.Argument(
        metavar="DIR",
        readable=False,
        help=f"{what}; this user's store in memory by default.",
        show_default=False,
    )


def say(*lines: str, bold: bool = False, red: bool = False) -> None:
    """Print lines, whatever is in them; styled on a terminal only, and never folded."""
    for line in lines:
        typer.secho(printable(line), bold=bold or None, fg="red" if red else None)


def say_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    width: int | None = None,
) -> None:
    """Print a table; arguments as of :func:`table_lines`."""
    lines = table_lines(names, rows, right, width)
    heads = len(lines) // (len(rows) + 1)
    say(*lines[:heads], bold=True)
    say(*lines[heads:])


def table_lines(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    width: int | None = None,
) -> list[str]:
    """Lay out a table, figures to the ``right``, and columns beyond the width on further lines."""
    table = [names, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    folds, used = [0], 0
    for number, of_column in enumerate(widths):
        used += of_column + 2
        if width is not None and number and used - 2 > width:
            folds.append(number)
            used = len(_FOLD) + of_column + 2
    cells = [
        [
            cell.rjust(of_column) if name in right else cell.ljust(of_column)
            for name, cell, of_column in zip(names, row, widths, strict=True)
        ]
        for row in table
    ]
    return [
        f"{_FOLD if first else ''}{'  '.join(row[first:end])}".rstrip()
        for row in cells
        for first, end in zip(folds, [*folds[1:], len(names)], strict=True)
    ]


def say_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def printable(text: str) -> str:
    """Text out of a file, without what a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def warn(why: str) -> None:
    """Print a line for whoever watches, beside what is printed."""
    typer.echo(f"localckpt: {printable(why)}", err=True)


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 file``, ``2 files``."""
    return f"{number} {noun}{'s'[: number != 1]}"


def plural(noun: str) -> str:
    """Several of a thing: ``files``, ``copies``."""
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def size(nbytes: int) -> str:
    """Bytes for people: ``1.5 GB``."""
    return decimal(nbytes)


def age(saved_at: float) -> str:
    """Age of a checkpoint for people: ``3 min``. Two clocks are compared, so it may be off."""
    seconds = max(0.0, time.time() - saved_at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def duration(seconds: float) -> str:
    """A length of time for people: ``0.42 s``, ``5 min 12 s``, ``3 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def store_or_default(given: Path | None) -> Path:
    """Return the store that a command is about; raises StorageError."""
    if given is not None:
        return local_path(given)
    usual = default_root()
    if not usual.is_dir():
        raise StorageError(f"give a directory: this user has no store in memory ({usual})")
    return usual


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error of localckpt as one line, and end with the status :data:`REFUSED`."""
    try:
        yield
    except CheckpointingException as error:
        warn(str(error))
        raise typer.Exit(REFUSED) from None
