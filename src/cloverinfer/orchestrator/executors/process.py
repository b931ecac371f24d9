"""Nodes as processes of this host. A node's standard input ends when this process does, and so
does the node."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from ...core.errors import NodeStartError
from ...nodes.config import NodeConfig
from ...nodes.main import Report, Started, frame_config
from ...transport.shm import remove_leftovers
from ...wire.messages import NodeInfo
from ..placement import Placement, on_this_host
from .base import STOP_SECONDS, Executor, OnDeath, Progress

log = logging.getLogger(__name__)
SPIN_COUNT = "2000"
"""How long idle OpenMP threads spin: nodes of one host take turns on the cores, and a thread that
spins after its turn takes the next node's."""


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    report: int
    """Read end of the pipe that the node's report comes through."""
    given_up: str = ""
    """Why it was ended, where that was by ``end``."""


class ProcessExecutor(Executor):
    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._stopping = threading.Event()

    def place(
        self, names: Mapping[str, Sequence[str]], room_timeout: float, progress: Progress
    ) -> Placement:
        return on_this_host(chain(*names.values()))

    def start(
        self, configs: Sequence[NodeConfig], timeout: float, on_death: OnDeath, progress: Progress
    ) -> list[NodeInfo]:
        deadline = time.monotonic() + timeout
        try:
            for config in configs:
                self._children.append(self._spawn(config))
            progress(f"starting {', '.join(config.name for config in configs)} (processes)")
            infos = self._reports(deadline, timeout)
        except BaseException:
            self.stop()
            raise
        for child in self._children:
            threading.Thread(
                target=self._watch, args=(child, on_death), name=f"watch-{child.name}", daemon=True
            ).start()
        return infos

    def _spawn(self, config: NodeConfig) -> _Child:
        reading, writing = os.pipe()
        env = {"GOMP_SPINCOUNT": SPIN_COUNT} | os.environ
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "cloverinfer.nodes.main", str(writing)],
                stdin=subprocess.PIPE,
                stdout=2,  # a node's standard output is for logs
                pass_fds=(writing,),
                env=env,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends its nodes
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        assert process.stdin is not None
        try:
            process.stdin.write(frame_config(config))
            process.stdin.flush()
        except BrokenPipeError:
            log.debug("%s ended before it read its config", config.name)  # its report says why
        return _Child(config.name, process, reading)

    def _reports(self, deadline: float, timeout: float) -> list[NodeInfo]:
        """Every child's info in order; raises as soon as one reports that it cannot start."""
        infos: dict[str, NodeInfo] = {}
        received: dict[str, bytes] = {child.name: b"" for child in self._children}
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.report, selectors.EVENT_READ, child)
            while len(infos) < len(self._children):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = ", ".join(c.name for c in self._children if c.name not in infos)
                    raise NodeStartError(f"{late} did not start within {timeout:g} s")
                for key, _ in ready:
                    child: _Child = key.data
                    data = os.read(child.report, 65536)
                    received[child.name] += data
                    if not data:
                        selector.unregister(child.report)
                        infos[child.name] = self._read_report(child, received[child.name])
        return [infos[child.name] for child in self._children]

    def _read_report(self, child: _Child, data: bytes) -> NodeInfo:
        os.close(child.report)
        child.report = -1
        if not data:
            code = child.process.wait()
            raise NodeStartError(f"{child.name} ended with {exit_reason(code)} before it was ready")
        report = msgspec.msgpack.decode(data, type=Report)
        if isinstance(report, Started):
            return report.info
        raise NodeStartError(f"{child.name} could not start: {report.reason}")

    def _watch(self, child: _Child, on_death: OnDeath) -> None:
        code = child.process.wait()
        if not self._stopping.is_set():
            on_death(child.name, child.given_up or f"its process ended with {exit_reason(code)}")
        remove_leftovers(child.process.pid)

    def end(self, name: str, reason: str) -> None:
        for child in self._children:
            if child.name == name:
                child.given_up = reason
                child.process.kill()  # ends a process that is stopped too

    def stop(self) -> None:
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            if child.report >= 0:
                os.close(child.report)
                child.report = -1
            assert child.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended before it read its config
                child.process.stdin.close()  # the end of its input ends the node
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end within %g s: killed", child.name, STOP_SECONDS)
                child.process.kill()
                child.process.wait()
            remove_leftovers(child.process.pid)
        self._children.clear()


def exit_reason(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
