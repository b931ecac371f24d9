"""The prefill node: runs prompts and has each layer's blocks put as the layer ends.

It computes; the ``Sender``'s thread puts. A step is reported once its puts have ended, and while
they have not, the node goes on serving what arrives.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from ..core.errors import TransportError
from ..models import ResolvedModel
from ..transport import Endpoint, Events
from ..wire.messages import StepPlan, StepStats
from .config import PREFILL, NodeConfig
from .forward import Sampled, step_done
from .gate import Gate, OpenGate
from .local import LocalNode
from .pushes import KVPusher, PushJob, Sender, StepPushes, plan_push
from .rows import Batch

log = logging.getLogger(__name__)


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
        self._pushers: dict[str, KVPusher] = {}
        self._sender: Sender | None = None
        self._computed: list[_Computed] = []

    def on_meet(self) -> None:
        for name, peer in self.peers.items():
            if peer.layout is not None and peer.role != PREFILL:
                self._pushers[name] = KVPusher(
                    self.endpoint, self.link(name), peer, self.pool, self.layout
                )
        own = self.endpoint.connect(self.endpoint.address())

        def wake() -> None:
            try:
                self.endpoint.send(own, b"")
            except TransportError as problem:
                log.debug("%s has closed: nobody to wake: %s", self.config.name, problem)

        self._sender = Sender(self.config.name, wake)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        super().close()

    def _dispatch(self, events: Events) -> None:
        super()._dispatch(events)
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
        self._sender.finish(pushes)
        now = time.perf_counter()
        self._computed.append(_Computed(plan, sampled, stats, pushes, started, now, problem))
        self.gate.rest()

    def _compute(self, batch: Batch, stats: StepStats, pushes: StepPushes) -> Sampled:
        sender = self._sender
        assert sender is not None
        sender.begin(pushes)
        return self.forward.run(batch, stats, lambda layer: sender.layer(pushes, layer))

    def _report_ended(self) -> None:
        """Reports, in order, the steps whose puts have all ended."""
        while self._computed and self._computed[0].pushes.ended:
            self._report_step(self._computed.pop(0))

    def _report_step(self, step: _Computed) -> None:
        pushes, stats = step.pushes, step.stats
        failures = pushes.failures()
        problem = step.problem or pushes.problem
        if problem is not None:
            self.report_failure(step.plan, problem)
            return
        if failures:
            self.report_lost(step.plan, failures)
            return
        now = time.perf_counter()
        stats.bytes_out += pushes.nbytes
        stats.push, stats.push_wait = pushes.seconds, now - step.computed
        stats.seconds = now - step.started
        self.report(step_done(self.config.name, step.plan, step.sampled, stats))

    def _plan_pushes(self, batch: Batch) -> list[PushJob]:
        sampling = {row.request for row in batch.sampled}
        jobs = []
        for row, end in zip(batch.rows, batch.lengths_r.tolist(), strict=True):
            if row.push is None:
                continue
            blocks: np.ndarray = self.rows.blocks(row.request)
            job = plan_push(
                row,
                blocks,
                end,
                row.request in sampling,
                self.layout.block_size,
                self._pushers[row.push.node],
            )
            if job is not None:
                jobs.append(job)
        return jobs
