"""The Slurm job, run for real on three hosts made of namespaces, where scripts stand in for Slurm's
``srun`` and ``scontrol``."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy_kit import ask, ok, write_inventory
from tests.ssh_hosts import Cluster, ssh_hosts
from tests.tiny_models import add_tokenizer, make_tiny

pytestmark = pytest.mark.timeout(600)
JOB = Path(__file__).parents[2] / "deploy" / "slurm" / "clover.sbatch"
READY_SECONDS = 240.0
_OPTIONS = """while :; do
  case $1 in --nodelist=*) host=${1#*=};; --*) ;; *) break;; esac
  shift
done"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "hosts"
    folder.mkdir()
    for one in (tmp_path, folder):
        one.chmod(0o755)
    with ssh_hosts(3, folder) as made:
        write_inventory(made)
        ok(made, "push")
        yield made


def stand_ins(cluster: Cluster, folder: Path) -> Path:
    """``srun --nodelist=hN COMMAND`` runs the command on that host."""
    folder.mkdir()
    address = cluster.machines[0].address
    cases = "\n".join(
        f'h{number}) exec {" ".join(machine.command())} "$@";;'
        for number, machine in enumerate(cluster.machines, 1)
    )
    scripts = {
        "scontrol": "echo h1; echo h2; echo h3",
        "getent": f"echo '{address} STREAM h1'",
        "srun": f"{_OPTIONS}\ncase $host in\n{cases}\nesac",
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def test_the_job_serves_on_three_hosts(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = add_tokenizer(make_tiny("llama", tmp_path / "model"))
    environ = os.environ | {
        "PATH": f"{stand_ins(cluster, tmp_path / 'bin')}:{os.environ['PATH']}",
        "CLOVER_VENV": str(cluster.machines[0].home / "cloverinfer" / "venv"),
        "SLURM_JOB_NODELIST": "h[1-3]",
        "MODEL_NAME": str(model),
        "CLOVER_MODEL_DTYPE": "float32",
        "CLOVER_CACHE_NUM_BLOCKS": "64",
        "CLOVER_CLUSTER_THREADS": "1",
        "no_proxy": ",".join(machine.address for machine in cluster.machines),
    }
    log = tmp_path / "job.log"
    with log.open("wb") as file:
        job = subprocess.Popen(
            ["bash", str(JOB)], env=environ, cwd=tmp_path, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_SECONDS
        while b"ready: " not in log.read_bytes():
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        answer = ask(cluster, "/v1/completions", {"prompt": "a b", "max_tokens": 3})
        assert answer["usage"]["completion_tokens"] == 3
        nodes = ask(cluster, "/v1/cluster")["models"][0]["nodes"]
        hosts = [node["address"].split("//")[1].split(":")[0] for node in nodes]
        assert hosts == [machine.address for machine in cluster.machines]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(30)
