"""Nodes as Ray actors, on the hosts of a Ray cluster or on this one alone. ``max_restarts=0``: the
orchestrator alone restarts.

Results are awaited as futures and never by ``ray.get``, which an async actor (``GlobalScheduler``)
must not call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...core.errors import NodeStartError
from ...nodes.config import NodeConfig
from ...transport.choice import offer
from ...transport.shm import lives, remove_leftovers
from ...wire.messages import NodeInfo
from ..placement import Place, Placement, here, rdma_devices, usable_cores
from ._ray_hosts import RayHosts, own_address
from .base import STOP_SECONDS, Executor, OnDeath, Progress
from .process import SPIN_COUNT

log = logging.getLogger(__name__)
ALL_GPUS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
"""Actors that ask Ray for no GPU see those of their host all the same: the layout shares them out.
Versions of Ray differ in which one they read."""
_PLACE_SECONDS = 120.0
"""How long Ray may take to start a process on every host."""


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=3)
class NodeActor:
    """The shell of a few lines around a node."""

    def __init__(self) -> None:
        self._node: Any = None

    def place(self, name: str) -> tuple[bytes, str, int]:
        """Where this actor is: for the transports, and as Ray's node and process there."""
        place = here(name, name, own_address())
        host = ray.get_runtime_context().get_node_id()
        return msgspec.msgpack.encode(place), host, os.getpid()

    def start(self, config: bytes) -> tuple[bytes, str]:
        """The node's info; or nothing, and why it could not start."""
        from ...core.errors import describe
        from ...nodes.build import build_node

        try:
            self._node = build_node(msgspec.msgpack.decode(config, type=NodeConfig))
        except Exception as problem:
            return b"", describe(problem)
        return msgspec.msgpack.encode(self._node.info()), ""

    def run(self) -> None:
        from ...core.collector import set_aside

        set_aside()
        self._node.run()

    def stop(self) -> None:
        if self._node is not None:
            self._node.stop()


class RayExecutor(Executor):
    def __init__(self) -> None:
        self._hosts = RayHosts()
        self._actors: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        """Of the nodes whose processes this one sees."""
        self._processes: dict[str, tuple[str, int]] = {}
        """Every node's process: Ray's name for its host, and its number there."""
        self._runs: list[Future[None]] = []
        self._given_up: dict[str, str] = {}
        """Why actors were ended by ``end``, by name."""
        self._stopping = threading.Event()

    def place(
        self, names: Mapping[str, Sequence[str]], room_timeout: float, progress: Progress
    ) -> Placement:
        self._hosts.connect(progress)
        for name, options in self._hosts.reserve(names, room_timeout, progress).items():
            env = {"env_vars": {"GOMP_SPINCOUNT": SPIN_COUNT, **ALL_GPUS}}
            self._actors[name] = NodeActor.options(**options, runtime_env=env).remote()
        asked = {actor.place.remote(name).future(): name for name, actor in self._actors.items()}
        deadline = time.monotonic() + _PLACE_SECONDS
        told = _gather(asked, deadline, f"answer from its host within {_PLACE_SECONDS:g} s")
        address = own_address() if self._hosts.several else ""
        own = Place(offer("scheduler"), usable_cores(), address, rdma_devices=rdma_devices())
        places = {}
        for name in self._actors:
            data, host, pid = told[name]
            self._processes[name] = host, pid
            place = msgspec.msgpack.decode(data, type=Place)
            if own.sees(place):
                self._pids[name] = pid
            if not self._hosts.several:
                place = msgspec.structs.replace(place, address="")
            places[name] = place
        return Placement(own, places)

    def start(
        self, configs: Sequence[NodeConfig], timeout: float, on_death: OnDeath, progress: Progress
    ) -> list[NodeInfo]:
        progress(f"starting {', '.join(config.name for config in configs)} (Ray actors)")
        deadline = time.monotonic() + timeout
        starts = {}
        for config in configs:
            start = self._actors[config.name].start.remote(msgspec.msgpack.encode(config))
            starts[start.future()] = config.name
        try:
            infos = _gather(starts, deadline, f"start within {timeout:g} s", _read_info)
        except BaseException:
            self.stop()
            raise
        for name, actor in self._actors.items():
            run = actor.run.remote().future()
            run.add_done_callback(lambda run, name=name: self._on_end(name, run, on_death))
            self._runs.append(run)
        return [infos[config.name] for config in configs]

    def _on_end(self, name: str, run: Future[None], on_death: OnDeath) -> None:
        """A run that ends, well or not, is a death unless we are stopping."""
        if self._stopping.is_set():
            return
        problem = run.exception()
        reason = str(problem).strip().splitlines()[0] if problem else "its loop ended"
        # An actor outlives its run, and Ray may take one for dead before its process has ended.
        if name in self._pids:
            self._tell(name, reason, _end_process(self._pids[name]), on_death)
            return
        ended = self._end_there(name)
        ended.add_done_callback(
            lambda ended: self._tell(name, reason, ended.exception() or ended.result(), on_death)
        )

    def _tell(self, name: str, reason: str, gone: object, on_death: OnDeath) -> None:
        """``gone``: what ``_end_process`` said, or why nobody could ask: the host is lost too."""
        if self._stopping.is_set():
            return
        if gone:
            on_death(name, self._given_up.get(name, reason))
        else:
            log.error("the process of %s does not end: what it may write to stays taken", name)
        if name in self._pids:
            remove_leftovers(self._pids[name])

    def end(self, name: str, reason: str) -> None:
        """By a signal: Ray asks the process to end itself, which one that is stopped does not."""
        if name not in self._actors or self._stopping.is_set():
            return
        self._given_up[name] = reason
        if name in self._pids:
            _kill(self._pids[name])
        else:
            self._end_there(name)

    def _end_there(self, name: str) -> Future[bool]:
        """Ends the process of a node on another host, by a task of Ray's there."""
        host, pid = self._processes[name]
        there = NodeAffinitySchedulingStrategy(host, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(_end_process)
        ended: Future[bool] = task.options(scheduling_strategy=there).remote(pid).future()
        return ended

    def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        try:
            self._stop_actors()
        finally:
            self._hosts.close()
            self._sweep()

    def _sweep(self) -> None:
        """Removes what nodes that were killed have left, once they are gone."""
        pids = list(self._pids.values())
        _gone(pids)
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


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _gone(pids: Sequence[int]) -> bool:
    """Waits for the end of processes of this host; False where it does not come."""
    deadline = time.monotonic() + STOP_SECONDS
    while any(map(lives, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _end_process(pid: int) -> bool:
    """Ends a process of this host; False where it does not end."""
    _kill(pid)
    return _gone([pid])


def _gather(
    calls: dict[Future[Any], str],
    deadline: float,
    what: str,
    read: Callable[[str, Any], Any] = lambda name, answer: answer,
) -> dict[str, Any]:
    """What ``read`` makes of every node's answer, by its name; raises at the first that fails."""
    waiting, answers = dict(calls), {}
    while waiting:
        ready, _ = wait(waiting, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if not ready:
            raise NodeStartError(f"{', '.join(waiting.values())} did not {what}")
        for future in ready:
            name = waiting.pop(future)
            try:
                answer = future.result(timeout=0)
            except RayError as problem:
                raise NodeStartError(f"{name} could not start: {problem}") from problem
            answers[name] = read(name, answer)
    return answers


def _read_info(name: str, answer: tuple[bytes, str]) -> NodeInfo:
    data, reason = answer
    if reason:
        raise NodeStartError(f"{name} could not start: {reason}")
    return msgspec.msgpack.decode(data, type=NodeInfo)
