"""Code blocks of the documents, and what a reader has before the first line of one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import localckpt
from tests.checkpointer.loops import Loader
from tests.ranks import node_store

__all__ = ["ROOT", "Block", "blocks", "run_pages"]

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^```(?P<language>[\w+-]*)(?P<options>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document; ``options`` are what follows its language."""

    page: str
    line: int
    language: str
    options: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_fragment(self) -> bool:
        """True for Python that its info string says cannot run by itself."""
        return 'title="fragment' in self.options

    @property
    def is_session(self) -> bool:
        """True for Python with its answers, which is run where its page is tested."""
        return self.code.startswith(">>> ")

    @property
    def excerpt_of(self) -> str | None:
        """The file that the block is taken from."""
        found = re.match(r"# of (\S+)\n", self.code)
        return found[1] if found else None


def blocks() -> list[Block]:
    """All fenced blocks of the README, the changelog and the site."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        Block(
            str(page.relative_to(ROOT)),
            text.count("\n", 0, found.start()) + 2,
            *(found["language"], found["options"].strip(), found["code"]),
        )
        for page in pages
        for text in [page.read_text()]
        for found in _FENCE.finditer(text)
    ]


def run_pages(rank: int, world_size: int, pages: list[list[Block]], root: Path) -> dict[str, str]:
    """Run the blocks of each page one after another, as one of the ranks of a job.

    A page has directories of its own in place of ``/local``, ``/var/lib``, ``/shared`` and the
    working directory. The tracebacks are told by page and line, empty where nothing was raised.
    """
    outcomes = {}
    for number, page in enumerate(pages):
        local, shared = node_store() / str(number), root / str(number)
        local.mkdir(parents=True)
        shared.mkdir(parents=True, exist_ok=True)
        with contextlib.chdir(local):
            names = _given(page[0].page, shared)
            for block in page:
                outcomes[str(block)] = _run(block, names, local, shared)
                # What a block saves comes after, and beside, what those before it did.
                names["iteration"] += 1
                names["step"] += 1
                if "folder" in block.code:
                    names["folder"] /= "next"
            _close(names, _OPENED)
    return outcomes


def _run(block: Block, names: dict[str, Any], local: Path, shared: Path) -> str:
    code = re.sub('"/(local|var/lib)/', f'"{local}/', block.code)
    code = code.replace('"/shared/', f'"{shared}/')
    # What it makes anew is not to be open twice.
    _close(names, [name for name in _OPENED if re.search(rf"^{name} = ", code, re.MULTILINE)])
    # The group is there: the addresses of one that was destroyed would mislead the next.
    code = re.sub(
        r"^(torch\.distributed|dist)\.init_process_group\(\)", "", code, flags=re.MULTILINE
    )
    try:
        exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), names)
    except BaseException:  # noqa: BLE001 - torch's errors of checkpoints are no Exceptions
        return traceback.format_exc()
    return ""


# In the order in which they are closed.
_OPENED = ("queue", "checkpointer", "manager", "replicas", "stream")


def _close(names: dict[str, Any], which: Sequence[str]) -> None:
    if which and "queue" in names:
        names["queue"].maybe_finalize_async_calls(blocking=True)
    for name in which:
        if (opened := names.pop(name, None)) is not None:
            opened.close()


class _Batches(Loader):
    """Two batches, and a position in the data."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self.next(), self.next()])


def _given(page: str, shared: Path) -> dict[str, Any]:
    """Names that a reader of a page has: a model that trains, and what is around it."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(*_: Any) -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # Classes of a page are found by their module.
    module = sys.modules["document"] = ModuleType("document")
    names = module.__dict__
    names |= {"localckpt": localckpt, "torch": torch, "dist": dist, "os": os}
    names |= {"model": model, "optimizer": optimizer, "train_step": train_step}
    names |= dict.fromkeys(("steps", "iterations", "step", "iteration"), 60)
    names |= {"folder": shared / "of-dcp", "loss": torch.tensor(0.5), "val_loss": 0.5}
    if page in ("README.md", "docs/restarting.md"):
        names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        names["loader"] = _Batches(dist.get_rank())
    make_replicas = localckpt.CliqueReplicationStrategy.from_replication_params
    match page:
        case "docs/coming_from.md":
            names["steps"] = 1000
        case "docs/training.md":
            names["state"] = {"model": model, "optimizer": optimizer}
        case "docs/saving.md":
            names |= {"state": {"model": model.state_dict()}, "replicas": make_replicas()}
            names["queue"] = localckpt.AsyncCallsQueue()
        case "docs/restarting.md":
            state = {"loader": names["loader"].state_dict(), "rng": torch.get_rng_state()}
            names |= {"state": state, "replicas": make_replicas()}
        case "docs/events.md":
            Path("checkpoints/events").mkdir(parents=True)
            names |= {"state": {"model": model}, "replicas": make_replicas()}
        case "docs/global_tier.md":
            names["state"] = {"weight": torch.ones(4)}
            dcp.save(names["state"], checkpoint_id=names["folder"])
        case "docs/format.md":
            tensors = {"model.layers.0.weight": torch.ones(4)}
            save_file(tensors, "000000000100.3.1.10.safetensors")
        case "docs/operating.md":
            names["checkpointer"] = localckpt.Checkpointer({"model": model}, local="checkpoints")
    return names
