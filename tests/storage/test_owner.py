"""A process is told from every other, before and after it, on this boot and on another."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.storage.owner import Owner, Running


@pytest.mark.fault("two-jobs")
def test_a_process_that_nobody_has_reaped_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(process.pid)
    assert owner is not None
    assert owner in Running()

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert owner not in Running()
    process.communicate(timeout=30)


@pytest.mark.fault("two-jobs")
@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "0123456789ab"}, {"pid": 2**22 + 1}])
def test_a_pid_that_is_used_again_is_another_process(change: dict[str, object]) -> None:
    me = Owner.me()

    other = dataclasses.replace(me, **change)  # type: ignore[arg-type]

    assert me in Running()
    assert other not in Running()


def test_a_name_with_brackets_and_blanks_does_not_confuse() -> None:
    code = "open('/proc/self/comm', 'w').write(') R 1 (x'); print(1, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()

    owner = Owner.of(process.pid)

    process.kill()
    process.communicate(timeout=30)
    assert owner is not None
    assert owner.started >= Owner.me().started


@pytest.mark.parametrize(
    "text", ["", "-", "--", "a-b-c", "a-1", "a-1-", "-1-2", "a-²-3", "a--1-3", "a-1.0-2", "\0"]
)
def test_what_is_no_owner_is_none(text: str) -> None:
    assert Owner.parse(text) is None


@given(st.text())
def test_any_text_can_be_parsed(text: str) -> None:
    owner = Owner.parse(text)

    assert owner is None or Owner.parse(str(owner)) == owner
