"""Restart in place: a rank is lost, and the others keep their processes and their memory.

`python -m examples.in_place` trains on two nodes, undisturbed; then once more, and kills a rank
twice. A spare, to which the shards were sent while it waited, takes its place, and then a fresh
process. The rank that is left goes back to its own memory. `train` is the loop of a user; the
launcher below it starts the processes, and says who is in the job.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

from examples.compare import compare
from examples.journal import Journal
from examples.model import GPT, Text
from localckpt import Checkpointer, PeerLostError, Spare

RANKS = 2
STEPS = 36
SAVE_EVERY = 12
LOSE_AT = (21, 33)
LIMIT_S = 120.0
_PROJECT = Path(__file__).absolute().parents[1]


def train(home: int, store: TCPStore, folder: Path, *, is_spare: bool) -> None:
    """Train as process `home`; each life of the job is a world, whose ranks the store has."""
    journal = Journal(folder / f"home{home}.jsonl", node=str(home))
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = None
    if is_spare:
        # What the job saves comes to this node until this process is in a world.
        with Spare(f"127.0.0.1:{store.port}", folder / f"node{home}"):
            number, world = next_world(store, home, 0)
    else:
        number, world = next_world(store, home, 0)
    while True:
        # A store of its own: what is left of the world before is in nobody's way.
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"world{number}", store),
            rank=world.index(home),
            world_size=len(world),
        )
        text = Text(dist.get_rank(), dist.get_world_size())
        torch.manual_seed(1 + dist.get_rank())
        if checkpointer is None:
            checkpointer = Checkpointer(
                {"model": model, "optimizer": optimizer},
                local=folder / f"node{home}",
                every=SAVE_EVERY,
                replication_factor=2,
                timeout_s=30.0,
                quiet=True,
            )
            start = checkpointer.resume()
        else:
            rejoined = checkpointer.rejoin()
            start = rejoined.step
            journal.write("rejoined", source=rejoined.source, seconds=rejoined.seconds)
        ddp = DistributedDataParallel(model)
        try:
            for step in range(start, STEPS):
                ddp(*text.batch_at(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step(step)
                journal.write("step", step=step)
            break
        except (RuntimeError, PeerLostError) as error:
            # gloo's error, if it is no other: the connection to a rank is closed.
            print(error)
        # Not within `except`, whose traceback has DDP, which must go before its group does.
        checkpointer.abort()
        del ddp
        gc.collect()
        dist.destroy_process_group()
        number, world = next_world(store, home, number + 1)
    rank = dist.get_rank()
    torch.save([model.state_dict(), optimizer.state_dict()], folder / f"rank{rank}.pt")
    checkpointer.close()
    dist.destroy_process_group()


def next_world(store: Store, home: int, number: int) -> tuple[int, list[int]]:
    """Wait for the first world from a number on that this process is in."""
    while True:
        store.wait([f"world/{number}"], timedelta(seconds=LIMIT_S))
        world: list[int] = json.loads(store.get(f"world/{number}"))
        if home in world:
            return number, world
        number += 1


@dataclass
class Loss:
    """One lost rank: how long until a step was made again, and where the survivor's state was."""

    replacement: str
    at: float
    back_after_s: float = 0.0
    source: str = ""
    rejoin_s: float = 0.0


@dataclass
class Job:
    """Launcher of one training: its processes, by their numbers, and the store."""

    folder: Path
    store: TCPStore
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    worlds: int = 0

    def start(self, kind: str = "rank") -> int:
        home = len(self.processes)
        command = [sys.executable, "-m", "examples.in_place", kind, str(home)]
        with (self.folder / f"home{home}.log").open("wb") as log:
            self.processes[home] = subprocess.Popen(
                [*command, str(self.store.port), str(self.folder)],
                cwd=_PROJECT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return home

    def begin_world(self, homes: list[int]) -> None:
        self.store.set(f"world/{self.worlds}", json.dumps(homes))
        self.worlds += 1

    def events(self, home: int, kind: str) -> list[dict[str, float]]:
        journal = self.folder / f"home{home}.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["event"] == kind]

    def await_shards(self, home: int) -> None:
        """Wait until a spare has the shards of all ranks."""
        until = time.monotonic() + LIMIT_S
        while len([*(self.folder / f"node{home}").rglob("*.safetensors")]) < RANKS:
            if time.monotonic() > until:
                raise RuntimeError(f"process {home} has no shards")
            time.sleep(0.01)

    def source(self, home: int) -> str:
        """Return where the shard of a new process came from, by the record of its node."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            for record in (self.folder / f"node{home}" / "events").rglob("*.jsonl"):
                whole = [line for line in record.read_text().splitlines() if line.endswith("}")]
                for event in map(json.loads, whole):
                    if event["name"] == "resume":
                        return str(event["details"]["source"])
            time.sleep(0.01)
        raise RuntimeError(f"process {home} has not resumed")

    def await_step(self, home: int, step: int, lives: int = 0) -> float:
        """Wait until a process that rejoined so often has made a step, or any later one.

        Returns when it was made, by the monotonic clock.
        """
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            rejoined = [0.0, *(event["at"] for event in self.events(home, "rejoined"))]
            since = rejoined[lives] if lives < len(rejoined) else float("inf")
            for event in self.events(home, "step"):
                if event["step"] >= step and event["at"] > since:
                    return event["at"]
            if self.processes[home].poll() not in (None, 0):
                break
            time.sleep(0.01)
        log = (self.folder / f"home{home}.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"process {home} has not made step {step}:\n{log}")

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def run(folder: Path, say: Callable[[str], None], *, lose: bool) -> list[Loss]:
    """Train once; return what was lost on the way."""
    folder.mkdir()
    losses: list[Loss] = []
    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = Job(folder, store)
        stack.callback(job.end)
        survivor, other = job.start(), job.start()
        spare = job.start("spare") if lose else None
        job.begin_world([survivor, other])
        for step in LOSE_AT if lose else ():
            job.await_step(other, step)
            if spare is not None:
                job.await_shards(spare)
            loss = Loss("a fresh process" if spare is None else "a spare", time.monotonic())
            job.processes[other].send_signal(signal.SIGKILL)
            job.processes[other].wait()
            other, spare = job.start() if spare is None else spare, None
            job.begin_world([survivor, other])
            loss.back_after_s = job.await_step(survivor, 0, len(losses) + 1) - loss.at
            rejoined = job.events(survivor, "rejoined")[-1]
            loss.source, loss.rejoin_s = str(rejoined["source"]), rejoined["seconds"]
            losses.append(loss)
            say(
                f"SIGKILL to a rank, replaced by {loss.replacement}: the next step was made after "
                f"{loss.back_after_s:.2f} s; the rank that is left went back to {loss.source}, "
                f"in {loss.rejoin_s:.2f} s, and the new one had its shard from {job.source(other)}"
            )
        job.await_step(survivor, STEPS - 1)
        for home in (survivor, other):
            if job.processes[home].wait(LIMIT_S):
                job.await_step(home, STEPS)
    return losses


def main() -> int:
    with TemporaryDirectory(prefix="localckpt-in-place-") as name:
        folder = Path(name)
        run(folder / "undisturbed", print, lose=False)
        run(folder / "lost", print, lose=True)
        comparison = compare(folder / "undisturbed", folder / "lost", RANKS)
        is_equal = not comparison.different
        print(f"the end is bit for bit that of the undisturbed training: {is_equal}")
        return 0 if is_equal else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    torch.set_num_threads(1)
    kind, home, port, folder = sys.argv[1:]
    store = TCPStore("127.0.0.1", int(port), is_master=False)
    train(int(home), store, Path(folder), is_spare=kind == "spare")
