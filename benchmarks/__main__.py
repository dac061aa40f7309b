"""``python -m benchmarks [section ...]``: measure, print tables, keep the samples as JSON.

Each section runs in a process of its own, so that none inherits the memory of another, and no large
file is removed while something is measured. ``plot`` draws the newest ``peers``.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.limits import settle
from benchmarks.plot import plot
from benchmarks.report import Report, describe_machine
from benchmarks.setup import Options

_SECTIONS = {
    "save": "benchmarks.save",
    "load": "benchmarks.load",
    "elastic": "benchmarks.elastic",
    "elastic-worlds": "benchmarks.elastic_worlds",
    "global-view": "benchmarks.global_view",
    "save-once": "benchmarks.save_once",
    "check-replicas": "benchmarks.check_replicas",
    "in-memory": "benchmarks.in_memory",
    "replicate": "benchmarks.replicate",
    "unchanged": "benchmarks.unchanged",
    "staging-limit": "benchmarks.staging_limit",
    "parity": "benchmarks.parity",
    "memory": "benchmarks.memory",
    "async": "benchmarks.async_worker",
    "poll": "benchmarks.poll",
    "repair": "benchmarks.repair",
    "training-loop": "benchmarks.training_loop",
    "control": "benchmarks.control",
    "large-worlds": "benchmarks.large_worlds",
    "peers": "benchmarks.peers.section",
    "beside-nvrx": "benchmarks.beside_nvrx",
    "global": "benchmarks.global_tier",
    "drain": "benchmarks.drain",
    "front-door": "benchmarks.front_door",
    "global-planning": "benchmarks.global_planning",
    "shared-reads": "benchmarks.shared_reads",
    "gpu": "benchmarks.device",
}
_IN_MEMORY = frozenset({"in-memory", "save-once", "check-replicas"})
_PLOT = "plot"
_SECTION_TIMEOUT_S = 1800.0
_ENDING_TIMEOUT_S = 60.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "section", nargs="*", help=f"{_PLOT}, or of {', '.join(_SECTIONS)}; all by default"
    )
    Options.add_to(parser, Path(tempfile.gettempdir()))
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end_in_order)
    if asked.section == [_PLOT]:
        print(plot())
        return 0
    if unknown := set(asked.section) - set(_SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    if len(asked.section) == 1:
        _run_section(asked.section[0], asked, console)
        return 0
    console.print("machine: ", describe_machine(asked.dir))
    options = [f"--dir={asked.dir}", f"--rounds={asked.rounds}", f"--width={asked.width}"]
    options.append(f"--state={asked.state}")
    failed = []
    for section in asked.section or _SECTIONS:
        command = [sys.executable, "-m", "benchmarks", section, *options]
        with subprocess.Popen(command) as process:
            try:
                if process.wait(_SECTION_TIMEOUT_S):
                    failed.append(section)
            finally:
                _terminate(process)
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red")
    return 1 if failed else 0


def _end_in_order(number: int, _: object) -> None:
    """End with the cleaning up: no files of gigabytes are left in memory."""
    # A second signal would interrupt that.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _terminate(section: subprocess.Popen[bytes]) -> None:
    section.terminate()
    try:
        section.wait(_ENDING_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        section.kill()


def _run_section(section: str, asked: argparse.Namespace, console: Console) -> None:
    base = Path("/dev/shm") if section in _IN_MEMORY else asked.dir
    directory = Path(tempfile.mkdtemp(prefix="localckpt-bench-", dir=base))
    try:
        measure = importlib.import_module(_SECTIONS[section]).measure
        report: Report = measure(Options(directory, asked.rounds, asked.width, asked.state))
        report.show(console)
        console.print(f"samples: {report.save(directory)}")
    finally:
        shutil.rmtree(directory)
        settle()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
