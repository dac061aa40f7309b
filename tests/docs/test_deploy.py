"""The manifests in ``deploy/`` parse, and start torchrun as it wants to be started."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args, parse_min_max_nnodes

from tests.docs.blocks import ROOT

_SLURM = ROOT / "deploy" / "slurm.sbatch"
_KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"


def _slurm_torchrun() -> list[str]:
    text = _SLURM.read_text().replace("\\\n", " ")
    found = re.search(r"^srun .* torchrun (.*) &$", text, re.MULTILINE)
    assert found
    values = {
        "SLURM_NNODES": "2",
        "ranks_per_node": "1",
        "head": "node0",
        "port": "29400",
        "SLURM_JOB_ID": "7",
        "{SLURM_RESTART_COUNT:-0}": "0",
    }
    line = found[1]
    for name, value in values.items():
        line = line.replace(f"${name}", value)
    assert "$" not in line
    return shlex.split(line)


@pytest.fixture
def service() -> dict[str, Any]:
    return _documents()["Service"]


@pytest.fixture
def job() -> dict[str, Any]:
    return _documents()["Job"]


def _documents() -> dict[str, dict[str, Any]]:
    documents = list(yaml.safe_load_all(_KUBERNETES.read_text()))
    assert len(documents) == 2
    return {document["kind"]: document for document in documents}


def _container(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _environment(job: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in _container(job)["env"]}


def test_options_of_the_batch_script_stand_before_its_first_command() -> None:
    lines = _SLURM.read_text().splitlines()
    given = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))

    assert lines[0] == "#!/bin/bash"
    assert max(given) < first
    options = " ".join(lines[number].removeprefix("#SBATCH ") for number in given)
    for option in ("--nodes=2", "--ntasks-per-node=1", "--requeue", "--signal=B:USR1@180"):
        assert option in options.split()


def test_ranks_have_time_to_save_before_the_limit_of_slurm() -> None:
    text = _SLURM.read_text()
    told = re.search(r"--signal=B:USR1@(\d+)", text)
    given = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text)

    assert told
    assert given
    assert int(given[1]) < int(told[1])


_STAND_INS = {
    # Runs what follows the options, as the one task of a step.
    "srun": """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
""",
    "scancel": """#!/bin/bash
echo "scancel $*"
""",
    "scontrol": """#!/bin/bash
echo "scontrol $*"
""",
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
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
    }
    with subprocess.Popen(
        ["bash", str(_SLURM)], env=environment, stdout=subprocess.PIPE, text=True
    ) as batch:
        assert batch.stdout is not None
        told = [batch.stdout.readline()]
        while "worker began" not in told[-1]:
            told.append(batch.stdout.readline())

        batch.send_signal(signal.SIGUSR1)
        rest, _ = batch.communicate(timeout=60)

    assert rest.splitlines() == ["rank stopped", "scontrol requeue 7"]
    assert batch.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {*_STAND_INS}


@pytest.mark.parametrize("system", ["slurm", "kubernetes"])
def test_torchrun_takes_its_arguments(system: str, job: dict[str, Any]) -> None:
    words = _slurm_torchrun() if system == "slurm" else _container(job)["command"][1:]

    parsed = parse_args(words)

    assert parse_min_max_nnodes(parsed.nnodes) == (2, 2)
    assert parsed.rdzv_backend == "c10d"
    assert parsed.rdzv_endpoint.endswith(":29400")
    assert parsed.max_restarts == 10
    assert (ROOT / parsed.training_script).is_file()


@pytest.mark.parametrize("text", [_SLURM.read_text(), _KUBERNETES.read_text()])
def test_attempts_have_stores_of_their_own(text: str) -> None:
    assert re.search(r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE(=1|, value: \"1\")", text)


def test_pods_find_each_other_by_the_service(service: dict[str, Any], job: dict[str, Any]) -> None:
    spec, template = job["spec"], job["spec"]["template"]
    name = service["metadata"]["name"]

    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    # Pods of an indexed Job are called by its name and their index, in the domain of the service.
    assert spec["completionMode"] == "Indexed"
    assert template["spec"]["subdomain"] == name
    endpoint = f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:29400"
    assert endpoint in _container(job)["command"]


def test_each_node_has_one_pod_which_keeps_its_checkpoints_there(job: dict[str, Any]) -> None:
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (mount,) = _container(job)["volumeMounts"]
    (volume,) = pod["volumes"]

    assert spec["completions"] == spec["parallelism"] == 2
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    assert mount["name"] == volume["name"]
    assert "hostPath" in volume
    assert f'local="{mount["mountPath"]}"' in (ROOT / "examples" / "minimal.py").read_text()


def test_pods_have_time_to_save_before_they_are_killed(job: dict[str, Any]) -> None:
    grace_s = job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]

    assert int(_environment(job)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace_s


def test_the_policy_of_failures_is_one_that_kubernetes_takes(job: dict[str, Any]) -> None:
    # A podFailurePolicy goes with pods that are not restarted in place.
    assert job["spec"]["podFailurePolicy"]["rules"]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_the_image_has_what_the_manifest_runs() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()

    names = [
        name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()
    ]

    assert {"examples", "localckpt", "pyproject.toml", "constraints.txt"} <= set(names)
    assert [name for name in names if not (ROOT / name).exists()] == []
