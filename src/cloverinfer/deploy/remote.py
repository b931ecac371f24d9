"""One host over ssh: runs shell scripts there, and puts files there. Knows no steps.

A script arrives on the remote shell's standard input, so nothing is quoted twice. By convention a
script that fails on purpose writes ``clover: REASON`` and exits with 3.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..core.errors import CloverError
from .inventory import Host, Ssh

CONNECT_SECONDS = 10
_SSH_FAILED = 255
_MARK = "clover: "
Log = Callable[[str], None]

PRELUDE = """set -eu
fail() { echo "clover: $*" >&2; exit 3; }
"""


class HostError(CloverError):
    """A step failed on a host: what is wrong there, and what to do."""


class Running:
    """The ssh processes of one step on all hosts, so that they can be ended together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def end(self) -> None:
        """Ends what runs; nothing starts after it."""
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.kill()

    @contextlib.contextmanager
    def start(self, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """A process that is gone when the context ends."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._ended:
                raise HostError("not begun: the command was broken off")
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
            self._processes.add(process)
        try:
            with process:
                try:
                    yield process
                finally:
                    process.kill()
        finally:
            with self._lock:
                self._processes.discard(process)


class Remote:
    """``log`` takes what was run and what came back; with ``show``, a dry run, that takes the
    commands instead, and nothing is touched."""

    def __init__(
        self, host: Host, ssh: Ssh, log: Log, running: Running, show: Log | None = None
    ) -> None:
        self.host = host
        self._command = _ssh_command(host, host.ssh or ssh)
        self._log = log
        self._running = running
        self._dry_run = show is not None
        self._show = show or (lambda text: log(f"$ {text}"))

    def run(self, script: str, timeout: float = 120.0) -> str:
        """Its standard output; ``HostError`` where it fails or does not end in time."""
        self._show(f"{shlex.join([*self._command, 'sh -s'])} <<'END'\n{PRELUDE}{script}END")
        if self._dry_run:
            return ""
        return self._finish("sh -s", (PRELUDE + script).encode(), timeout)

    def put(self, data: bytes, path: str, timeout: float = 600.0) -> None:
        """Writes a file as a whole or not at all; readable by its owner alone."""
        target = shlex.quote(path)
        script = f"umask 077 && cat > {target}.part && mv {target}.part {target}"
        self._show(f"{shlex.join([*self._command, script])}  # {len(data)} bytes")
        if not self._dry_run:
            self._finish(script, data, timeout)

    def _finish(self, command: str, data: bytes, timeout: float) -> str:
        try:
            with self._running.start([*self._command, command]) as process:
                answer, problem = process.communicate(data, timeout)
        except subprocess.TimeoutExpired as error:
            raise HostError(f"no end after {timeout:g} s: the host may be overloaded") from error
        except FileNotFoundError as error:
            raise HostError("there is no ssh here: install an OpenSSH client") from error
        out, err = answer.decode(errors="replace"), problem.decode(errors="replace")
        self._log(out + err)
        if process.returncode:
            raise HostError(explain(process.returncode, err or out))
        return out


def _ssh_command(host: Host, ssh: Ssh) -> list[str]:
    options = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_SECONDS}",
        "StrictHostKeyChecking=accept-new",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
        *ssh.options,
    ]
    command = ["ssh"]
    for option in options:
        command += ["-o", option]
    if ssh.key is not None:
        command += ["-i", str(Path(ssh.key).expanduser()), "-o", "IdentitiesOnly=yes"]
    if ssh.port is not None:
        command += ["-p", str(ssh.port)]
    where = f"{ssh.user}@{host.address}" if ssh.user else host.address
    return [*command, where]


_SSH_REASONS = {
    "not accessible": "the key file of ssh.key cannot be read here: correct its path",
    "Permission denied": "the host refuses the key: check ssh.user and ssh.key, and that the "
    "public key stands in its ~/.ssh/authorized_keys",
    "Host key verification failed": "the host's key has changed: if that is right, remove the old "
    "one with ssh-keygen -R",
    "Connection refused": "nothing listens at its ssh port: start sshd there, or set ssh.port",
    "timed out": "the host does not answer: check that it is up and its address is right",
    "No route to host": "the host cannot be reached: check its address and the network",
    "Network is unreachable": "the host cannot be reached: check its address and the network",
    "Could not resolve": "its address is unknown: check it in the inventory",
}
"""What ssh says: what to do."""
_REASONS = {
    "No space left on device": "its disk is full: make room, or set folder to another disk",
    "Read-only file system": "its folder cannot be written to: set folder to another place",
    "cannot create directory": "its folder cannot be made: set folder to a place of the user's",
    "No module named 'cloverinfer": "cloverinfer is not in the environment there: run deploy push",
    "module 'cloverinfer' has no": "cloverinfer is there in part only: run deploy push",
    "No module named cloverinfer": "cloverinfer is not in the environment there: run deploy push",
    "is not a supported wheel": "the wheel does not fit its Python or system: make its environment "
    "with the Python of here (python), or name a wheel that fits (wheel)",
    "externally-managed-environment": "its Python refuses packages outside of environments: set "
    "python to one that can make virtual environments",
    "ensurepip is not": "its Python cannot make virtual environments: install python3-venv there",
    "No matching distribution": "a package is not to be had there: give the host an index, or put "
    "wheels there and name them in pip_options",
}
"""What other programs say: what to do."""


def explain(status: int, said: str) -> str:
    """One line: what went wrong by an exit status and what was said, and what to do."""
    if status < 0:
        return "broken off: run the command again"
    own = [line for line in said.splitlines() if line.startswith(_MARK)]
    if own:
        return own[-1].removeprefix(_MARK)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {status}"
    if status == _SSH_FAILED:
        for sign, advice in _SSH_REASONS.items():
            if sign in said:
                return advice
        return f"the connection was lost ({last}): run the command again"
    for sign, advice in _REASONS.items():
        if sign in said:
            return advice
    return f"{last} (exit status {status}; see its log)"
