"""The manifests in ``deploy/`` parse, and start torchrun as it wants to be started."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import yaml
from torch.distributed.run import parse_args, parse_min_max_nnodes

from tests.docs.blocks import ROOT

_SLURM = ROOT / "deploy" / "slurm.sbatch"
_KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"


_STAND_INS = {
    # Runs what follows the options, as the one task of a step.
    "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
    "scancel": '#!/bin/bash\necho "scancel $*"\n',
    "scontrol": '#!/bin/bash\necho "scontrol $*"\n',
    # Starts a rank, which starts a worker; each says that it was told to stop.
    "torchrun": f"""#!{sys.executable}
import signal, subprocess, sys, time

def stop(*_):
    print(name, "stopped", flush=True)
    below and below.kill()
    sys.exit()

name = sys.argv[1] if len(sys.argv) == 2 else "torchrun"
signal.signal(signal.SIGTERM, stop)
next_name = {{"torchrun": "rank", "rank": "worker"}}.get(name)
below = next_name and subprocess.Popen([sys.executable, __file__, next_name])
print(name, "began", flush=True)
below.wait() if below else time.sleep(60)
""",
}


def test_the_batch_script_stops_the_ranks_and_not_the_workers_of_their_loaders(
    tmp_path: Path,
) -> None:
    for name, text in _STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    command = ["bash", str(_SLURM)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as batch:
        assert batch.stdout is not None
        while "worker began" not in batch.stdout.readline():
            pass

        batch.send_signal(signal.SIGUSR1)
        rest, _ = batch.communicate(timeout=60)

    assert rest.splitlines() == ["rank stopped", "scontrol requeue 7"]
    assert batch.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {*_STAND_INS}


def test_torchrun_takes_its_arguments_and_pods_find_each_other_by_the_service() -> None:
    text = _SLURM.read_text().replace("\\\n", " ")
    found = re.search(r"^srun .* torchrun (.*) &$", text, re.MULTILINE)
    assert found
    line, given = found[1], {"SLURM_NNODES": "2", "ranks_per_node": "1", "head": "node0"}
    given |= {"port": "29400", "SLURM_JOB_ID": "7", "{SLURM_RESTART_COUNT:-0}": "0"}
    for name, value in given.items():
        line = line.replace(f"${name}", value)
    assert "$" not in line
    service, job = yaml.safe_load_all(_KUBERNETES.read_text())
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]

    for words in (shlex.split(line), container["command"][1:]):
        parsed = parse_args(words)
        assert parse_min_max_nnodes(parsed.nnodes) == (2, 2)
        assert parsed.rdzv_backend == "c10d"
        assert parsed.rdzv_endpoint.endswith(":29400")
        assert (ROOT / parsed.training_script).is_file()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    # Pods of an indexed Job are called by its name and their index, in the domain of the service.
    assert job["spec"]["completionMode"] == "Indexed"
    name = service["metadata"]["name"]
    assert template["spec"]["subdomain"] == name
    endpoint = f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:29400"
    assert endpoint in container["command"]
    # A node keeps its checkpoints where the program saves them.
    (mount,) = container["volumeMounts"]
    assert f'local="{mount["mountPath"]}"' in (ROOT / "examples" / "minimal.py").read_text()
    # Ranks have time to save before they are killed.
    (grace_s,) = (v["value"] for v in container["env"] if "SHUTDOWN_TIMEOUT" in v["name"])
    assert int(grace_s) < template["spec"]["terminationGracePeriodSeconds"]
