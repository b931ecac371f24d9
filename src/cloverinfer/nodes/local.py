"""Nodes that attend over a pool of their own: colocated, decode (topology pd), and what prefill
nodes are built on. On a GPU the first two launch steps without waiting for what they say."""

from __future__ import annotations

import logging
import time

from ..attention import AttentionBackend, auto_backend, create_backend
from ..kvcache.layout import PoolLayout, blocks_for
from ..models import ResolvedModel, load_half
from ..models.device_sampling import DeviceSampler
from ..models.grammar import grammars_of
from ..transport import Endpoint, Peer, RegionRef
from ..wire.messages import Message, StepPlan, StepStats
from ..wire.notices import KVNotice, unpack
from .base import Node
from .config import NodeConfig
from .device import CudaDevice
from .device_forward import DeviceForward
from .device_seats import DeviceShape
from .flights import Flights
from .forward import LocalForward, Sampled, step_done
from .gate import Gate, OpenGate
from .gpu_pool import largest_step_bytes
from .inlet import Inlet
from .pool import Pool
from .rows import Batch, RowTable

log = logging.getLogger(__name__)
PEEK_SECONDS = 50e-6
"""How long a node waits for messages at a time while steps are on their way through a GPU."""


def make_backend(
    config: NodeConfig, layout: PoolLayout, num_heads: int, pool: Pool | None
) -> AttentionBackend:
    """The backend over the node's pool, or over memory of its own."""
    name = config.attention_backend
    name = auto_backend("cpu") if name == "auto" else name
    for field, usual in (("batch_invariant", False), ("prompt_attention", "auto")):
        if name != "cuda" and getattr(config, field) != usual:
            log.warning("cluster.%s changes nothing for attention backend %s", field, name)
    backend = create_backend(name, config.threads, config.batch_invariant, config.prompt_attention)
    backend.allocate(layout, num_heads, None if pool is None else pool.buffer)
    return backend


class LocalNode(Node):
    """Runs step plans over a local pool, one forward per plan, in order of arrival."""

    launches_ahead = False
    """On a GPU a step is launched as its plan comes, though the one before it still runs."""

    def __init__(
        self, config: NodeConfig, model: ResolvedModel, endpoint: Endpoint, gate: Gate | OpenGate
    ) -> None:
        super().__init__(config, model, endpoint, gate)
        # Weights first: a pool on a GPU gets what they leave.
        before = self.device.allocated()
        with self.device.taking_memory("the weights"):
            self.half = load_half(
                model, config.model.seed, self.device.torch, config.batch_invariant
            )
        self._weights = self.device.allocated() - before
        self.layout = self.make_layout()
        with self.device.taking_memory(f"a KV pool of {self.layout.total_bytes / 2**30:.2f} GiB"):
            self.pool = self.make_pool(self.layout)
            self.backend = make_backend(config, self.layout, model.arch.num_heads, self.pool)
        flies = self.launches_ahead and self.backend.capabilities.device == "cuda"
        self.rows = RowTable(
            config.cache.block_size,
            local_attention=True,
            grammars=grammars_of(model),
            on_device=flies,
        )
        self.forward = LocalForward(self.half, self.backend, gate, config.layer_loop)
        self.flights = self._make_flights() if flies else None

    def _make_flights(self) -> Flights:
        """With all graphs captured."""
        device, longest = self.device.torch, self.model.max_model_len
        # A row may have a token more than it will ever say.
        blocks = blocks_for(longest + 1, self.config.cache.block_size)
        forward = DeviceForward(
            self.half,
            self.backend,
            CudaDevice(device, self.device.stream),
            DeviceShape(self.config.max_rows, blocks),
            DeviceSampler(device),
        )
        with self.device.taking_memory("captured graphs"):
            forward.capture()
        return Flights(forward, self.rows, self._report_done, self.report_failure)

    def memory_taken(self) -> tuple[int, int]:
        device, config = self.device, self.config
        step = largest_step_bytes(device, config, self.model, self.half, self.specs)
        return self._weights, step

    def regions(self) -> dict[str, RegionRef]:
        return self.pool.regions()

    def pool_layout(self) -> PoolLayout:
        return self.layout

    def layout_name(self) -> str:
        return self.pool.layout_name(self.backend.capabilities)

    def weight_bytes(self) -> int:
        return self.half.weight_bytes

    def on_meet(self) -> None:
        """Others come to this node; it has nobody to go to."""

    def close(self) -> None:
        try:
            self.backend.close()
        finally:
            super().close()

    def on_notice(self, peer: Peer, notice: int) -> None:
        log.warning("%s: dropped a notice from %s", self.config.name, peer.address)

    def step(self, timeout: float) -> None:
        if self.flights is None:
            super().step(timeout)
            return
        super().step(PEEK_SECONDS if self.flights else timeout)
        self.flights.report()

    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, StepPlan):
            (self.run_plan if self.flights is None else self.flights.launch)(message)
        else:
            log.warning("%s: dropped a %s", self.config.name, type(message).__name__)

    def run_plan(self, plan: StepPlan) -> None:
        """One step, whose result or failure is reported: the boundary where errors stop."""
        started = time.perf_counter()
        stats = StepStats()
        try:
            self.rows.apply(plan)
            sampled = self.run_batch(self.rows.batch(plan), stats)
        except Exception as problem:
            self.report_failure(plan, problem)
            return
        stats.seconds = time.perf_counter() - started
        self._report_done(plan, sampled, stats)

    def _report_done(self, plan: StepPlan, sampled: Sampled, stats: StepStats) -> None:
        self.report(step_done(self.config.name, plan, sampled, stats))

    def run_batch(self, batch: Batch, stats: StepStats) -> Sampled:
        return self.forward.run(batch, stats)


class ColocatedNode(LocalNode):
    """All three leaves in one node: prefill chunks and decode rows in one forward."""

    launches_ahead = True


class DecodeNode(LocalNode):
    """Dense and attention in one node; its pool is filled by prefill nodes (topology pd)."""

    launches_ahead = True

    def __init__(
        self, config: NodeConfig, model: ResolvedModel, endpoint: Endpoint, gate: Gate | OpenGate
    ) -> None:
        super().__init__(config, model, endpoint, gate)
        self.inlet = Inlet(self, self.backend, self.pool)
        self.transfers = self.inlet.receiver

    def on_meet(self) -> None:
        self.inlet.meet()

    def on_notice(self, peer: Peer, notice: int) -> None:
        event = unpack(notice)
        if isinstance(event, KVNotice):
            self.transfers.notice(self.name_of(peer), event)
        else:
            super().on_notice(peer, notice)

    def on_message(self, peer: Peer, message: Message) -> None:
        if not self.inlet.handle(self.name_of(peer), message):
            super().on_message(peer, message)
