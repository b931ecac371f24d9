"""Nodes as threads of this process. They share its cores through a gate."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NoReturn

from ...core.errors import NodeStartError, describe
from ...nodes.base import Node
from ...nodes.build import build_node
from ...nodes.config import NodeConfig
from ...nodes.gate import Gate, OpenGate
from ...nodes.gpu import release_memory
from ...wire.messages import NodeInfo
from ..placement import Placement, on_this_host
from .base import STOP_SECONDS, Executor, OnDeath, Progress

log = logging.getLogger(__name__)


class LocalExecutor(Executor):
    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._nodes: dict[str, Node] = {}
        self._given_up: dict[str, str] = {}
        """Why nodes that stand still were told to end, by name."""
        self._stopping = threading.Event()

    def place(
        self, names: Mapping[str, Sequence[str]], room_timeout: float, progress: Progress
    ) -> Placement:
        return on_this_host(chain(*names.values()), one_process=True)

    def start(
        self, configs: Sequence[NodeConfig], timeout: float, on_death: OnDeath, progress: Progress
    ) -> list[NodeInfo]:
        on_cores = sum(not config.on_gpu for config in configs)
        gate = Gate() if on_cores > 1 else OpenGate()
        reports: queue.SimpleQueue[tuple[str, NodeInfo | str]] = queue.SimpleQueue()
        for config in configs:
            thread = threading.Thread(
                target=self._run,
                args=(config, OpenGate() if config.on_gpu else gate, reports, on_death),
                name=config.name,
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        progress(f"starting {', '.join(config.name for config in configs)} (threads)")
        infos: dict[str, NodeInfo] = {}
        deadline = time.monotonic() + timeout
        while len(infos) < len(configs):
            try:
                name, report = reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = [config.name for config in configs if config.name not in infos]
                self._refuse(f"{', '.join(late)} did not start within {timeout:g} s")
            if isinstance(report, str):
                self._refuse(f"{name} could not start: {report}")
            infos[name] = report
        return [infos[config.name] for config in configs]

    def _refuse(self, reason: str) -> NoReturn:
        self.stop()
        raise NodeStartError(reason)

    def _run(
        self,
        config: NodeConfig,
        gate: Gate | OpenGate,
        reports: queue.SimpleQueue[tuple[str, NodeInfo | str]],
        on_death: OnDeath,
    ) -> None:
        """A node's thread: the boundary where its errors become a reason."""
        try:
            node = build_node(config, gate)
            info = node.info()
        except Exception as problem:
            log.debug("%s could not start", config.name, exc_info=True)
            reports.put((config.name, describe(problem)))
            return
        self._nodes[config.name] = node
        if self._stopping.is_set():
            node.stop()
        reports.put((config.name, info))
        reason = "its loop ended"
        try:
            node.run()
        except Exception as problem:
            log.exception("%s died", config.name)
            reason = describe(problem)
        if not self._stopping.is_set():
            on_death(config.name, self._given_up.get(config.name, reason))

    def end(self, name: str, reason: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            log.error("the thread of %s cannot be ended: what it may write to stays taken", name)
            self._given_up[name] = reason
            node.stop()

    def stop(self) -> None:
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for node in list(self._nodes.values()):
            node.stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("the thread of %s did not end within %g s", thread.name, STOP_SECONDS)
                self._nodes.pop(thread.name, None)
        release_memory(self._nodes.values())
        self._threads.clear()
        self._nodes.clear()
