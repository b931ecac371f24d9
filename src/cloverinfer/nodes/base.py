"""What every node is: an endpoint, a loop over what arrives, and a way to meet the others."""

from __future__ import annotations

import logging
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec
import torch

from ..core.errors import (
    CloverError,
    ConfigError,
    DeadlineError,
    PeerGoneError,
    TransportError,
    describe,
)
from ..kvcache.layout import CANONICAL_LAYOUT, PoolLayout, blocks_for, blocks_in_budget
from ..models import ResolvedModel, estimated_weights, kv_specs
from ..transport import Endpoint, Events, Peer, RegionRef, Ticket
from ..wire.messages import (
    Alive,
    CompileGrammar,
    Meet,
    Message,
    Met,
    NodeInfo,
    PeerInfo,
    Probe,
    Shutdown,
    StepFailed,
    StepPlan,
    decode,
    encode,
)
from ..wire.notices import MAX_LAYERS
from .config import PREFILL, NodeConfig
from .copies import copies_of
from .gate import Gate, OpenGate
from .gpu import NodeDevice
from .gpu_pool import CALL_BYTES, gpu_pool_budget
from .grammars import GrammarWorker
from .later import Later
from .pool import Pool
from .stored import stored_dtype

log = logging.getLogger(__name__)
WIRE_VERSION = "2"
POLL_SECONDS = 0.5
"""How long a poll may wait; only bounds how soon ``stop`` from another thread is seen."""
HOST_POOL_GIB = 1.0
"""Budget of a pool on a CPU where none is configured."""
MEND_SECONDS = 2.0
"""How long connecting anew may keep a node from its work."""


class Node(ABC):
    """Lifetime: construct, ``run`` in one thread until ``Shutdown`` or ``stop``, which closes it.

    Subclasses answer ``on_message`` and ``on_notice``; both run in the thread of ``run``.
    """

    def __init__(
        self, config: NodeConfig, model: ResolvedModel, endpoint: Endpoint, gate: Gate | OpenGate
    ) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        self.device = NodeDevice(config.device)
        self.model = model
        self.gate = gate
        self.specs = kv_specs(model.arch, stored_dtype(config, model.dtype))
        if len(self.specs) >= MAX_LAYERS:
            raise ConfigError(
                f"{model.name} has {len(self.specs)} layers; at most {MAX_LAYERS - 1}"
            )
        self.endpoint = endpoint
        self.copies = copies_of(config.device)
        self.later = Later()
        self.peers: dict[str, PeerInfo] = {}
        self._links: dict[str, Peer] = {}
        self._names: dict[str, str] = {}
        self._scheduler: Peer | None = None
        self._watched: dict[Ticket, Callable[[Exception], None]] = {}
        self._stopped = threading.Event()
        self.grammars = GrammarWorker(config.name, model, self.report)

    # -- what others must know of this node

    @abstractmethod
    def regions(self) -> dict[str, RegionRef]:
        """Regions that peers write to, by purpose."""

    def pool_layout(self) -> PoolLayout | None:
        return None

    def weight_bytes(self) -> int:
        return 0

    def layout_name(self) -> str:
        """Of the pool's blocks, where it has any."""
        return CANONICAL_LAYOUT

    def peer_info(self) -> PeerInfo:
        return PeerInfo(
            name=self.config.name,
            role=self.config.role,
            address=self.endpoint.address(),
            regions=self.regions(),
            layout=self.pool_layout(),
            layout_name=self.layout_name(),
            model=self.model.fingerprint,
            version=WIRE_VERSION,
            dtype=self.model.dtype,
        )

    def info(self) -> NodeInfo:
        layout = self.pool_layout()
        config, arch = self.config, self.model.arch
        return NodeInfo(
            peer=self.peer_info(),
            pid=os.getpid(),
            host=socket.gethostname(),
            device=config.device,
            transport=self.endpoint.capabilities.name,
            threads=config.threads,
            kv_blocks=layout.num_blocks if layout else 0,
            eos_token_ids=list(self.model.eos_token_ids),
            max_position=self.model.max_model_len,
            vocab_size=arch.vocab_size,
            weight_bytes=self.weight_bytes(),
        )

    # -- meeting

    def meet(self, meet: Meet) -> None:
        """Connects to the scheduler and to the nodes this one exchanges data with."""
        self._scheduler = self.endpoint.connect(meet.scheduler)
        self.peers = {peer.name: peer for peer in meet.peers if peer.name != self.config.name}
        error = ""
        try:
            for peer in self.peers.values():
                self._check_peer(peer)
            self.on_meet()
        except (CloverError, ValueError) as problem:
            error = f"{self.config.name}: {problem}"
        self.report(Met(self.config.name, error))

    @abstractmethod
    def on_meet(self) -> None:
        """Prepares what the step path needs of the peers."""

    def link(self, name: str) -> Peer:
        """The connection to the node called ``name``."""
        if name not in self._links:
            address = self.peers[name].address
            self._links[name] = self.endpoint.connect(address)
            self._names[address] = name
        return self._links[name]

    def reconnect(self, name: str) -> bool:
        """After something to the node called ``name`` was lost: a wire that lost a put ends its
        connection until it is made anew, and where the node lives, what follows shall reach it.
        False where it does not.
        """
        try:
            self.endpoint.connect(self.peers[name].address, MEND_SECONDS)
        except TransportError as problem:
            log.warning("%s: %s cannot be reached: %s", self.config.name, name, problem)
            return False
        return True

    def tell(self, name: str, message: Message) -> None:
        """To another node, over a new connection where the last one is broken. That it cannot be
        reached is logged."""
        data = encode(message)
        try:
            try:
                self.endpoint.send(self.link(name), data)
            except DeadlineError:
                raise  # the connection is there, and the node does not read
            except TransportError:
                self.endpoint.connect(self.peers[name].address, MEND_SECONDS)
                self.endpoint.send(self.link(name), data)
        except TransportError as problem:
            log.warning("%s: %s cannot be told: %s", self.config.name, name, problem)

    def name_of(self, peer: Peer) -> str:
        """Name of the node at the other end; empty for a stranger."""
        name = self._names.get(peer.address)
        if name is None:
            known = (info.name for info in self.peers.values() if info.address == peer.address)
            name = next(known, "")
            if name:
                self._names[peer.address] = name
        return name

    def _check_peer(self, peer: PeerInfo) -> None:
        """What a prefill node and a receiver differ in is for their meeting to judge: it may
        convert."""
        mine = {"wire version": WIRE_VERSION, "model": self.model.fingerprint}
        theirs = {"wire version": peer.version, "model": peer.model}
        if PREFILL not in (self.config.role, peer.role):
            mine["dtype"], theirs["dtype"] = self.model.dtype, peer.dtype
        for field, value in mine.items():
            if theirs[field] != value:
                raise ConfigError(f"{field} is {value} here and {theirs[field]} on {peer.name}")

    # -- the loop

    def run(self) -> None:
        torch.set_num_threads(self.config.threads)
        try:
            with torch.inference_mode(), self.device.computing():
                while not self._stopped.is_set():
                    self.step(POLL_SECONDS)
        finally:
            self.close()

    def step(self, timeout: float) -> None:
        """Handles what arrives within ``timeout`` seconds."""
        self._dispatch(self.endpoint.poll(self.later.patience(timeout)))
        self.later.run()

    def _dispatch(self, events: Events) -> None:
        for peer, data in events.messages:
            self._handle(peer, data)
        for peer, notice in events.notices:
            self.on_notice(peer, notice)
        for ticket in events.tickets:
            on_error = self._watched.pop(ticket, None)
            if on_error is not None and ticket.error is not None:
                on_error(ticket.error)

    def watch(self, ticket: Ticket, on_error: Callable[[Exception], None]) -> None:
        """Calls ``on_error``, now or from the loop, where the put fails."""
        if not ticket.done:
            self._watched[ticket] = on_error
        elif ticket.error is not None:
            on_error(ticket.error)

    def stop(self) -> None:
        """From any thread: the loop ends at its next turn."""
        self._stopped.set()

    def close(self) -> None:
        """Gives everything back; regions go with their endpoint."""
        self.grammars.close()
        self.copies.close()
        self.endpoint.close()

    def _handle(self, peer: Peer, data: bytes) -> None:
        if not data:
            return  # a wake-up
        try:
            message = decode(data)
        except (msgspec.ValidationError, msgspec.DecodeError) as problem:
            log.warning(
                "%s: dropped a malformed message from %s: %s",
                self.config.name,
                peer.address,
                problem,
            )
            return
        if isinstance(message, Meet):
            self.meet(message)
        elif isinstance(message, Shutdown):
            self.stop()
        elif isinstance(message, CompileGrammar):
            self.grammars.compile(message)
        elif isinstance(message, Probe):
            self.report(Alive(self.config.name, message.number))
        else:
            self.on_message(peer, message)

    @abstractmethod
    def on_message(self, peer: Peer, message: Message) -> None: ...

    @abstractmethod
    def on_notice(self, peer: Peer, notice: int) -> None: ...

    def report(self, message: Message) -> None:
        """To the scheduler. If that is gone, so is the reason to serve."""
        assert self._scheduler is not None
        try:
            self.endpoint.send(self._scheduler, encode(message))
        except TransportError as problem:
            log.warning("%s: the scheduler cannot be reached: %s", self.config.name, problem)
            self.stop()

    def report_failure(self, plan: StepPlan, problem: Exception, cut: Sequence[str] = ()) -> None:
        """A step of this node ends here with its error. ``cut``: see ``StepFailed``."""
        if isinstance(problem, PeerGoneError):
            self.report_lost(plan, [problem], cut)
            return
        name = self.config.name
        problem = self.device.explained(problem)
        log.error("%s: step %d failed: %s", name, plan.step, problem, exc_info=problem)
        self.report(StepFailed(name, plan.lane, plan.step, describe(problem), [], list(cut)))

    def report_lost(
        self, plan: StepPlan, lost: Sequence[PeerGoneError], cut: Sequence[str] = ()
    ) -> None:
        """A step ends here since peers are gone, which is no fault of this node."""
        name, error = self.config.name, "; ".join(describe(problem) for problem in lost)
        log.error("%s: step %d failed: %s", name, plan.step, error)
        gone = [problem.peer for problem in lost]
        self.report(StepFailed(name, plan.lane, plan.step, error, gone, list(cut)))

    # -- shared by nodes with a pool

    def pool_budget(self) -> float:
        """Bytes that the pool may take."""
        given = self.config.cache.memory_gib
        if self.device.on_gpu and given is None:
            return gpu_pool_budget(self.device, self.config, self.specs, *self.memory_taken())
        return (given or HOST_POOL_GIB) * 2**30

    def memory_taken(self) -> tuple[int, int]:
        """Bytes of a GPU's memory that the model's weights hold wherever they are, and that the
        node's largest step takes."""
        return estimated_weights(self.model), CALL_BYTES

    def make_layout(self) -> PoolLayout:
        """The pool that the cache's configuration asks for: never larger than can be used."""
        cache = self.config.cache
        count = cache.num_blocks
        if count is None:
            budget = self.pool_budget()
            count = blocks_in_budget(self.specs, cache.block_size, budget)
            longest = blocks_for(self.model.max_model_len, cache.block_size)
            count = min(count, 2 * self.config.max_rows * longest)
        return PoolLayout(self.specs, cache.block_size, count)

    def make_pool(self, layout: PoolLayout) -> Pool:
        """Memory for it, where the node computes."""
        checksums = self.config.network.checksum != "none"
        return Pool(self.endpoint, layout, self.copies, checksums)
