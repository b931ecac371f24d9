"""What stands in deploy/ is checked by the tools of those whose formats these are."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "deploy-tools" / "bin"


def checked(*words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_dockerfile() -> None:
    checked(TOOLS / "hadolint", "deploy/docker/Dockerfile")


def test_shell_scripts() -> None:
    scripts = [*ROOT.glob("scripts/*.sh"), ROOT / "deploy/slurm/clover.sbatch", ROOT / ".ci/run"]
    scripts += [*ROOT.glob("tools/*.sh"), *ROOT.glob("tests/**/*.sh")]
    checked(TOOLS / "shellcheck", *scripts)


def test_kubernetes_objects() -> None:
    told = checked(TOOLS / "kubernetes-validate", "deploy/k8s/raycluster.yaml")
    assert "passed for resource service/clover" in told
    told = checked(TOOLS / "kubernetes-validate", "deploy/k8s/vllm.yaml")
    assert told.count("passed for resource") == 5


def test_the_pods_of_vllm_fit_each_other() -> None:
    """What they are started with is what our commands take, and the connectors are met where the
    nodes say."""
    from cloverinfer.cli import parser

    pods = {}
    for one in yaml.safe_load_all((ROOT / "deploy/k8s/vllm.yaml").read_text()):
        if one["kind"] == "Deployment":
            containers = one["spec"]["template"]["spec"]["containers"]
            pods[one["metadata"]["name"]] = {box["name"]: box["args"] for box in containers}
    parser.parse(pods["clover-orchestrator"]["orchestrator"])
    for name, role in (("clover-prefill", "kv_producer"), ("clover-decode", "kv_consumer")):
        node = parser.parse([word.replace("$(POD_IP)", "192.0.2.1") for word in pods[name]["node"]])
        told = next(word for word in pods[name]["vllm"] if word.startswith("--kv-transfer-config"))
        connector = json.loads(told.partition("=")[2])
        place = connector["kv_connector_extra_config"]
        assert connector["kv_role"] == role
        assert name == f"clover-{node.role}"
        assert f"--port={node.url.rpartition(':')[2]}" in pods[name]["vllm"]
        if role == "kv_consumer":
            assert node.kv_address == f"192.0.2.1:{place['kv_port']}"


def spec_of(file: str, kind: str) -> Any:
    documents = yaml.safe_load_all((ROOT / "deploy/k8s" / file).read_text())
    return next(one for one in documents if one["kind"] == kind)["spec"]


def test_the_ray_clusters_of_kuberay_have_room_for_every_role() -> None:
    """Its own schema is not at hand: the parts that our nodes depend on."""
    cluster = spec_of("raycluster.yaml", "RayCluster")
    for spec in (cluster, spec_of("rayservice.yaml", "RayService")["rayClusterConfig"]):
        rooms = [group["rayStartParams"]["resources"] for group in spec["workerGroupSpecs"]]
        assert [yaml.safe_load(yaml.safe_load(room)) for room in rooms] == [
            {"clover_prefill": 1},
            {"clover_dense": 1},
            {"clover_attention": 1},
        ]
    server = cluster["headGroupSpec"]["template"]["spec"]["containers"][1]
    from cloverinfer.cli import parser

    assert parser.parse(server["args"]).command is not None


def test_the_pods_of_kuberay_are_pods(tmp_path: Path) -> None:
    cluster = spec_of("raycluster.yaml", "RayCluster")
    clusters = [cluster, spec_of("rayservice.yaml", "RayService")["rayClusterConfig"]]
    groups = [
        one for spec in clusters for one in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    ]
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}}
    pods = [head | {"spec": group["template"]["spec"]} for group in groups]
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump_all(pods))
    told = checked(TOOLS / "kubernetes-validate", tmp_path / "pods.yaml")
    assert told.count("passed for resource") == len(groups)


def test_the_ray_launcher_takes_its_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / "deploy/ray/cluster.yaml").read_text())
    validate_config(prepare_config(config))


def test_the_systemd_unit() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze: install systemd")
    unit = ROOT / "deploy/systemd/cloverinfer.service"
    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    ).stderr
    # The executable is not on this host; nothing else may be said.
    lines = [line for line in told.splitlines() if str(unit.name) in line]
    assert all("is not executable" in line for line in lines), told
