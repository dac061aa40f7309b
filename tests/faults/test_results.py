"""A run of the tests of faults can be made in parts, and nothing counts twice or is forgotten."""

from __future__ import annotations

from pathlib import Path

from tests.faults.results import Outcome, Result, Results


def _result(test: str, outcome: Outcome, cases: int = 1, version: str = "v1") -> Result:
    return Result(test, outcome, ("power-cut", "clock"), cases, version)


def test_a_run_that_goes_on_counts_what_the_one_before_has_counted(tmp_path: Path) -> None:
    path = tmp_path / "build" / "results"
    before = Results(path)
    before.add(_result("one", "held", cases=20))
    before.add(_result("two", "skipped"))

    after = Results(path)
    after.add(_result("three", "held", cases=5, version="v2"))

    assert [t for t in ("one", "two", "three", "four") if after.held(t)] == ["one", "three"]
    assert after.counts("clock") == Results(path).counts("clock") == "25 held, 1 skipped"
    assert after.counts("torn-file") == "0 held"
    assert after.told() == ["2 tests of v1", "1 tests of v2"]


def test_a_test_that_is_run_again_counts_once_and_that_it_failed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "results"
    before = Results(path)
    before.add(_result("one", "FAILED", cases=7))
    before.add(_result("two", "FAILED"))
    assert before.counts("power-cut") == "0 held, 2 FAILED"
    assert not before.held("one")

    after = Results(path)
    after.add(_result("one", "held", cases=20))

    assert after.counts("power-cut") == "20 held, 1 FAILED"
    assert after.told() == ["2 tests of v1", "failed once, then held: one"]


def test_a_run_whose_results_are_not_kept_counts_its_own() -> None:
    results = Results(None)

    results.add(_result("one", "held", cases=3))

    assert results.counts("clock") == "3 held"
    assert results.held("one")
