"""``cloverinfer deploy`` over ssh against three hosts made of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy_kit import ask, fails, line_of, ok, processes, write_inventory
from tests.ssh_hosts import Cluster, ssh_hosts
from tests.tiny_models import add_tokenizer, make_tiny

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ssh_hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        made.folder.chmod(0o755)
        write_inventory(made)
        yield made
        done = made.deploy("stop")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(add_tokenizer(make_tiny("llama", tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def installed(cluster: Cluster, model: str) -> Cluster:
    """All three hosts ready to run."""
    write_inventory(cluster, model)
    ok(cluster, "install")
    ok(cluster, "push")
    return cluster


# -- what is wrong with a host is told in a line, and harms no other


def test_a_wrong_key(cluster: Cluster) -> None:
    key = {"user": cluster.user, "key": str(cluster.folder / "stranger")}
    options = [f"UserKnownHostsFile={cluster.folder}/known_hosts"]
    write_inventory(cluster, ssh=key | {"options": options})
    said = fails(cluster, "status")
    assert "refuses the key" in line_of(said, "gate")
    write_inventory(cluster)


def test_an_unreachable_host_does_not_keep_the_others(cluster: Cluster) -> None:
    cluster.end_sshd(cluster.machines[1])
    try:
        said = fails(cluster, "install")
        assert "nothing listens at its ssh port" in line_of(said, "dense-host")
        assert "ok   gate: Python 3." in said
        assert "ok   attention-host: Python 3." in said
    finally:
        cluster.start_sshd(cluster.machines[1])


def test_a_full_disk(cluster: Cluster) -> None:
    last = cluster.machines[2]
    (last.home / "small").mkdir()
    small = str(cluster.home / "small")
    subprocess.run(
        last.command("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small), check=True
    )
    write_inventory(cluster, folder="small")
    said = fails(cluster, "install", "--hosts", "attention-host")
    assert "MiB are free" in line_of(said, "attention-host")
    assert "make room" in line_of(said, "attention-host")
    write_inventory(cluster)


def test_a_python_that_is_too_old(cluster: Cluster) -> None:
    old = cluster.machines[1].home / "python"
    old.write_text('#!/bin/sh\ncase "$2" in *platform*) echo 3.8.10;; *) exit 1;; esac\n')
    old.chmod(0o755)
    write_inventory(cluster, python="./python")
    said = fails(cluster, "install", "--hosts", "dense-host,gate")
    assert "is Python 3.8.10: 3.10 or newer is needed" in line_of(said, "dense-host")
    assert "there is no ./python" in line_of(said, "gate")
    write_inventory(cluster)


def test_nothing_installed_is_told(cluster: Cluster) -> None:
    write_inventory(cluster, folder="elsewhere")
    assert "run deploy install" in line_of(fails(cluster, "status"), "gate")
    write_inventory(cluster)


def test_a_dry_run_touches_nothing(cluster: Cluster) -> None:
    write_inventory(cluster, folder="untouched")
    for words in (["install"], ["push"], ["run", "1", "1", "1"], ["stop"], ["status"]):
        said = ok(cluster, *words, "--dry-run")
        assert said.count("ssh -o BatchMode=yes") >= 3
    assert not any((one.home / "untouched").exists() for one in cluster.machines)
    write_inventory(cluster)


# -- a whole life


def test_sshd_that_dies_in_the_middle_is_told_and_the_next_try_completes(cluster: Cluster) -> None:
    last = cluster.machines[2]
    ended = threading.Event()

    def end_in_the_middle() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for pid in last.pids():
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"pip" in words and b"requirements.txt" in words:
                    cluster.end_sshd(last)
                    ended.set()
                    return
            time.sleep(0.02)

    watcher = threading.Thread(target=end_in_the_middle)
    watcher.start()
    said = fails(cluster, "install")
    watcher.join()
    assert ended.is_set()
    assert "run the command again" in line_of(said, "attention-host")
    assert "ok   gate" in said
    cluster.start_sshd(last)
    ok(cluster, "install")


def test_install_push_run_stop_and_run_again(installed: Cluster) -> None:
    said = ok(installed, "run", "1", "1", "1")
    assert "requests, steps by node" in said
    steps = json.loads(said[said.index("{", said.index("steps by node")) : said.index("}") + 1])
    assert set(steps) == {"prefill-0", "dense-0", "attention-0"}
    assert all(count > 0 for count in steps.values())
    status = ok(installed, "status")
    assert "gate: cloverinfer" in status
    assert "runs ray and server" in status
    assert where_nodes_are(installed) == [machine.address for machine in installed.machines]
    # Once more is nothing new; other counts are refused while it runs.
    assert "requests, steps by node" in ok(installed, "run", "1", "1", "1")
    assert "run deploy stop first" in fails(installed, "run", "1", "1")
    ok(installed, "stop")
    assert processes(installed) == []
    assert "nothing ran" in ok(installed, "stop")
    ok(installed, "run", "1", "1", "1")
    ok(installed, "stop")
    assert processes(installed) == []


def where_nodes_are(cluster: Cluster) -> list[str]:
    """Addresses of prefill, dense and attention node, by the server's word."""
    nodes = ask(cluster, "/v1/cluster")["models"][0]["nodes"]
    assert {node["transport"] for node in nodes} == {"tcp"}
    return [node["address"].split("//")[1].split(":")[0] for node in nodes]


def test_a_taken_port_is_told_and_nothing_is_left(installed: Cluster) -> None:
    gate = installed.machines[0]
    code = (
        f"import socket, time; s = socket.create_server(({gate.address!r}, 8000)); "
        "print('held', flush=True); time.sleep(99)"
    )
    command = gate.host.command(sys.executable, "-c", code)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            said = fails(installed, "run", "1", "1", "1")
            assert f"port 8000 at {gate.address} cannot be used" in line_of(said, "gate")
            assert processes(installed) == []
        finally:
            holder.kill()


def test_a_model_that_is_not_there_ends_what_was_started(installed: Cluster, model: str) -> None:
    write_inventory(installed, "/nowhere/model")
    said = fails(installed, "run", "1", "1", "1")
    assert "/nowhere/model" in line_of(said, "gate")
    assert "what was started is stopped again" in said
    assert processes(installed) == []
    write_inventory(installed, model)


def test_a_signal_stops_what_was_started(installed: Cluster) -> None:
    command = [sys.executable, "-m", "cloverinfer.cli", "deploy", "run", "1", "1", "1"]
    run = subprocess.Popen(
        installed.operator.command(*command, "--inventory", str(installed.folder / "cluster.yaml")),
        cwd=installed.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    with run, run.stdout:
        said = ""
        while "== wait for the server" not in said:
            line = run.stdout.readline()
            assert line, said
            said += line
        assert processes(installed) != []
        run.terminate()
        said += run.stdout.read()
        assert run.wait(120) == 143, said
    assert "what was started is stopped again" in said
    assert processes(installed) == []


def test_too_many_nodes_are_refused_before_anything_starts(installed: Cluster) -> None:
    assert "room for 1 dense nodes, not 2" in fails(installed, "run", "1", "2", "1")


def test_verify_runs_on_every_host(installed: Cluster) -> None:
    said = ok(installed, "verify", "--transport", "tcp")
    assert said.count("findings in order") == 3


def test_logs_show_every_host(installed: Cluster) -> None:
    said = ok(installed, "logs", "-n", "3")
    assert said.count("-- log/ray.log") == 3
    assert said.count("-- log/server.log") == 1
