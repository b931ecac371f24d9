"""The nodes of an engine and the wires to them: started, met, and stopped again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ..attention import gpus
from ..config.cluster import CacheConfig, ClusterConfig, ModelConfig
from ..core.errors import ModelError, NodeStartError, TransportError
from ..kvcache.layout import PoolLayout
from ..models import ResolvedModel, Tokenizer, load_tokenizer, resolve_model
from ..nodes.config import PREFILL
from ..scheduler import SchedNode
from ..transport import Endpoint, Peer, create_endpoint
from ..transport.choice import Choice
from ..transport.shm import remove_leftovers
from ..wire.messages import Meet, Message, Met, NodeInfo, Shutdown, decode, encode
from .devices import device_hint, is_gpu, node_devices, with_dtype, with_rows
from .executors import Executor, OnDeath, create_executor
from .layout import choose_transport, ignored_settings, node_configs, node_names, with_secret
from .placement import Placement, network_at

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5


class Cluster:
    """Started nodes. Raises a ``CloverError`` from the constructor, with nothing left running."""

    def __init__(
        self, model: ModelConfig, cluster: ClusterConfig, progress: Callable[[str], None]
    ) -> None:
        self.config = with_secret(cluster)
        self.choice = Choice("")
        """Which transport connects the nodes, and why not those before it."""
        self._device = device_hint(cluster, model, gpus()[0])
        self.model: ResolvedModel = resolve_model(model, progress, self._device)
        self.tokenizer: Tokenizer | None = self._load_tokenizer()
        self.infos: list[NodeInfo] = []
        self._executor: Executor = create_executor(cluster.executor)
        self._endpoint: Endpoint | None = None
        self._own: Peer | None = None
        self._peers: dict[str, Peer] = {}
        self._deaths: dict[str, str] = {}
        self._on_death: OnDeath | None = None
        self._deaths_lock = threading.Lock()
        try:
            self._start(model, progress)
        except BaseException:
            self.close()
            raise

    def tell_deaths(self, on_death: OnDeath) -> None:
        """From now on; those that have died since they met are told at once."""
        with self._deaths_lock:
            self._on_death, early = on_death, dict(self._deaths)
        for name, reason in early.items():
            on_death(name, reason)

    def _note_death(self, name: str, reason: str) -> None:
        with self._deaths_lock:
            self._deaths[name] = reason
            on_death = self._on_death
        if on_death is not None:
            on_death(name, reason)

    def _load_tokenizer(self) -> Tokenizer | None:
        try:
            return load_tokenizer(self.model)
        except ModelError as problem:
            log.warning("%s; only prompts of token ids will do", problem)
            return None

    def _start(self, model: ModelConfig, progress: Callable[[str], None]) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        remove_leftovers()  # of engines that were killed
        for line in ignored_settings(self.config):
            progress(line)
        placement = self._place(model, progress)
        model = self._settled(model, placement, progress)
        configs = node_configs(self.config, model, placement)
        network = network_at(self.config.network, placement.scheduler)
        timeout = max(0.0, round(deadline - time.monotonic(), 1))
        self.infos = self._executor.start(configs, timeout, self._note_death, progress)
        self._endpoint = create_endpoint(self.config.transport, "scheduler", network)
        self._own = self._endpoint.connect(self._endpoint.address())
        for info in self.infos:
            self._peers[info.peer.name] = self._endpoint.connect(info.peer.address)
        meet = encode(Meet(self._endpoint.address(), [info.peer for info in self.infos]))
        for peer in self._peers.values():
            self._endpoint.send(peer, meet)
        self._await_met(deadline)
        for info in self.infos:
            if is_gpu(info.device) and info.peer.layout is not None:
                progress(_pool_line(info, info.peer.layout))
        if self.max_model_len < self.model.max_model_len:
            progress(
                f"the context is limited to {self.max_model_len} of {self.model.max_model_len} "
                "tokens by the KV pools (cache.memory_gib, cache.gpu_memory_utilization, "
                "cache.num_blocks)"
            )

    def _place(self, model: ModelConfig, progress: Callable[[str], None]) -> Placement:
        """Where the nodes will run; the transport is chosen by it."""
        names = node_names(self.config)
        placement = self._executor.place(names, self.config.room_timeout, progress)
        devices = node_devices(self.config, model, names, placement)
        self.choice = choose_transport(self.config, placement, devices)
        self.config = msgspec.structs.replace(
            self.config,
            transport=self.choice.transport,
            scheduler=with_rows(self.config.scheduler, names, devices),
        )
        return placement

    def _settled(
        self, model: ModelConfig, placement: Placement, progress: Callable[[str], None]
    ) -> ModelConfig:
        """``model`` as the nodes are told it: of one type on whatever devices they are."""
        devices = node_devices(self.config, model, node_names(self.config), placement)
        device = "cuda" if any(map(is_gpu, devices.values())) else "cpu"
        share = self.config.cache.gpu_memory_utilization
        if device == "cpu" and share != CacheConfig().gpu_memory_utilization:
            progress("note: cache.gpu_memory_utilization changes nothing: no node is on a GPU")
        if device != self._device:  # other hosts have other devices than this one
            self.model = resolve_model(model, progress, device)
        return with_dtype(model, self.model.dtype, devices)

    def _await_met(self, deadline: float) -> None:
        missing = set(self._peers)
        while missing:
            for name, reason in self._deaths.items():
                raise NodeStartError(f"{name} died while it started: {reason}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise NodeStartError(f"{', '.join(sorted(missing))} did not answer in time")
            for met in self.poll(min(left, POLL_SECONDS)):
                if isinstance(met, Met):
                    if met.error:
                        raise NodeStartError(f"the nodes do not fit together: {met.error}")
                    missing.discard(met.node)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens that the model and some pool of each role hold."""
        pools: dict[bool, int] = {}
        for info in self.infos:
            if info.peer.layout is not None:
                prefills = info.peer.role == PREFILL
                tokens = info.kv_blocks * info.peer.layout.block_size
                pools[prefills] = max(pools.get(prefills, 0), tokens)
        return min(self.model.max_model_len, *pools.values())

    def sched_nodes(self) -> list[SchedNode]:
        return [
            SchedNode(
                info.peer.name,
                info.peer.role,
                info.kv_blocks,
                info.peer.layout.block_size if info.peer.layout is not None else None,
                info.device,
            )
            for info in self.infos
        ]

    # -- the wires

    def send(self, name: str, data: bytes) -> None:
        assert self._endpoint is not None
        self._endpoint.send(self._peers[name], data)

    def poll(self, timeout: float) -> list[Message]:
        """What nodes have sent; a wake-up is nothing, and what makes no sense is dropped."""
        assert self._endpoint is not None
        messages = []
        for peer, data in self._endpoint.poll(timeout).messages:
            try:
                messages += [decode(data)] if data else []
            except (msgspec.ValidationError, msgspec.DecodeError) as problem:
                log.warning("dropped a malformed message from %s: %s", peer.address, problem)
        return messages

    def wake(self) -> None:
        """From any thread: a poll under way returns."""
        if self._endpoint is not None and self._own is not None:
            self._endpoint.send(self._own, b"")

    def end(self, name: str, reason: str) -> None:
        """Ends a node that does not answer; see ``Executor.end``."""
        self._executor.end(name, reason)

    def close(self) -> None:
        """Asks nodes to end, ends them, and closes the wires."""
        with self._deaths_lock:
            self._on_death = None
        for name in self._peers:
            try:
                self.send(name, encode(Shutdown()))
            except TransportError as problem:
                log.debug("%s cannot be told to end: %s", name, problem)
        self._peers.clear()
        try:
            self._executor.stop()
        finally:
            if self._endpoint is not None:
                self._endpoint.close()


def _pool_line(info: NodeInfo, layout: PoolLayout) -> str:
    size, tokens = layout.total_bytes / 2**30, info.kv_blocks * layout.block_size
    return (
        f"{info.peer.name} is on {info.device}, with a KV pool of {size:.1f} GiB: {tokens} tokens"
    )
