"""What a killed process left is removed at the next start; what a live one has is left alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.storage.owner import Owner, Running, owner_of
from tests.storage.conftest import Node
from tests.storage.shards import assert_loads, everything, identity, save


@pytest.mark.fault("trainer-dies", "two-jobs")
@pytest.mark.parametrize("change", [{"boot": "0123456789ab"}, {"started": 1}])
def test_the_recycled_files_of_a_killed_process_are_used_by_the_one_after_it(
    node: Node, change: dict[str, Any]
) -> None:
    store = node()
    save(store, identity(1))
    (file,) = store.folder.glob("*.safetensors")
    inode = file.stat().st_ino
    store.prune(everything, [])
    # As if it had been killed here: nobody closes it.
    (store.folder / ".owner").write_text(str(dataclasses.replace(Owner.me(), **change)))

    again = node()
    save(again, identity(2))

    assert owner_of(again.folder) == Owner.me()
    assert next(again.folder.glob("*.safetensors")).stat().st_ino == inode
    assert_loads(again, identity(2))


@pytest.mark.fault("two-jobs")
def test_a_process_that_nobody_has_reaped_is_dead_and_its_name_does_not_confuse() -> None:
    code = "open('/proc/self/comm', 'w').write(') R 1 (x'); print(1, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    owner = Owner.of(process.pid)
    assert owner is not None
    assert owner.started >= Owner.me().started
    assert owner in Running()

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert owner not in Running()
    process.communicate(timeout=30)


@pytest.mark.fault("two-jobs")
@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "0123456789ab"}, {"pid": 2**22 + 1}])
def test_a_pid_that_is_used_again_is_another_process(change: dict[str, Any]) -> None:
    assert Owner.me() in Running()
    assert dataclasses.replace(Owner.me(), **change) not in Running()


@pytest.mark.parametrize(
    "text", ["", "-", "--", "a-b-c", "a-1", "a-1-", "-1-2", "a-²-3", "a--1-3", "a-1.0-2", "\0"]
)
@given(st.text())
def test_what_is_no_owner_is_none_and_any_text_can_be_parsed(text: str, any_text: str) -> None:
    owner = Owner.parse(any_text)

    assert Owner.parse(text) is None
    assert owner is None or Owner.parse(str(owner)) == owner
