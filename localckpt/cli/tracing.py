"""``localckpt trace``: the record of a job as a trace for Perfetto."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from localckpt.cli.output import (
    JsonOption,
    counted,
    one_line_errors,
    say,
    say_json,
    size,
    writing,
)
from localckpt.cli.records import RecordsArgument, SessionOption, read_records
from localckpt.report.trace import trace_of

__all__ = ["trace"]


def trace(
    directories: RecordsArgument = None,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.json", readable=False, help="The file, which is overwritten."),
    ] = Path("localckpt.trace.json"),
    session: SessionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the record of a job as a trace, for https://ui.perfetto.dev.

    All ranks and starts are in one picture: what training waited for, saves under way, and above
    them what the time of the whole job was.
    """
    with one_line_errors():
        events = read_records(directories, session)
        text = json.dumps(trace_of(events))
        with writing("trace", out):
            # The user's alone, as the record is.
            file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(file, "w") as stream:
                stream.write(text)
    if as_json:
        say_json({"path": str(out), "events": len(events), "nbytes": len(text)})
        return
    say(f"{out}: {counted(len(events), 'event')}, {size(len(text))}")
