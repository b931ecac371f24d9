"""Nodes as Ray actors. They are placed on this process's Ray node, since the transports that exist
so far connect processes of one host. ``max_restarts=0``: the orchestrator alone restarts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...core.errors import NodeStartError
from ...nodes.config import NodeConfig
from ...transport.shm import remove_leftovers
from ...wire.messages import NodeInfo
from ..layout import usable_cores
from .base import STOP_SECONDS, Executor, OnDeath, Progress
from .process import SPIN_COUNT

log = logging.getLogger(__name__)
WATCH_SECONDS = 1.0


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=3)
class NodeActor:
    """The shell of a few lines around a node."""

    def __init__(self, config: bytes) -> None:
        self._config = msgspec.msgpack.decode(config, type=NodeConfig)
        self._node: Any = None

    def pid(self) -> int:
        return os.getpid()

    def start(self) -> tuple[bytes, str]:
        """The node's info; or nothing, and why it could not start."""
        from ...nodes.build import build_node
        from ...nodes.local import describe

        try:
            self._node = build_node(self._config)
        except Exception as problem:
            return b"", describe(problem)
        return msgspec.msgpack.encode(self._node.info()), ""

    def run(self) -> None:
        self._node.run()

    def stop(self) -> None:
        if self._node is not None:
            self._node.stop()


class RayExecutor(Executor):
    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._names: list[str] = []
        self._pids: dict[str, int] = {}
        self._runs: list[Any] = []
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._owns_ray = False

    def start(
        self, configs: Sequence[NodeConfig], timeout: float, on_death: OnDeath, progress: Progress
    ) -> list[NodeInfo]:
        deadline = time.monotonic() + timeout
        try:
            self._connect(progress)
            progress(f"starting {', '.join(config.name for config in configs)} (Ray actors)")
            here = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            env = {"env_vars": {"GOMP_SPINCOUNT": SPIN_COUNT}}
            for config in configs:
                options = NodeActor.options(scheduling_strategy=here, runtime_env=env)
                self._actors.append(options.remote(msgspec.msgpack.encode(config)))
                self._names.append(config.name)
            infos = self._await_starts(deadline, timeout)
        except BaseException:
            self.stop()
            raise
        self._runs = [actor.run.remote() for actor in self._actors]
        self._watcher = threading.Thread(
            target=self._watch, args=(on_death,), name="watch-actors", daemon=True
        )
        self._watcher.start()
        return infos

    def _connect(self, progress: Progress) -> None:
        if ray.is_initialized():
            return
        progress("starting an embedded Ray on this machine")
        ray.init(
            address="local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        self._owns_ray = True

    def _await_starts(self, deadline: float, timeout: float) -> list[NodeInfo]:
        """Infos in order; raises as soon as one node reports that it cannot start."""
        infos: dict[str, NodeInfo] = {}
        pending = {actor.start.remote(): name for actor, name in zip(self._actors, self._names)}
        while pending:
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), timeout=left)
            if not ready:
                late = ", ".join(pending.values())
                raise NodeStartError(f"{late} did not start within {timeout:g} s")
            name = pending.pop(ready[0])
            try:
                data, reason = ray.get(ready[0])
            except RayError as problem:
                raise NodeStartError(f"{name} could not start: {problem}") from problem
            if reason:
                raise NodeStartError(f"{name} could not start: {reason}")
            infos[name] = msgspec.msgpack.decode(data, type=NodeInfo)
            self._pids[name] = infos[name].pid
        return [infos[name] for name in self._names]

    def _watch(self, on_death: OnDeath) -> None:
        """A run that ends, well or not, is a death unless we are stopping."""
        pending = dict(zip(self._runs, self._names))
        while pending and not self._stopping.is_set():
            ready, _ = ray.wait(list(pending), timeout=WATCH_SECONDS)
            for run in ready:
                name = pending.pop(run)
                reason = "its loop ended"
                try:
                    ray.get(run)
                except RayError as problem:
                    reason = str(problem).strip().splitlines()[0]
                remove_leftovers(self._pids[name])
                if not self._stopping.is_set():
                    on_death(name, reason)

    def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join(WATCH_SECONDS + STOP_SECONDS)
        try:
            self._stop_actors()
        finally:
            if self._owns_ray:
                ray.shutdown()
        for pid in self._pids.values():
            remove_leftovers(pid)

    def _stop_actors(self) -> None:
        try:
            ray.get([actor.stop.remote() for actor in self._actors], timeout=STOP_SECONDS)
            ray.wait(
                self._runs, num_returns=len(self._runs), timeout=STOP_SECONDS
            ) if self._runs else None
        except (RayError, GetTimeoutError) as problem:
            log.warning("an actor did not end in order: %s", problem)
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
