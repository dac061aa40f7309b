"""Upstream's own tests of checkpoints pass with our classes in the place of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.upstream.suites import SUITES, listed, missing, run


@pytest.mark.long
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_upstreams_own_tests_pass_with_ours(suite: dict[str, Any], tmp_path: Path) -> None:
    if (reason := missing(suite)) is not None:
        pytest.skip(reason)

    outcomes = run(suite, tmp_path)

    passed = {case for case, told in outcomes.items() if told == ["passed"] * suite["ranks"]}
    wrong = {case for case in outcomes if (case in passed) == listed(suite, case)}
    assert passed, "no case was run"
    assert not wrong, (tmp_path / "0.log").read_text()
