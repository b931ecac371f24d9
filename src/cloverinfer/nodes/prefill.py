"""The prefill node: runs prompts and has each layer's blocks put as the layer ends.

It computes; the ``Sender``'s thread puts. A step is reported once its puts have ended, and while
they have not, the node goes on serving what arrives.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from ..core.errors import TransportError
from ..kvcache.layout import CANONICAL_LAYOUT
from ..models import ResolvedModel
from ..transport import Endpoint, Events, Peer
from ..wire.messages import (
    KVCredit,
    Message,
    StagingGrant,
    StepPlan,
    StepStats,
    decode,
)
from .config import PREFILL, NodeConfig
from .forward import Sampled, step_done
from .gate import Gate, OpenGate
from .local import LocalNode
from .pushes import KVPusher, Pusher, PushJob, Sender, StepPushes, plan_push
from .rows import Batch
from .staged_push import StagedPusher
from .staging import is_staged

log = logging.getLogger(__name__)
MIB = 1 << 20
LOOK_SECONDS = 200e-6
"""How long the node waits at a time for what arrives while its device computes."""


@dataclass
class _Computed:
    """A step whose tokens are known and whose puts may be under way."""

    plan: StepPlan
    sampled: Sampled
    stats: StepStats
    pushes: StepPushes
    started: float
    computed: float
    """When computing ended."""
    problem: Exception | None


class PrefillNode(LocalNode):
    def __init__(
        self, config: NodeConfig, model: ResolvedModel, endpoint: Endpoint, gate: Gate | OpenGate
    ) -> None:
        super().__init__(config, model, endpoint, gate)
        self._pushers: dict[str, Pusher] = {}
        self._staged: dict[str, StagedPusher] = {}
        self._grants: dict[str, StagingGrant] = {}
        """Rings granted by address, as a grant may come before this node has met its giver."""
        self._set_aside = Events()
        """What arrived while a step was computed."""
        self._awaits = False
        """Whether the sender may be waiting for what only this thread sees arrive."""
        self._sender: Sender | None = None
        self._computed: list[_Computed] = []

    def on_meet(self) -> None:
        checksums = self.config.network.checksum != "none"
        homes = {
            name: peer
            for name, peer in self.peers.items()
            if peer.layout is not None and peer.role != PREFILL
        }
        share = self.config.network.staging_mib * MIB // max(1, len(homes))
        for name, peer in homes.items():
            link = self.link(name)
            staged = is_staged(self.peer_info(), peer)
            kind = StagedPusher if staged else KVPusher
            source = self.pool.source(share)
            pusher = kind(self.endpoint, link, peer, source, self.layout, checksums)
            self._pushers[name] = pusher
            if isinstance(pusher, StagedPusher):
                self._staged[link.address] = pusher
                if link.address in self._grants:
                    pusher.grant(self._grants.pop(link.address))
        self._awaits = bool(self._staged) or self.pool.region is None
        own = self.endpoint.connect(self.endpoint.address())

        def wake() -> None:
            try:
                self.endpoint.send(own, b"")
            except TransportError as problem:
                log.debug("%s has closed: nobody to wake: %s", self.config.name, problem)

        self._sender = Sender(self.config.name, wake)

    def layout_name(self) -> str:
        """Of what is put: blocks of a pool that peers cannot reach are mirrored as they are."""
        able = self.backend.capabilities
        return CANONICAL_LAYOUT if able.direct_puts else self.pool.layout_name(able)

    def close(self) -> None:
        for pusher in self._pushers.values():
            pusher.close()
        if self._sender is not None:
            self._sender.close()
        super().close()

    def on_message(self, peer: Peer, message: Message) -> None:
        pusher = self._staged.get(peer.address)
        if isinstance(message, KVCredit) and pusher is not None:
            pusher.credit(message.slots)
        elif isinstance(message, StagingGrant) and pusher is not None:
            pusher.grant(message)
        elif isinstance(message, StagingGrant):
            self._grants[peer.address] = message
        else:
            super().on_message(peer, message)

    def step(self, timeout: float) -> None:
        events, self._set_aside = self._set_aside, Events()
        if events:
            self._dispatch(events)
        else:
            super().step(timeout)

    def _take_credits(self, timeout: float = 0.0) -> None:
        """Between two layers: the sender may be waiting for slots, and nobody else reads our
        mailbox. The rest waits for the step's end."""
        events = self.endpoint.poll(timeout)
        for peer, data in events.messages:
            pusher = self._staged.get(peer.address)
            credit = _credit_in(data) if pusher is not None else None
            if pusher is not None and credit is not None:
                pusher.credit(credit.slots)
            else:
                self._set_aside.messages.append((peer, data))
        self._set_aside.notices += events.notices
        self._set_aside.tickets += events.tickets
        self._look(events)

    def _look(self, events: Events) -> None:
        if events.tickets:
            for pusher in self._pushers.values():
                pusher.look()

    def _dispatch(self, events: Events) -> None:
        super()._dispatch(events)
        self._look(events)
        self._report_ended()

    def run_plan(self, plan: StepPlan) -> None:
        """One step; its errors are reported with it."""
        assert self._sender is not None
        started, stats = time.perf_counter(), StepStats()
        pushes = StepPushes([])
        sampled = Sampled()
        problem: Exception | None = None
        try:
            self.rows.apply(plan)
            batch = self.rows.batch(plan)
            pushes = StepPushes(self._plan_pushes(batch))
            sampled = self._compute(batch, stats, pushes)
        except Exception as error:
            problem = error
        pushes.seal()
        now = time.perf_counter()
        self._computed.append(_Computed(plan, sampled, stats, pushes, started, now, problem))
        self.gate.rest()

    def _compute(self, batch: Batch, stats: StepStats, pushes: StepPushes) -> Sampled:
        sender = self._sender
        assert sender is not None
        sender.begin(pushes)

        def on_layer(layer: int) -> None:
            ready = self.copies.mark()
            sender.layers(pushes, (layer,), ready)
            if self._awaits:
                self._take_credits()
                if layer == self.layout.num_layers - 1:  # here, as sampling would wait deaf
                    ready.wait(meanwhile=lambda: self._take_credits(LOOK_SECONDS))

        return self.forward.run(batch, stats, on_layer)

    def _report_ended(self) -> None:
        """Reports, in order, the steps whose puts have all ended."""
        while self._computed and self._computed[0].pushes.ended:
            self._report_step(self._computed.pop(0))

    def _report_step(self, step: _Computed) -> None:
        pushes, stats = step.pushes, step.stats
        failures = pushes.failures()
        cut = [failure.peer for failure in failures if not self._mend(failure.peer)]
        problem = step.problem or pushes.problem
        if problem is not None:
            self.report_failure(step.plan, problem, cut)
            return
        if failures:
            self.report_lost(step.plan, failures, cut)
            return
        now = time.perf_counter()
        stats.bytes_out += pushes.nbytes
        stats.push, stats.push_wait = pushes.seconds, now - step.computed
        stats.seconds = now - step.started
        self.report(step_done(self.config.name, step.plan, step.sampled, stats))

    def _mend(self, name: str) -> bool:
        """A receiver could not be reached. Where it lives, later requests shall reach it, over a
        new connection, which fences what was lost. False where there is none."""
        staged = self._staged.get(self.peers[name].address)
        if not self.reconnect(name):
            return False
        try:
            if staged is not None:
                staged.mend()
        except TransportError as problem:
            log.warning("%s: %s cannot be reached: %s", self.config.name, name, problem)
        return True

    def _plan_pushes(self, batch: Batch) -> list[PushJob]:
        sampling = {row.request for row in batch.sampled}
        jobs: list[PushJob] = []
        for row, end in zip(batch.rows, batch.lengths_r.tolist(), strict=True):
            if row.push is None:
                continue
            blocks: np.ndarray = self.rows.blocks(row.request)
            jobs += plan_push(
                row,
                blocks,
                end,
                row.request in sampling,
                self.layout.block_size,
                self._pushers[row.push.node],
            )
        return jobs


def _credit_in(data: bytes) -> KVCredit | None:
    try:
        message = decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None  # for the loop to drop and to say so
    return message if isinstance(message, KVCredit) else None
