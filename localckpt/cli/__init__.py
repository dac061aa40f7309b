"""The command ``localckpt``: looks at stores, explains them, and cleans up after dead processes.

It is no part of a job: it makes no process group, and all commands but ``clean``, ``pin`` and
``unpin`` only read, so they can be used while a job runs. None imports torch but ``export``,
``get`` and ``diff``. ``survive`` is for the time before: it compares what a job could choose.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from localckpt import __version__
from localckpt.cli.cleaning import clean
from localckpt.cli.explaining import explain
from localckpt.cli.exporting import diff, export, get
from localckpt.cli.inspecting import inspect
from localckpt.cli.listing import ls
from localckpt.cli.pinning import pin, unpin
from localckpt.cli.reporting import report
from localckpt.cli.surviving import survive
from localckpt.cli.verifying import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="localckpt",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in (
    *(ls, verify, explain, inspect, pin, unpin, clean, survive, report),
    *(export, get, diff),
):
    app.command()(_command)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal has no letters for is no reason to fail.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"localckpt {__version__}")
        raise typer.Exit


@app.callback()
def _localckpt(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Look at the checkpoints that localckpt keeps on this node, clean up, and compare schemes."""
