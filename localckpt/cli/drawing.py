"""Pictures of the commands: PNG files, drawn with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from localckpt.cli.output import writing
from localckpt.errors import CheckpointingException

__all__ = ["PlotOption", "picture"]

PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", readable=False, help="Draw it; needs the package matplotlib."),
]


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """Give a figure of matplotlib, and write what is drawn in it into a PNG.

    Raises CheckpointingException without matplotlib, or for another kind of file, and StorageError.
    """
    if path.suffix.lower() != ".png":
        raise CheckpointingException(f"{path}: the picture is a PNG, give it a name in .png")
    try:
        # Only here: no other command needs it, and its import takes longer than they do.
        figure_module = import_module("matplotlib.figure")
    except ImportError as error:
        raise CheckpointingException(
            f"--plot needs the package matplotlib, which cannot be imported ({error}). Install it "
            f"(pip install matplotlib), or leave --plot out"
        ) from error
    figure = figure_module.Figure(figsize=(12, 5), layout="constrained")
    yield figure
    with writing("picture", path):
        figure.savefig(path, format="png", dpi=110)
