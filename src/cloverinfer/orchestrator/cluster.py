"""The nodes of an engine and the wires to them: started, met, and stopped again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..config.cluster import ClusterConfig, ModelConfig
from ..core.errors import ModelError, NodeStartError, TransportError
from ..models import ResolvedModel, Tokenizer, load_tokenizer, resolve_model
from ..scheduler import SchedNode
from ..transport import Endpoint, Peer, create_endpoint
from ..transport.shm import remove_leftovers
from ..wire.messages import Meet, Met, NodeInfo, Shutdown, decode, encode
from .executors import Executor, OnDeath, create_executor
from .layout import node_configs, transport_of

log = logging.getLogger(__name__)


class Cluster:
    """Started nodes. Raises a ``CloverError`` from the constructor, with nothing left running."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: ClusterConfig,
        on_death: OnDeath,
        progress: Callable[[str], None],
    ) -> None:
        self.config = cluster
        self.model: ResolvedModel = resolve_model(model, progress)
        self.tokenizer: Tokenizer | None = self._load_tokenizer()
        self._executor: Executor = create_executor(cluster.executor)
        self._endpoint: Endpoint | None = None
        self._peers: dict[str, Peer] = {}
        self.infos: list[NodeInfo] = []
        self._deaths: dict[str, str] = {}
        self._on_death: OnDeath = lambda name, reason: self._deaths.update({name: reason})
        try:
            self._start(model, progress)
        except BaseException:
            self.close()
            raise
        self._on_death = on_death
        for name, reason in self._deaths.items():
            on_death(name, reason)

    def _load_tokenizer(self) -> Tokenizer | None:
        try:
            return load_tokenizer(self.model)
        except ModelError as problem:
            log.warning("%s; only prompts of token ids will do", problem)
            return None

    def _start(self, model: ModelConfig, progress: Callable[[str], None]) -> None:
        cluster = self.config
        deadline = time.monotonic() + cluster.start_timeout
        configs = node_configs(cluster, model)
        remove_leftovers()  # of engines that were killed
        self.infos = self._executor.start(
            configs,
            cluster.start_timeout,
            lambda name, reason: self._on_death(name, reason),
            progress,
        )
        self._endpoint = create_endpoint(transport_of(cluster), "scheduler")
        self._self = self._endpoint.connect(self._endpoint.address())
        for info in self.infos:
            self._peers[info.peer.name] = self._endpoint.connect(info.peer.address)
        meet = encode(Meet(self._endpoint.address(), [info.peer for info in self.infos]))
        for peer in self._peers.values():
            self._endpoint.send(peer, meet)
        self._await_met(deadline)

    def _await_met(self, deadline: float) -> None:
        missing = set(self._peers)
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NodeStartError(f"{', '.join(sorted(missing))} did not answer in time")
            for _, data in self.poll(min(left, 0.5)):
                met = decode(data) if data else None
                if isinstance(met, Met):
                    if met.error:
                        raise NodeStartError(f"the nodes do not fit together: {met.error}")
                    missing.discard(met.node)
            for name in missing & set(self._deaths):
                raise NodeStartError(f"{name} died while it started: {self._deaths[name]}")

    def sched_nodes(self) -> list[SchedNode]:
        return [SchedNode(i.peer.name, i.peer.role, i.kv_blocks) for i in self.infos]

    # -- the wires

    def send(self, name: str, data: bytes) -> None:
        assert self._endpoint is not None
        self._endpoint.send(self._peers[name], data)

    def poll(self, timeout: float) -> list[tuple[Peer, bytes]]:
        assert self._endpoint is not None
        return self._endpoint.poll(timeout).messages

    def wake(self) -> None:
        """From any thread: a poll under way returns."""
        if self._endpoint is not None:
            self._endpoint.send(self._self, b"")

    def close(self) -> None:
        """Asks nodes to end, ends them, and closes the wires."""
        self._on_death = lambda name, reason: None
        for name in self._peers:
            try:
                self.send(name, encode(Shutdown()))
            except TransportError as problem:
                log.debug("%s cannot be told to end: %s", name, problem)
        self._peers.clear()
        self._executor.stop()
        if self._endpoint is not None:
            self._endpoint.close()
