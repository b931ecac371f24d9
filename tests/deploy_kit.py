"""``cloverinfer deploy`` typed at a cluster of namespaces: inventories, and what is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.ssh_hosts import Cluster

ROLES = (["prefill"], ["dense", "decode"], ["attention"])
NAMES = ("gate", "dense-host", "attention-host")


def write_inventory(cluster: Cluster, model: str = "smollm2-135m", **fields: Any) -> None:
    hosts = [
        {"name": name, "address": machine.address, "roles": roles}
        for name, machine, roles in zip(NAMES, cluster.machines, ROLES, strict=False)
    ]
    inventory = {
        "ssh": {
            "user": cluster.user,
            "key": str(cluster.folder / "key"),
            "options": [f"UserKnownHostsFile={cluster.folder}/known_hosts"],
        },
        "python": sys.executable,
        "hosts": hosts,
        "settings": {
            "model": {"model_path": model, "dtype": "float32"},
            "cluster": {"threads": 1},
            "cache": {"num_blocks": 64},
        },
    }
    text = yaml.safe_dump(inventory | fields)
    (cluster.folder / "cluster.yaml").write_text(text)


def ok(cluster: Cluster, *words: str, timeout: float = 300.0) -> str:
    done = cluster.deploy(*words, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fails(cluster: Cluster, *words: str) -> str:
    """Its whole output, which has no traceback."""
    done = cluster.deploy(*words)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, 130, 143), said
    assert "Traceback" not in said
    return said


def processes(cluster: Cluster) -> list[str]:
    """Of the services, on all hosts."""
    found = []
    for machine in cluster.machines:
        for pid in machine.pids():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if b"CLOVER_SERVICE=" in environ:
                found.append(f"{machine.address}:{pid}")
    return found


def line_of(said: str, name: str) -> str:
    return next(line for line in said.splitlines() if f"FAIL {name}:" in line)


def ask(cluster: Cluster, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Asked from the operator's."""
    url = f"http://{cluster.machines[0].address}:8000{path}"
    data = None if body is None else json.dumps(body).encode()
    script = (
        "import sys, urllib.request as u; o = u.build_opener(u.ProxyHandler({})); "
        f"r = u.Request({url!r}, {data!r}, {{'Content-Type': 'application/json'}}); "
        "sys.stdout.write(o.open(r, timeout=120).read().decode())"
    )
    done = subprocess.run(
        cluster.operator.command(sys.executable, "-c", script),
        capture_output=True, text=True, timeout=150, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout))
