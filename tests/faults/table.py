"""The faults that must be survived; a test says by ``@pytest.mark.fault(...)`` which it makes.

``make faults`` prints the table of ``docs/guarantees.md`` with the cases of that run.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FAULTS", "GUARANTEES", "FaultTable", "rows_below"]

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"

FAULTS = {
    "kill-save": "SIGKILL at a system call of a save",
    "kill-load": "SIGKILL at a system call of receiving a replica, of a load, of cleaning up",
    "power-cut": "power lost after an fsync or a rename",
    "torn-file": "a file cut short, or zeros at its end",
    "flipped-bit": "a flipped bit, anywhere in a file",
    "wrong-place": "a good file, or a good block, in the place of another",
    "partial-io": "short writes and reads, EINTR, EAGAIN",
    "refused-io": "ENOSPC, EDQUOT, EROFS, EACCES, EIO at any call",
    "unusable-store": (
        "a directory that is missing, read-only, another user's, full, or without inodes"
    ),
    "lost-nodes": "any set of nodes lost",
    "lost-during-recovery": "a node lost while another one is restored",
    "silent-peer": "a peer dies, stops or never calls in the middle of a save",
    "aborted": "abort() at any moment, and the same processes join again",
    "survivors": "a rank lost, replaced, or stopped, while the others keep their processes",
    "cut-network": "the network is cut",
    "disagreement": "ranks disagree on iteration, session, world size or version",
    "two-jobs": "two jobs, or two managers, on one directory",
    "late-writer": "a writer of an attempt that is over",
    "old-files": "a node that returns with older files",
    "clock": "clocks that jump, equal file times",
    "moved-ranks": "ranks on other nodes after a restart, several nodes on one host",
    "world-size": "a restart with another number of ranks",
    "bad-copies": "a bad own copy, a bad replica, or both",
    "worker-dies": "the async worker is killed, crashes, or stops",
    "trainer-dies": "the trainer is killed while its worker writes",
    "interrupted": "SIGTERM, Ctrl-C, exit, or fork with a save in flight",
    "many-saves": "thousands of saves in one life, more of them than polls",
    "changed-state": "tensors changed as soon as save returns",
    "changed-program": "the program changed between two starts",
    "divergent-replica": "a bit of one replica of a tensor flipped in memory",
    "hard-state": "states with empty, shared, overlapping, huge, very many or odd values",
    "not-rebuilt": "an object that cannot be rebuilt, or memory that runs out, at a load",
    "hostile-file": "a file made to run code, exhaust memory, or reach out of its store",
    "hostile-store": "a stranger writes into the job's key-value store",
    "random-sequence": "random sequences of the above",
}
"""Each fault by a short name; ``docs/guarantees.md`` says what must happen."""

_FAULTS_MADE = "faults"


class FaultTable:
    """A pytest plugin that counts the cases which made each fault.

    A test says with ``record_property("cases", n)`` that it looped over several. If ``alone``, the
    tests of faults and the long forms of others are run, and the table is printed.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._counts = {fault: Counter[str]() for fault in FAULTS}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        for item in items:
            names = {name for mark in item.iter_markers("fault") for name in mark.args}
            if unknown := names - FAULTS.keys():
                raise pytest.UsageError(f"{item.nodeid}: no such fault: {', '.join(unknown)}")
            # With the reports of a test, they reach the process that counts.
            item.user_properties.append((_FAULTS_MADE, sorted(names)))
        others = [item for item in items if not self._is_run(item)]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if self._is_run(item)]

    def _is_run(self, item: pytest.Item) -> bool:
        is_long = item.get_closest_marker("long") is not None
        makes_faults = bool(dict(item.user_properties)[_FAULTS_MADE])
        return is_long or makes_faults if self._alone else not is_long

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        properties: dict[str, Any] = dict(report.user_properties)
        cases = int(properties.get("cases", 1)) if report.passed else 1
        for fault in properties.get(_FAULTS_MADE, ()):
            self._counts[fault]["held" if report.passed else report.outcome] += cases

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._alone:
            return
        terminalreporter.section("faults")
        header = "| fault | what must happen | cases |"
        terminalreporter.write_line(f"{header}\n|---|---|---|")
        for name, (what, must, _) in zip(FAULTS, rows_below(header), strict=True):
            counted = ({"held": 0} | self._counts[name]).items()
            told = ", ".join(f"{count} {outcome}" for outcome, count in counted)
            terminalreporter.write_line(f"| {what} | {must} | {told} |")


def rows_below(header: str) -> list[list[str]]:
    """Cells of the table of ``docs/guarantees.md`` whose first row begins so."""
    lines = iter(GUARANTEES.read_text().splitlines())
    columns = next(line for line in lines if line.startswith(header)).count("|")
    assert set(next(lines)) <= set("|-: ")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        assert line.count("|") == columns, line
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
