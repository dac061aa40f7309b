"""Ours and every peer in turn, again and again, each in a process of its own.

A process for each turn, so that none inherits the threads, patches or memory of another, the first
save is measured each time, and all fit into memory. The limit is measured in the same process,
right before each sample.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.catalogue import NOT_MEASURED, PEERS
from benchmarks.peers.child import Samples, Task
from benchmarks.peers.report import PeersReport
from benchmarks.report import Report
from benchmarks.setup import Options

__all__ = ["INSTALLED", "measure", "take_turns"]

# Where `make bench` puts the peers, away from the packages that everything else sees.
INSTALLED = Path(sys.prefix) / "peers"
_CHILD_TIMEOUT_S = 240.0
# No round is begun that would end later than this, and after it no peer.
_BUDGET_S = 1500.0


def measure(options: Options) -> Report:
    """As many rounds as asked for and as the time allows, at least one."""
    report = PeersReport("peers", options.state, missing=dict(NOT_MEASURED))
    take_turns(report, PEERS, options, _BUDGET_S)
    report.judge()
    return report


def take_turns(
    report: PeersReport,
    names: Iterable[str],
    options: Options,
    budget_s: float,
    *,
    with_loops: bool = True,
    at_rest: bool = False,
) -> None:
    """Put the samples of these peers into the report, or the reason why there are none."""
    began, longest_s = time.monotonic(), 0.0
    for number in range(options.rounds):
        round_began = time.monotonic()
        if number and round_began - began + longest_s > budget_s:
            print(f"peers: no time for more than {number} of {options.rounds} rounds", flush=True)
            break
        for name in names:
            if name in report.missing:
                continue
            if time.monotonic() - began > budget_s:
                print(f"peers: no time for {name} in round {number + 1}", flush=True)
                if not number:
                    report.missing[name] = "no time was left for it"
                continue
            outcome = _run(name, options, number == 0, with_loops, at_rest)
            if isinstance(outcome, str):
                report.missing[name] = outcome
            else:
                report.add(name, outcome)
        seconds = time.monotonic() - round_began
        longest_s = max(longest_s, seconds)
        print(f"peers: round {number + 1} of {options.rounds} took {seconds:.0f} s", flush=True)


def _run(
    name: str, options: Options, with_memory: bool, with_loops: bool, at_rest: bool
) -> Samples | str:
    """What was measured, or why nothing was."""
    directory = options.directory / "peer"
    result = options.directory / "result.json"
    task = Task(
        name,
        str(directory),
        str(options.directory / "limit"),
        str(result),
        options.width,
        options.state,
        with_memory,
        with_loops,
        at_rest,
    )
    command = [sys.executable, "-m", "benchmarks.peers.child", json.dumps(asdict(task))]
    began = time.monotonic()
    with (options.directory / "stderr").open("w+") as stderr:
        child = subprocess.Popen(
            command,
            stdout=stderr,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": str(INSTALLED)},
            text=True,
            start_new_session=True,
        )
        try:
            code = child.wait(_CHILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(child)
        stderr.seek(0)
        said = [line.strip() for line in stderr if line.strip()]
    shutil.rmtree(directory, ignore_errors=True)
    directory.with_name(f"{directory.name}.group").unlink(missing_ok=True)
    os.sync()
    print(f"peers: {name}, {time.monotonic() - began:.0f} s", flush=True)
    if code == 0:
        return Samples(**json.loads(result.read_text()))
    if code is None:
        return f"not over after {_CHILD_TIMEOUT_S:.0f} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return said[-1] if said else f"exit status {code}"


def _end_group(child: subprocess.Popen[str]) -> None:
    """Also the processes that a peer left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
