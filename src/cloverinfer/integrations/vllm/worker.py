"""The worker half: this worker's memory, its courier, and the two ends of transfers.

Called by the engine around each step; everything that waits happens in other threads. It does not
know vLLM: ``connector`` brings tensors and names of layers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...kvcache.layout import DTYPE_BYTES, KVSpec, PoolLayout
from ...nodes.copies import Copies, copies_of
from ...transport import Peer
from ...transport.choice import Offer, offer
from ...transport.shm import remove_leftovers
from .carriers import CUDA, HOST
from .courier import Courier, Wire
from .gate import Gate
from .grid import Grid, Heads
from .inbox import Inbox
from .memory import Pool, Shape, pool_of
from .outbox import Outbox
from .plan import Loaded, StepPlan
from .settings import Settings
from .staged import Device
from .wire import VERSION, Message, Worker

log = logging.getLogger(__name__)
SWEEP_SECONDS = 10.0
"""Between two looks for what engines that were killed left under /dev/shm: one that was has no
other to do it, and its own next start may come before it is quite gone."""


@dataclass(frozen=True)
class Engine:
    """What the engine's configuration says of this worker."""

    name: str
    """The same for all its workers, new at each start."""
    rank: int
    """In tensor parallelism."""
    ranks: int
    model: str
    """The same for engines of one model."""
    dtype: str
    """Of the KV cache."""
    interior: str
    """See ``wire.Worker``; not empty: only the engine's kernels know."""
    all_heads: int
    shape: Shape

    @property
    def heads(self) -> Heads:
        """This worker's KV heads among the model's."""
        first = self.rank * self.shape.heads
        if self.ranks * self.shape.heads > self.all_heads:  # several workers keep the same
            first = self.rank * self.all_heads // self.ranks
        return Heads(first, self.shape.heads)


class WorkerHalf:
    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        copies: Callable[[str], Copies] = copies_of,
    ) -> None:
        """``copies``: what marks moments on a device, by its name."""
        self._settings = settings
        self._engine = engine
        self._copies = copies
        self._lock = threading.RLock()
        self._courier: Courier | None = None
        self._layers: dict[str, int] = {}
        self._sweep_at = 0.0
        self._bad_blocks: set[int] = set()
        self._results: dict[str, Loaded] = {}

    def register(self, caches: Mapping[str, Any]) -> None:
        """Takes the engine's tensors, by layer, as the memory of transfers. ``ConfigError`` for
        layouts and ports that cannot serve."""
        pool = pool_of(caches, self._engine.shape)
        self._layers = {name: i for i, name in enumerate(pool.layers)}
        settings, engine = self._settings, self._engine
        copies = self._own_copies = self._copies(_device_name(pool))
        device = Device(pool.grids, pool.storages, copies) if pool.device is not None else None
        courier = self._courier = Courier(engine.rank, settings, pool.buffers, self, device)
        mark = copies.mark
        self._gate = Gate(mark, waits=pool.device is not None)
        me = _describe(settings, engine, pool, courier)
        self._outbox = Outbox(settings, me, courier, (pool.split, mark), self._lock)
        layout = PoolLayout(tuple(_spec(engine, grid) for grid in pool.grids), *_blocks(pool))
        self._inbox = Inbox(settings, me, courier, (layout, pool.split), self._lock)
        courier.start()
        log.info(
            "KV connector of rank %d: %d layers of %d blocks of %d tokens, at %s, over %s",
            engine.rank,
            len(pool.layers),
            *reversed(_blocks(pool)),
            courier.door.endpoint.address(),
            " or ".join(courier.data),
        )

    # -- by the engine, around a step

    def begin_step(self, plan: StepPlan) -> None:
        """Before anything of the step is computed."""
        if plan.loads or plan.ended:
            self._gate.pass_on(lambda: self._load(plan))
        self._outbox.finish(plan.ended)
        self._outbox.begin(plan.sends, plan.progress)

    def _load(self, plan: StepPlan) -> None:
        self._inbox.expect(plan.loads)
        self._inbox.abort(plan.ended)

    def save_layer(self, name: str) -> None:
        """The step's keys and values of a layer are in its cache."""
        layer = self._layers.get(name)
        if layer is not None:
            self._outbox.layer(layer)

    def end_step(self) -> None:
        self._outbox.end()

    def preempt(self, requests: list[str]) -> None:
        """Returns once nothing reads these requests' blocks, which are about to be overwritten."""
        if requests:
            self._outbox.preempt(requests)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks nothing reads any more, and requests whose load is over."""
        loaded, bad = self._inbox.take_loaded()
        self._bad_blocks |= bad
        self._results |= loaded
        return self._outbox.take_sent(), set(loaded)

    def take_bad_blocks(self) -> set[int]:
        """The scheduler's blocks whose load failed, of those that ``take_finished`` told of."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_results(self) -> dict[str, Loaded]:
        """How loads went, of those that ``take_finished`` told of."""
        results, self._results = self._results, {}
        return results

    def close(self) -> None:
        if self._courier is not None:
            self._gate.close()
            for stage in self._courier.stages:
                stage.close()
            self._inbox.close()
            self._outbox.close()
            self._own_copies.close()
            self._courier.close()
            self._courier = None

    # -- by the courier, from its threads

    def arrived(self, wire: Wire, peer: Peer, message: Message) -> None:
        if not (
            self._inbox.arrived(wire, peer, message) or self._outbox.arrived(wire, peer, message)
        ):
            log.debug("dropped %s from %s", type(message).__name__, peer.address)

    def noticed(self, wire: Wire, peer: Peer, notice: int) -> None:
        self._inbox.noticed(wire, peer, notice)

    def settled(self) -> None:
        if self._courier is not None:
            for stage in self._courier.stages:
                stage.circle.look()
        self._outbox.settle()

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS
            remove_leftovers()
        self._inbox.tick(now)
        self._outbox.tick(now)


def _describe(settings: Settings, engine: Engine, pool: Pool, courier: Courier) -> Worker:
    return Worker(
        version=VERSION,
        engine=engine.name,
        rank=engine.rank,
        ranks=engine.ranks,
        model=settings.model_id or engine.model,
        dtype=engine.dtype,
        interior=engine.interior,
        all_heads=engine.all_heads,
        heads=engine.heads,
        grids=pool.grids,
        offer=_offer(f"{engine.name}/{engine.rank}", pool.device),
        wires={each: courier.wires[each].info for each in courier.data},
    )


def _device_name(pool: Pool) -> str:
    return "cpu" if pool.device is None else f"cuda:{pool.device}"


def _offer(name: str, device: int | None) -> Offer:
    if device is None:
        return offer(name, memory=(HOST,))
    return msgspec.structs.replace(offer(name, memory=(CUDA,)), device=device)


def _blocks(pool: Pool) -> tuple[int, int]:
    """Tokens of a block of the grids, and how many blocks there are."""
    return pool.grids[0].block_size, pool.grids[0].blocks


def _spec(engine: Engine, grid: Grid) -> KVSpec:
    """For counting bytes only: keys and values together."""
    dtype = engine.dtype if engine.dtype in DTYPE_BYTES else "float8_e4m3"
    width = grid.token_bytes // DTYPE_BYTES[dtype]
    return KVSpec(kv_heads=grid.heads, k_dim=width, v_dim=0, dtype=dtype, scale=1.0)
