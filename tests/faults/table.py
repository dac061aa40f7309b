"""The faults that must be survived; a test says by ``@pytest.mark.fault(...)`` which it makes.

``make faults`` prints the table of faults, what happens, and how many cases were run, counted in
that run, and in those that it goes on with, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.results import Outcome, Result, Results, version_of

__all__ = ["FAULTS", "FaultTable", "fixed_rows"]

FAULTS = {
    "kill-save": (
        "SIGKILL at a system call of a save",
        "the older checkpoint stands, or the new one is whole; the next start removes the rest",
    ),
    "kill-load": (
        "SIGKILL at a system call of receiving a replica, of a load, of cleaning up",
        "the source is untouched, and the load can be run again",
    ),
    "power-cut": (
        "power lost after an fsync or a rename",
        "what was finalized is there, else the one before",
    ),
    "torn-file": (
        "a file cut short, or zeros at its end",
        "seen; another copy or an older checkpoint; the bad file is quarantined",
    ),
    "flipped-bit": (
        "a flipped bit, anywhere in a file",
        "seen; another copy or an older checkpoint; the bad file is quarantined",
    ),
    "wrong-place": (
        "a good file, or a good block, in the place of another",
        "refused",
    ),
    "partial-io": (
        "short writes and reads, EINTR, EAGAIN",
        "the rest is written, or it is an error",
    ),
    "refused-io": (
        "ENOSPC, EDQUOT, EROFS, EACCES, EIO at any call",
        "a typed error on every rank; older checkpoints stand, space is given back",
    ),
    "unusable-store": (
        "a directory that is missing, read-only, another user's, full, or without inodes",
        "an error at the start or at the save, with the path and the cure",
    ),
    "lost-nodes": (
        "any set of nodes lost",
        "exact to the limit; past it an older checkpoint, or an error that names the shards",
    ),
    "lost-during-recovery": (
        "a node lost while another one is restored",
        "the others raise in time; the next start finds what is left",
    ),
    "silent-peer": (
        "a peer dies, stops or never calls in the middle of a save",
        (
            "an error within the deadline that names it, or a save that says that it lacks copies; "
            "local copies stay good"
        ),
    ),
    "aborted": (
        "abort() at any moment, and the same processes join again",
        "every call ends at once; the newest complete checkpoint comes back; nothing is left",
    ),
    "survivors": (
        "a rank lost, replaced, or stopped, while the others keep their processes",
        "all go on from the newest complete checkpoint; who comes back late harms nothing",
    ),
    "cut-network": (
        "the network is cut",
        "an error within the deadline, or a save that says that it lacks copies; never two answers",
    ),
    "disagreement": (
        "ranks disagree on iteration, session, world size or version",
        "an error on every rank that says who has what",
    ),
    "two-jobs": (
        "two jobs, or two managers, on one directory",
        "the second is refused and told who is there, or kept apart by its session",
    ),
    "late-writer": (
        "a writer of an attempt that is over",
        "its files are not counted",
    ),
    "old-files": (
        "a node that returns with older files",
        "generations are never mixed",
    ),
    "clock": (
        "clocks that jump, equal file times",
        "no effect",
    ),
    "moved-ranks": (
        "ranks on other nodes after a restart, several nodes on one host",
        "every rank gets its own shard",
    ),
    "world-size": (
        "a restart with another number of ranks",
        "with `elastic=True` what was saved, resharded; else an error that says what can be done",
    ),
    "bad-copies": (
        "a bad own copy, a bad replica, or both",
        "the good one is taken; with none an older checkpoint",
    ),
    "worker-dies": (
        "the async worker is killed, crashes, or stops",
        "the next poll raises with the cause on every rank; the save after it works",
    ),
    "trainer-dies": (
        "the trainer is killed while its worker writes",
        "the worker finishes or cleans up; nothing is left after the next start",
    ),
    "interrupted": (
        "SIGTERM, Ctrl-C, exit, or fork with a save in flight",
        "drained or given up; no hang at exit",
    ),
    "many-saves": (
        "thousands of saves in one life, more of them than polls",
        "memory, descriptors, threads and keys stay flat",
    ),
    "changed-state": (
        "tensors changed as soon as save returns",
        "the values at the call are saved",
    ),
    "changed-program": (
        "the program changed between two starts",
        "the same values, or an error before anything is changed that lists both sides",
    ),
    "divergent-replica": (
        "a bit of one replica of a tensor flipped in memory",
        "an error on every rank that names the rank, its node and the tensor; nothing is kept",
    ),
    "hard-state": (
        "states with empty, shared, overlapping, huge, very many or odd values",
        "bit for bit, aliases kept",
    ),
    "not-rebuilt": (
        "an object that cannot be rebuilt, or memory that runs out, at a load",
        "an error on every rank that names it; no file is renamed, and nothing older is taken",
    ),
    "hostile-file": (
        "a file made to run code, exhaust memory, or reach out of its store",
        "refused before anything is allocated or followed",
    ),
    "hostile-store": (
        "a stranger writes into the job's key-value store",
        "an error of ours on all ranks; nothing of it is run",
    ),
    "random-sequence": (
        "random sequences of the above",
        "all guarantees hold; a failing seed is printed",
    ),
}
"""Each fault by a short name: what it is, and what must happen."""

_FAULTS_MADE = "faults"


def fixed_rows(table: Iterable[Any], in_short: Collection[Any]) -> list[Any]:
    """Rows for ``parametrize``: the whole table with ``--faults``, else those in short."""
    rows = list(table)
    assert all(row in rows for row in in_short), in_short
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            id="-".join(map(_name, row if isinstance(row, tuple) else (row,))),
            marks=() if row in in_short else pytest.mark.long,
        )
        for row in rows
    ]


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))


class FaultTable:
    """A pytest plugin that counts the cases which made each fault.

    A test counts as one case, unless it says with ``record_property("cases", n)`` that it looped
    over more.

    Args:
        alone: Run the tests of faults and the long forms of others, and print the table.
        path: Where results are kept. Tests that held according to this file are not run, and the
            table counts them.
        leads: It is the process that hears of all tests.
    """

    def __init__(self, alone: bool, path: Path | None, leads: bool) -> None:
        self._alone = alone
        self._leads = leads
        self._results = Results(path)
        self._version = version_of(Path(__file__).parent) if alone and leads else ""
        self._not_held: set[str] = set()

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
        is_ours = is_long or makes_faults if self._alone else not is_long
        return is_ours and not self._results.held(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not (self._alone and self._leads):
            return
        if not report.passed:
            self._not_held.add(report.nodeid)
            self._add(report, "FAILED" if report.failed else "skipped")
        elif report.when == "teardown" and report.nodeid not in self._not_held:
            self._add(report, "held")

    def _add(self, report: pytest.TestReport, outcome: Outcome) -> None:
        properties = dict(report.user_properties)
        faults = tuple(str(fault) for fault in properties.get(_FAULTS_MADE, ()))
        cases = int(str(properties.get("cases", 1)))
        self._results.add(Result(report.nodeid, outcome, faults, cases, self._version))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._alone:
            return
        terminalreporter.section("faults")
        for name, (what, then) in FAULTS.items():
            terminalreporter.write_line(f"{self._results.counts(name):>24}  {what}: {then}")
        for told in self._results.told():
            terminalreporter.write_line(told)
