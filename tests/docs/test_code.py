"""Code in the documents runs: Python on two ranks, page by page, and what is for a shell parses.

A block of Python that cannot run by itself says so by ``title="fragment..."`` and is compiled.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import groupby
from pathlib import Path

import pytest
import typer

from localckpt.cli import app
from tests.docs.blocks import ROOT, Block, blocks, run_pages
from tests.ranks import run_ranks

_BLOCKS = blocks()
_PYTHON = [block for block in _BLOCKS if block.language == "python"]
_RUN = [
    block
    for block in _PYTHON
    if not (block.is_fragment or block.is_session or block.excerpt_of is not None)
]
_COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)", re.MULTILINE)


def _shell_commands() -> list[tuple[Block, str]]:
    """Scripts, and the commands of recorded sessions."""
    scripts = [(block, block.code) for block in _BLOCKS if block.language in ("bash", "sh")]
    return scripts + [(block, found) for block in _BLOCKS for found in _COMMAND.findall(block.code)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Of each rank, what came of each block."""
    pages = [list(page) for _, page in groupby(_RUN, key=lambda block: block.page)]
    root = tmp_path_factory.mktemp("pages")
    nodes = [root / "node 0", root / "node 1"]
    return run_ranks(run_pages, 2, pages, root / "shared", store_per_node=nodes, timeout_s=150)


@pytest.mark.parametrize("block", _RUN, ids=str)
def test_python_runs(block: Block, outcomes: list[dict[str, str]]) -> None:
    failures = [of_rank[str(block)] for of_rank in outcomes]

    assert failures == ["", ""], "\n".join(failures)


@pytest.mark.parametrize("block", [b for b in _PYTHON if b not in _RUN], ids=str)
def test_fragments_compile_and_excerpts_are_in_the_file_that_they_name(block: Block) -> None:
    if block.is_fragment:
        compile(block.code, block.page, "exec")
    if block.excerpt_of is not None:
        assert block.code.partition("\n")[2] in (ROOT / block.excerpt_of).read_text()


@pytest.mark.parametrize(
    ("block", "script"), [pytest.param(*pair, id=str(pair[0])) for pair in _shell_commands()]
)
def test_shell_commands_parse(block: Block, script: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_commands_of_localckpt_have_the_options_that_the_documents_give_them() -> None:
    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    shown = [
        words[1:]
        for _, command in _shell_commands()
        if (words := shlex.split(command.partition("|")[0])) and Path(words[0]).name == "localckpt"
    ]

    assert len(shown) > 10
    for name, *arguments in shown:
        options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert options <= known[name], name


def test_targets_of_make_are_those_of_the_makefile() -> None:
    targets = set(re.findall(r"(?m)^([a-z][\w-]*):", (ROOT / "Makefile").read_text()))

    for page in {block.page for block in _BLOCKS}:
        named = re.findall(r"(?m)(?:`|^\$ |^)make ([a-z][\w-]*)", (ROOT / page).read_text())
        assert set(named) <= targets, page
