"""Nodes as Ray actors. They are placed on this process's Ray node, since the transports that exist
so far connect processes of one host. ``max_restarts=0``: the orchestrator alone restarts.

Results are awaited as futures and never by ``ray.get``, which an async actor (``GlobalScheduler``)
must not call.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...core.errors import NodeStartError
from ...nodes.config import NodeConfig
from ...transport.shm import lives, remove_leftovers
from ...wire.messages import NodeInfo
from ..layout import usable_cores
from .base import STOP_SECONDS, Executor, OnDeath, Progress
from .process import SPIN_COUNT

log = logging.getLogger(__name__)


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
        from ...core.errors import describe
        from ...nodes.build import build_node

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
        self._actors: dict[str, Any] = {}
        self._pids: dict[str, Future[int]] = {}
        self._runs: list[Future[None]] = []
        self._stopping = threading.Event()
        self._ray_folder = ""
        """Of the embedded Ray; empty where a Ray was running already."""

    def start(
        self, configs: Sequence[NodeConfig], timeout: float, on_death: OnDeath, progress: Progress
    ) -> list[NodeInfo]:
        deadline = time.monotonic() + timeout
        try:
            self._connect(progress)
            progress(f"starting {', '.join(config.name for config in configs)} (Ray actors)")
            here = ray.get_runtime_context().get_node_id()
            options = NodeActor.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
                runtime_env={"env_vars": {"GOMP_SPINCOUNT": SPIN_COUNT}},
            )
            for config in configs:
                actor = options.remote(msgspec.msgpack.encode(config))
                self._actors[config.name] = actor
                self._pids[config.name] = actor.pid.remote().future()
            infos = self._await_starts(deadline, timeout)
        except BaseException:
            self.stop()
            raise
        for name, actor in self._actors.items():
            run = actor.run.remote().future()
            run.add_done_callback(lambda run, name=name: self._on_end(name, run, on_death))
            self._runs.append(run)
        return infos

    def _connect(self, progress: Progress) -> None:
        if ray.is_initialized():
            return
        progress("starting an embedded Ray on this machine")
        # In /tmp whatever TMPDIR says: its sockets' paths may have 107 characters.
        self._ray_folder = tempfile.mkdtemp(prefix="cloverinfer-ray-", dir="/tmp")
        before = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            num_cpus=usable_cores(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=self._ray_folder,
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has taken it

    def _await_starts(self, deadline: float, timeout: float) -> list[NodeInfo]:
        """Infos in order; raises as soon as one node reports that it cannot start."""
        infos: dict[str, NodeInfo] = {}
        starts = {actor.start.remote().future(): name for name, actor in self._actors.items()}
        while starts:
            left = max(0.0, deadline - time.monotonic())
            ready, _ = wait(starts, left, return_when=FIRST_COMPLETED)
            if not ready:
                late = ", ".join(starts.values())
                raise NodeStartError(f"{late} did not start within {timeout:g} s")
            for future in ready:
                name = starts.pop(future)
                infos[name] = _info_of(name, future)
        return [infos[name] for name in self._actors]

    def _on_end(self, name: str, run: Future[None], on_death: OnDeath) -> None:
        """A run that ends, well or not, is a death unless we are stopping."""
        if self._stopping.is_set():
            return
        problem = run.exception()
        reason = str(problem).strip().splitlines()[0] if problem else "its loop ended"
        on_death(name, reason)
        remove_leftovers(self._pids[name].result())

    def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        try:
            self._stop_actors()
        finally:
            if self._ray_folder:
                self._end_ray()
            self._sweep()

    def _end_ray(self) -> None:
        """Ends the embedded Ray and removes its files; its last agents may write for a moment."""
        ray.shutdown()
        deadline = time.monotonic() + STOP_SECONDS
        while os.path.exists(self._ray_folder) and time.monotonic() < deadline:
            shutil.rmtree(self._ray_folder, ignore_errors=True)
            time.sleep(0.05)

    def _sweep(self) -> None:
        """Removes what nodes that were killed have left, once they are gone."""
        pids = [f.result() for f in self._pids.values() if f.done() and f.exception() is None]
        deadline = time.monotonic() + STOP_SECONDS
        while any(map(lives, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in pids:
            remove_leftovers(pid)

    def _stop_actors(self) -> None:
        stops = [actor.stop.remote().future() for actor in self._actors.values()]
        _, late = wait([*stops, *self._runs], STOP_SECONDS)
        if late:
            log.warning("some actors did not end within %g s: killed", STOP_SECONDS)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()


def _info_of(name: str, start: Future[tuple[bytes, str]]) -> NodeInfo:
    try:
        data, reason = start.result(timeout=0)
    except RayError as problem:
        raise NodeStartError(f"{name} could not start: {problem}") from problem
    if reason:
        raise NodeStartError(f"{name} could not start: {reason}")
    return msgspec.msgpack.decode(data, type=NodeInfo)
