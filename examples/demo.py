"""Train on two nodes, lose one with its checkpoints, and end bit for bit as if nothing had been.

Three trainings of the same small GPT, each by two `torchrun` agents of one rank: undisturbed, with
checkpoints on disk and a node lost, with checkpoints in memory and a node lost. Then all that the
ranks hold at the end is compared, and one table printed. In a fourth training, which is fully
sharded over four ranks, a node is lost for good, and the two ranks that are left go on with the
state of all four. In the last one the rank that is left keeps its process, and goes back to its own
memory.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from examples.nodes import Node, free_port, running
from examples.report import Event, Journals, Resharded, Training, make_table, make_times_table

NODES = 2
RANKS_ON_NODE, SHARDED_RANKS_ON_NODE = 1, 2
ITERATIONS = 24
SAVE_EVERY = 6
LOSE_AT = 15  # three iterations after a save: that much is lost
SAY_EVERY = 12
STILL_S = 90.0
ALONE_AFTER_S = 8  # also how much later than the other one a node may start
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_NEEDED = 300_000_000


class DemoFailed(Exception):
    """The demo cannot go on; the text says why, with the ends of the nodes' logs."""


def main() -> int:
    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console()
    try:
        return run(console)
    except DemoFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all processes and files of the demo are gone")
        return 130


def run(console: Console) -> int:
    """The three trainings, the comparison and the table; the exit code."""
    began = time.monotonic()
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < SHARED_MEMORY_NEEDED:
        raise DemoFailed(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, and the part of the demo that keeps "
            f"checkpoints in memory needs {SHARED_MEMORY_NEEDED / 1e6:.0f}. In a container, give "
            f"it more: docker run --shm-size=1g"
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="localckpt-demo-")))
        memory = Path(
            stack.enter_context(TemporaryDirectory(prefix="localckpt-demo-", dir=SHARED_MEMORY))
        )
        show = stack.enter_context(Show(console))
        reference = Training("disk", folder / "undisturbed", RANKS_ON_NODE)
        train(reference, folder / "stores-undisturbed", show, lose=False)
        on_disk = Training("disk", folder / "disk", RANKS_ON_NODE)
        train(on_disk, folder / "stores", show, lose=True)
        in_memory = Training("memory", folder / "memory", RANKS_ON_NODE)
        train(in_memory, memory, show, lose=True, host_first=False)
        smaller = Training("disk", folder / "smaller", SHARDED_RANKS_ON_NODE)
        shrink(smaller, folder / "stores-smaller", show)
        # Not at the top: they import torch, and the agents would start a second later.
        from examples import in_place
        from examples.compare import compare

        show.begin("in place, undisturbed", in_place.RANKS)
        in_place.run(folder / "in-place-undisturbed", show.say, lose=False)
        show.begin("in place, a rank lost twice", in_place.RANKS)
        losses = in_place.run(folder / "in-place", show.say, lose=True)
        lossy = [on_disk, in_memory]
        comparisons = [compare(reference.results, t.results, NODES * RANKS_ON_NODE) for t in lossy]
        in_place_ends = folder / "in-place-undisturbed", folder / "in-place", in_place.RANKS
        comparisons.append(compare(*in_place_ends))
    console.print(make_table(lossy, comparisons[:-1]))
    back_after_s = {f"new processes, checkpoints {t.where}": t.back_after_s for t in lossy}
    back_after_s |= {f"in place, {loss.replacement}": loss.back_after_s for loss in losses}
    console.print(make_times_table(back_after_s))
    different = [name for comparison in comparisons for name in comparison.different]
    for name in different[:10]:
        console.print(f"different from the undisturbed training: {name}", style="red")
    console.print(f"recovered bit for bit: {'no' if different else 'yes'}", style="bold")
    resharded = Resharded.of(smaller)
    console.print(str(resharded), style="bold", soft_wrap=True)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if different or not resharded.is_good else 0


def train(
    training: Training, stores: Path, show: Show, *, lose: bool, host_first: bool = True
) -> None:
    """Train to the end, on the way losing node B and replacing it by an empty one if so wished.

    Agents are ranked by the order they were started in. With ``host_first=False`` B has rank 0,
    and its replacement gets rank 1: then all ranks come back on the other node.
    """
    training.results.mkdir()
    options = ["examples.train", "--tier", training.tier, *options_of(training)]
    port = free_port()
    ranks = training.ranks_on_node
    host = Node(stores / "A", training.results, port, True, ranks, options)
    other = Node(stores / "B", training.results, port, False, ranks, options)
    nodes = [host, other] if host_first else [other, host]
    title = f"{training.where}, a node lost" if lose else "undisturbed"
    with running(nodes):
        watch(training, title, nodes, show, other if lose else None, is_replaced=True)
    expected_loads = NODES * ranks if lose else 0
    if len(training.loads) != expected_loads:
        fail(f"{len(training.loads)} ranks resumed, {expected_loads} should have", nodes)


def shrink(training: Training, stores: Path, show: Show) -> None:
    """Train to the end, on the way losing node B for good: node A goes on with its two ranks."""
    training.results.mkdir()
    options = ["examples.elastic", *options_of(training)]
    ranks = training.ranks_on_node
    port = free_port()
    nodes = [
        Node(stores / name, training.results, port, name == "A", ranks, options, ALONE_AFTER_S)
        for name in ("A", "B")
    ]
    with running(nodes):
        title = "sharded, a node lost for good"
        watch(training, title, nodes, show, nodes[1], is_replaced=False)
    if len(training.loads) != ranks:
        fail(f"{len(training.loads)} ranks resumed, {ranks} should have", nodes)


def options_of(training: Training) -> list[str]:
    """Options that all training scripts have."""
    options = ["--results", str(training.results), "--iterations", str(ITERATIONS)]
    return [*options, "--save-every", str(SAVE_EVERY)]


def watch(
    training: Training,
    title: str,
    nodes: list[Node],
    show: Show,
    victim: Node | None,
    *,
    is_replaced: bool,
) -> None:
    """Follow running nodes to their ends, on the way losing one, and replacing it if so wished."""
    ranks = NODES * training.ranks_on_node
    show.begin(title, ranks)
    journals = Journals(training.results, ranks)
    last_news = time.monotonic()
    codes: list[int | None] = [None]
    while any(code != 0 for code in codes):
        # Asked before the journals are read, so that none of the last lines is missed.
        left = [node for node in nodes if is_replaced or node.name != training.lost_node]
        codes = [node.exit_code() for node in left]
        news = journals.read()
        if news:
            last_news = time.monotonic()
        training.events += news
        show.events(news)
        if any(codes):
            fail(f"an agent of the training '{title}' ended with an error", nodes)
        if time.monotonic() - last_news > STILL_S:
            fail(f"the training '{title}' stood still for {STILL_S:.0f} s", nodes)
        reached = max((e.values["iteration"] for e in training.of_kind("iteration")), default=0)
        if victim is not None and not training.lost_node and reached >= LOSE_AT:
            training.lost_node = victim.name
            training.lost_at = time.monotonic()
            pids = victim.lose()
            show.say(f"iteration {reached}: node B lost, SIGKILL to {pids}, store deleted")
            if is_replaced:
                victim.start()
                show.say("a fresh node B starts, its store is empty")
            else:
                show.say(f"node A waits {ALONE_AFTER_S} s for another one, and goes on alone")
        time.sleep(0.02)


def fail(reason: str, nodes: list[Node]) -> NoReturn:
    """Raise with the ends of the logs, which will be gone with the folder."""
    tails = [f"--- node {node.name}, the ends of its logs\n{node.log_tails()}" for node in nodes]
    raise DemoFailed("\n".join([reason, *tails]))


class Show:
    """Progress: a bar for each training in a terminal, else a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._bar: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Show:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, title: str, ranks: int) -> None:
        """A training starts: its processes import torch, which takes a while."""
        self._bar = self._progress.add_task(title, total=ITERATIONS)
        self.say(f"{title}: two nodes start, {ranks} ranks")

    def say(self, line: str) -> None:
        seconds = time.monotonic() - self._began
        self._console.print(f"{seconds:5.1f} s  {line}", highlight=False, soft_wrap=True)

    def events(self, news: list[Event]) -> None:
        for event in news:
            values = event.values
            if event.kind == "load":
                self.say(
                    f"rank {event.rank}, now on node {event.node}, goes on after iteration "
                    f"{values['iteration']}: {values['nbytes'] / 1e6:.1f} MB from "
                    f"{values['source']} in {1e3 * values['seconds']:.0f} ms"
                )
            elif event.kind == "iteration" and event.rank == 0:
                done = values["iteration"] + 1
                if self._bar is not None:
                    self._progress.update(self._bar, completed=done)
                if done % SAY_EVERY == 0:
                    self.say(f"{done} of {ITERATIONS} iterations, loss {values['loss']:.3f}")


def _exit_on_signal(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
