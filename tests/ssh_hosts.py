"""Hosts with an sshd each: network namespaces, with homes and shared memory of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.network_hosts import Host, hosts

SSHD = "/usr/sbin/sshd"


class Machine:
    """A host with processes, a home, shared memory and a /tmp of its own."""

    def __init__(self, host: Host, home: Path, at: Path) -> None:
        """``home`` is its folder for what its processes see ``at``."""
        self.host, self.home = host, home
        script = (
            f"set -e; mount --bind {home} {at}; mount -t tmpfs -o size=1g tmpfs /dev/shm; "
            "mkdir /dev/shm/over /dev/shm/work; mount -t overlay overlay /tmp "
            "-o lowerdir=/tmp,upperdir=/dev/shm/over,workdir=/dev/shm/work; "
            "echo up; exec sleep infinity"
        )
        command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._unshare = subprocess.Popen(
            host.command(*command, "sh", "-c", script), stdout=subprocess.PIPE, text=True
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self._init = children.read_text().split()[0]
        self._sshd: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return self.host.address

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "-t", self._init, "-m", "-p", "-n", *words]

    def pids(self) -> list[int]:
        return self.host.pids()

    def start_sshd(self, config: Path) -> None:
        with config.with_suffix(f".{self.host.namespace}").open("ab") as log:
            command = self.command(SSHD, "-D", "-e", "-f", str(config))
            self._sshd.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def end(self) -> None:
        self.host.end_processes()
        for process in (*self._sshd, self._unshare):
            process.wait(30)
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()


@dataclass
class Cluster:
    """``operator`` is where commands are typed; ``folder`` holds keys and homes."""

    operator: Host
    folder: Path
    user: str
    home: Path
    machines: list[Machine] = field(default_factory=list)

    def start_sshd(self, machine: Machine) -> None:
        machine.start_sshd(self.folder / "sshd_config")
        deadline = time.monotonic() + 30.0
        knock = f"import socket; socket.create_connection(('{machine.address}', 22), 1).close()"
        while subprocess.run(
            self.operator.command(sys.executable, "-c", knock), capture_output=True
        ).returncode:
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.1)

    def end_sshd(self, machine: Machine) -> None:
        """Every sshd, and so every connection."""
        for pid in machine.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)

    def deploy(self, *words: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """``cloverinfer deploy``, typed at the operator's."""
        command = [sys.executable, "-m", "cloverinfer.cli", "deploy", words[0]]
        command += ["--inventory", str(self.folder / "cluster.yaml"), *words[1:]]
        return subprocess.run(
            self.operator.command(*command),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@contextlib.contextmanager
def ssh_hosts(count: int, folder: Path) -> Iterator[Cluster]:
    if not Path(SSHD).exists():
        pytest.skip("there is no sshd: install openssh-server")
    user = f"clv{os.getpid() % 100_000}"
    home = Path("/home") / user
    with hosts(count + 1) as (operator, *others), contextlib.ExitStack() as undo:
        cluster = Cluster(operator, folder, user, home)
        _add_user(cluster, undo)
        _keys(cluster)
        undo.callback(operator.end_processes)
        for host in others:
            own = folder / host.namespace
            _bare_home(own)
            cluster.machines.append(Machine(host, own, home))
            undo.callback(cluster.machines[-1].end)
            cluster.start_sshd(cluster.machines[-1])
        yield cluster


def _add_user(cluster: Cluster, undo: contextlib.ExitStack) -> None:
    """An account of the test's own. It is root by another name where the interpreter lies where
    nobody else may look."""
    words = ["useradd", "--no-create-home", "--home-dir", str(cluster.home), "--shell", "/bin/sh"]
    reachable = subprocess.run(
        ["runuser", "-u", "nobody", "--", sys.executable, "-c", "import torch"], capture_output=True
    )
    if reachable.returncode:
        words += ["--non-unique", "--uid", "0"]
    subprocess.run([*words, cluster.user], check=True, capture_output=True, timeout=30)
    undo.callback(
        subprocess.run, ["userdel", "-f", cluster.user], check=True, capture_output=True, timeout=30
    )
    cluster.home.mkdir()
    undo.callback(cluster.home.rmdir)
    # An account without a password is locked to sshd; * is no password's hash.
    subprocess.run(["usermod", "-p", "*", cluster.user], check=True, timeout=30)


def _keys(cluster: Cluster) -> None:
    folder = cluster.folder
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "key", "stranger"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\n"
        "PidFile none\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin prohibit-password\n"
        f"StrictModes no\nAuthorizedKeysFile {folder}/key.pub\n"
    )


def _bare_home(home: Path) -> None:
    """With an environment that finds this one's packages: nothing is downloaded."""
    venv = home / "cloverinfer" / "venv"
    venv.parent.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120
    )
    site = next((venv / "lib").glob("python*/site-packages"))
    below = [sysconfig.get_path("purelib"), *(path for path in sys.path if "site-packages" in path)]
    (site / "below.pth").write_text("\n".join(dict.fromkeys(below)) + "\n")
