"""``cloverinfer deploy`` in mode vllm with real vLLM: two hosts made of namespaces, one pair.

``make test-vllm`` installs vLLM and runs this.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy_kit import NAMES, ask, ok, processes, write_inventory
from tests.ssh_hosts import Cluster, ssh_hosts
from tests.vllm_servers import PYTHON, model_folder

from cloverinfer.config.cluster import ModelConfig
from cloverinfer.models import resolve_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm"),
]


def test_a_pair_serves_and_is_stopped(tmp_path: Path) -> None:
    made = resolve_model(ModelConfig(dtype="float32")).path
    model = model_folder(made, tmp_path / "model")
    (tmp_path / "hosts").mkdir()
    with ssh_hosts(2, tmp_path / "hosts") as cluster:
        for folder in (tmp_path, cluster.folder):
            folder.chmod(0o755)
        hosts = [
            {"name": name, "address": machine.address, "roles": [role]}
            for name, machine, role in zip(
                NAMES, cluster.machines, ("prefill", "decode"), strict=False
            )
        ]
        write_inventory(
            cluster,
            mode="vllm",
            hosts=hosts,
            settings={
                "model": {"model_path": str(model), "dtype": "float32", "max_model_len": 512},
                "server": {"served_model_name": "clover"},
                "scheduler": {"max_num_seqs": 4},
            },
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            vllm={
                "packages": [],
                "venv": str(PYTHON.parents[1]),
                "options": ["--enforce-eager"],
                "connector": {"transport": "tcp"},
            },
        )
        ok(cluster, "install")
        ok(cluster, "push")
        said = ok(cluster, "run", "1", "1", timeout=600.0)
        assert "with prompts from prefill" in said
        body = {"model": "clover", "prompt": "The capital of France is", "max_tokens": 8}
        answer = ask(cluster, "/v1/completions", body | {"temperature": 0})
        assert "Paris" in answer["choices"][0]["text"]
        assert answer["usage"]["stages"]["transfer"] is not None
        ok(cluster, "stop")
        assert processes(cluster) == []
        assert left(cluster) == []


def left(cluster: Cluster) -> list[str]:
    """Processes of vLLM, by any name that they gave themselves."""
    found = []
    for machine in cluster.machines:
        for pid in machine.pids():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().lower()
            found += [words.decode(errors="replace")] if b"vllm" in words else []
    return found
