"""A spare beside a launcher's agent, which takes the place of a node that is lost."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from localckpt.waiting import wait_until
from tests.managers.jobs import Dirs
from tests.upstream.environment import needs, unused_port, upstream_variables

_LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "ft_launcher": "nvidia_resiliency_ext.fault_tolerance.launcher",
}
_PATIENCE_S = 120.0


def _accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
@pytest.mark.fault("survivors")
@needs("nvidia_resiliency_ext.fault_tolerance")
@pytest.mark.parametrize("launcher", _LAUNCHERS)
def test_a_spare_takes_the_place_of_a_lost_node(
    launcher: str, node_dirs: Dirs, tmp_path: Path
) -> None:
    port, logs = unused_port(), [tmp_path / name for name in ("A", "B", "C")]
    place = f"127.0.0.1:{port}"
    python = [sys.executable, "-m"]
    agent = [*python, _LAUNCHERS[launcher], "--nnodes", "2:2", "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "job"]
    environment = os.environ | upstream_variables() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents: list[subprocess.Popen[bytes]] = []

    def await_(holds: bool) -> bool:
        assert all(agent.poll() is None for agent in agents), [log.read_text() for log in logs]
        return holds

    try:
        for node, log in zip(node_dirs(3), logs, strict=True):
            log.touch()
            train = ["--max-restarts", "3", "-m", "tests.integrations.spare_runs", str(node)]
            beside = [*python, "localckpt.spare", "--store", f"{place}/job", "--local", str(node)]
            command = [*([*beside, "--"] if len(agents) == 2 else []), *agent, *train]
            with log.open("wb") as out:
                agents.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
            # The first has the store of the rendezvous, and outlives the others.
            wait_until(lambda: await_(_accepts(port)), _PATIENCE_S)
        wait_until(lambda: await_("the spare holds" in logs[2].read_text()), _PATIENCE_S)
        lost = psutil.Process(agents[1].pid)
        for process in [*lost.children(recursive=True), lost]:
            process.kill()
        ends = [agents[number].wait(_PATIENCE_S) for number in (0, 2)]
    finally:
        for one in agents:
            if one.poll() is None:
                for process in psutil.Process(one.pid).children(recursive=True):
                    process.kill()
                one.kill()
            one.wait()

    told = "".join(logs[number].read_text() for number in (0, 2))
    assert ends == [0, 0], told
    # No rank keeps a copy of another one's shard.
    assert "ranks 0 and 1 from own node" in told, told
    first = re.findall(r"trained from step (\d+) to the end", told)
    assert len(first) == 2
    assert int(first[0]) == int(first[1]) >= 4
