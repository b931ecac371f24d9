"""The dense node of ``pda``: all weights, no cache; drives each wavefront layer by layer.

Every lane is a small state machine: a stage runs, its q, k, v go to the attention nodes that hold
the rows' caches, and the lane waits for their notices while other lanes run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from .. import _native
from ..core.errors import CloverError, PeerGoneError, TransportError
from ..models import ResolvedModel, load_half
from ..models.base import Carry, NativeStep
from ..models.grammar import grammars_of
from ..models.sampling import sample
from ..transport import Endpoint, Peer, Ranges, RegionRef
from ..wire.messages import (
    AttentionDone,
    HopFailed,
    Message,
    NodeGone,
    Sampling,
    StepPlan,
    StepStats,
)
from ..wire.notices import STEP_MASK, HopNotice, pack_hop, unpack
from .base import POLL_SECONDS, Node
from .batch_copy import BatchCopier
from .config import NodeConfig
from .forward import last_stage, sample_rows, step_done
from .gate import Gate, OpenGate
from .hop import HopBuffer, HopMemory, HopRows, HopShape, row_index
from .hop_loop import HopLoops, StepLoop, Way
from .rows import Batch, RowTable

log = logging.getLogger(__name__)


@dataclass
class _Segment:
    """Adjacent rows of a step that live on one attention node."""

    home: str
    first: int
    count: int
    index: np.ndarray
    back: HopRows


@dataclass
class _Course:
    """Where a lane's rows go, and come back to; the same for as long as they are of the same
    homes."""

    homes: list[str]
    """One for each row."""
    there: HopRows
    segments: list[_Segment]
    ways: list[tuple[_Segment, Way]]


@dataclass
class _Lane:
    """A step under way."""

    plan: StepPlan
    batch: Batch
    there: HopRows
    segments: list[_Segment]
    stats: StepStats
    started: float
    ways: list[tuple[_Segment, Way]]
    layer: int = 0
    carry: Carry | NativeStep | None = None
    waiting: set[str] = field(default_factory=set)
    """Attention nodes that have not answered for ``layer``."""
    error: CloverError | None = None
    """Why the step cannot be finished."""
    loop: StepLoop | None = None
    """Where its layers run without Python."""
    attended: list[AttentionDone] = field(default_factory=list)
    """What was done by attention nodes that do not report it themselves."""


class DecodeDenseNode(Node):
    def __init__(
        self, config: NodeConfig, model: ResolvedModel, endpoint: Endpoint, gate: Gate | OpenGate
    ) -> None:
        super().__init__(config, model, endpoint, gate)
        with self.device.taking_memory("the weights"):
            self.half = load_half(
                model, config.model.seed, self.device.torch, config.batch_invariant
            )
        self.rows = RowTable(
            config.cache.block_size,
            local_attention=False,
            grammars=grammars_of(model),
            on_device=self.device.on_gpu,
        )
        self.shape = HopShape(self.specs, model.arch.num_heads, getattr(torch, model.dtype))
        attention = len(config.attention_nodes)
        self._out = HopBuffer(self.shape, False, 1, config.lanes, config.max_rows)
        self._in = HopBuffer(self.shape, True, attention, config.lanes, config.max_rows)
        self._out_region = self.endpoint.register(self._out.nbytes)
        self._in_region = self.endpoint.register(self._in.nbytes)
        self._sent = HopMemory(self._out, self._out_region, self.copies)
        self._got = HopMemory(self._in, self._in_region, self.copies)
        self._homes = {name: i for i, name in enumerate(config.attention_nodes)}
        self._ranges: dict[str, list[Ranges]] = {}
        self._lanes: dict[int, _Lane] = {}
        self._courses: dict[int, _Course] = {}
        self._loops = self._make_loops()
        self._copier = BatchCopier(self.device.torch) if self.device.on_gpu else None

    def _make_loops(self) -> HopLoops | None:
        """None: layer by layer, as with several lanes, of which one runs while others wait."""
        config = self.config
        if config.layer_loop != "auto" or config.lanes > 1 or self.copies.apart:
            return None
        number = config.dense_nodes.index(config.name)
        return HopLoops.of(self.half, self.shape, self.endpoint, number, self.gate)

    def regions(self) -> dict[str, RegionRef]:
        return {"hop": self._in_region.ref}

    def weight_bytes(self) -> int:
        return self.half.weight_bytes

    def on_meet(self) -> None:
        config = self.config
        mine = config.dense_nodes.index(config.name)
        there = HopBuffer(self.shape, False, len(config.dense_nodes), config.lanes, config.max_rows)
        for name in config.attention_nodes:
            remote = self.peers[name].regions["hop"]
            self._ranges[name] = [
                self.endpoint.prepare(
                    self.link(name),
                    self._out.slices(self._out_region, 0, lane),
                    there.slices(remote, mine, lane),
                )
                for lane in range(config.lanes)
            ]

    # -- the loop: time asleep while lanes wait is the barrier

    def step(self, timeout: float) -> None:
        looping = [lane for lane in self._lanes.values() if lane.loop is not None]
        if looping:
            timeout = 0.0  # they wait themselves
        started = time.perf_counter()
        waiting = [lane for lane in self._lanes.values() if lane.waiting and lane.loop is None]
        events = self.endpoint.poll(self.later.patience(timeout))
        slept = time.perf_counter() - started
        for lane in waiting:
            lane.stats.barrier += slept
        self._dispatch(events)
        self.later.run()
        for lane in looping:
            if lane.loop is not None:
                self._guard(lane, self._run)

    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, StepPlan):
            self._begin(message)
        elif isinstance(message, HopFailed):
            lane = self._lanes.get(message.lane)
            if lane is not None and lane.plan.step == message.step:
                lane.error = lane.error or CloverError(message.error)
                self._answered(lane, self.name_of(peer))
        elif isinstance(message, NodeGone):
            for lane in list(self._lanes.values()):
                if message.name in lane.waiting:
                    self._lost(lane, message.name, "it has died")
        else:
            log.warning("%s: dropped a %s", self.config.name, type(message).__name__)

    def on_notice(self, peer: Peer, notice: int) -> None:
        event = unpack(notice)
        lane = self._lanes.get(event.lane) if isinstance(event, HopNotice) else None
        home = self.name_of(peer)
        current = (
            lane is not None
            and isinstance(event, HopNotice)
            and lane.plan.step & STEP_MASK == event.step
            and lane.layer == event.layer
            and home in lane.waiting
        )
        if not current:
            log.warning("%s: dropped a stale notice from %s", self.config.name, peer.address)
            return
        assert lane is not None
        self._answered(lane, home)

    def _answered(self, lane: _Lane, home: str) -> None:
        """A step with an error ends here, once no attention node works on it any more."""
        self._leave_loop(lane)
        lane.waiting.discard(home)
        if not lane.waiting:
            self._guard(lane, self._resume)

    def _lost(self, lane: _Lane, home: str, reason: str) -> None:
        lane.error = PeerGoneError(home, reason)
        self._answered(lane, home)

    # -- a step

    def _begin(self, plan: StepPlan) -> None:
        try:
            self.rows.apply(plan)
            batch = self.rows.batch(plan)
            batch = batch if self._copier is None else self._copier.move(batch)
            started = time.perf_counter()
            course = self._course(plan.lane, batch)
            where = course.there, course.segments
            lane = _Lane(plan, batch, *where, StepStats(), started, course.ways)
        except (AssertionError, KeyError) as problem:
            self.report_failure(plan, problem)
            return
        self._lanes[plan.lane] = lane
        self._guard(lane, self._start)

    def _guard(self, lane: _Lane, action: Callable[[_Lane], None]) -> None:
        """The boundary where a step's errors stop."""
        try:
            action(lane)
        except Exception as problem:
            self._lanes.pop(lane.plan.lane, None)
            self.report_failure(lane.plan, problem)

    def _course(self, lane: int, batch: Batch) -> _Course:
        homes = [row.home for row in batch.rows]
        course = self._courses.get(lane)
        if course is None or course.homes != homes:
            there = HopRows(self.shape, self._sent.rows[0, lane, : len(homes)])
            segments = self._segments(lane, homes)
            ways = [(s, Way(self.link(s.home), self._ranges[s.home][lane])) for s in segments]
            course = self._courses[lane] = _Course(homes, there, segments, ways)
        return course

    def _segments(self, lane: int, homes: list[str]) -> list[_Segment]:
        segments, first = [], 0
        for home, rows in groupby(homes):
            count = len(list(rows))
            back = HopRows(self.shape, self._got.rows[self._homes[home], lane, :count])
            segments.append(_Segment(home, first, count, row_index(first, 0, count), back))
            first += count
        assert len({s.home for s in segments}) == len(segments), "rows of one home are not adjacent"
        return segments

    def _start(self, lane: _Lane) -> None:
        lane.loop = self._loop_for(lane)
        if lane.loop is None:
            self._stage(lane, None)
        else:
            self._run(lane)

    def _loop_for(self, lane: _Lane) -> StepLoop | None:
        if self._loops is None:
            return None
        notice = lane.plan.lane, lane.plan.step
        return self._loops.begin(lane.batch, lane.there, notice, lane.ways)

    def _run(self, lane: _Lane) -> None:
        """Runs layers until they are done, or something has come that is to be seen first."""
        assert lane.loop is not None
        loop = lane.loop
        outcome = loop.run(POLL_SECONDS)
        lane.layer = loop.layer
        lane.waiting = loop.waiting()
        lost = loop.lost()
        if outcome == _native.LoopOutcome.DONE:
            self._leave_loop(lane, done=True)
            self._resume(lane, self._attended_near(lane, loop))
        elif outcome == _native.LoopOutcome.HAND_OVER:
            self._leave_loop(lane, sent=False)
            self._hop(lane)
        for home in lost:
            self.reconnect(home)
            self._lost(lane, home, "a hop to it was lost")

    def _leave_loop(self, lane: _Lane, sent: bool = True, done: bool = False) -> None:
        """What follows of the step goes layer by layer. ``sent``: the hop of its layer is made;
        ``done``: and answered, and there is none after it."""
        if lane.loop is None:
            return
        loop, lane.loop = lane.loop, None
        lane.carry = loop.step if done else loop.carry()
        hops, stats, rows = lane.layer + sent, lane.stats, len(lane.batch.rows)
        loop.account(stats, hops)
        stats.bytes_out += hops * rows * self._out.row_bytes
        stats.bytes_in += lane.layer * rows * self._in.row_bytes  # the last is gathered as ever

    def _attended_near(self, lane: _Lane, loop: StepLoop) -> torch.Tensor | None:
        """The last layer's output where this thread answered all hops; None: it is in the hop's
        buffer."""
        seconds = loop.near_seconds()
        if seconds is None:
            return None
        for segment, time_taken in zip(lane.segments, seconds, strict=True):
            self._note_attended(lane, segment, time_taken)
        lane.stats.bytes_in += len(lane.batch.rows) * self._in.row_bytes
        return loop.attended_the

    def _read_told(self, lane: _Lane) -> None:
        """Of attention nodes that have answered over a wire, without their Python."""
        plan = lane.plan
        for segment in lane.segments:
            home = self._homes[segment.home]
            notice, layers, seconds = self._in.take_told(self._in_region, home, plan.lane)
            if layers >= self.half.num_layers and notice == pack_hop(plan.lane, plan.step, 0):
                self._note_attended(lane, segment, seconds)

    def _note_attended(self, lane: _Lane, segment: _Segment, seconds: float) -> None:
        """The attention node answered all layers natively in ``seconds``."""
        plan, layers, rows = lane.plan, self.half.num_layers, segment.count
        lane.attended.append(
            AttentionDone(
                segment.home,
                self.config.name,
                plan.lane,
                plan.step,
                layers,
                rows,
                seconds,
                rows * layers * self._out.row_bytes,
                rows * layers * self._in.row_bytes,
                layers,
            )
        )

    def _resume(self, lane: _Lane, attn_out: torch.Tensor | None = None) -> None:
        """``attn_out``: of the lane's layer; None: to be gathered."""
        if lane.error is not None:
            raise lane.error
        attn_out = self._gather(lane) if attn_out is None else attn_out
        lane.layer += 1
        if lane.layer < self.half.num_layers:
            self._stage(lane, attn_out)
        else:
            self._finish(lane, attn_out)

    def _stage(self, lane: _Lane, attn_out: torch.Tensor | None) -> None:
        batch = lane.batch
        assert not isinstance(lane.carry, NativeStep)
        with self.gate:
            started = time.perf_counter()
            *_, lane.carry = self.half.stage(
                lane.layer,
                attn_out,
                lane.carry,
                batch.token_ids_t,
                batch.positions_t,
                lane.there.qkv(lane.layer),
            )
            sent = self._sent.send(0, lane.plan.lane, len(batch.rows))
            lane.stats.dense += time.perf_counter() - started
        self.later.after(sent, lambda: self._hop_if_current(lane))

    def _hop_if_current(self, lane: _Lane) -> None:
        if self._lanes.get(lane.plan.lane) is lane:
            self._guard(lane, self._hop)

    def _hop(self, lane: _Lane) -> None:
        lane.waiting = {segment.home for segment in lane.segments}
        lane.stats.barriers += 1
        started = time.perf_counter()
        for segment in lane.segments:
            try:
                self._put(lane, segment)
            except TransportError as problem:
                self.reconnect(segment.home)
                self._lost(lane, segment.home, str(problem))
        lane.stats.barrier += time.perf_counter() - started

    def _put(self, lane: _Lane, segment: _Segment) -> None:
        stats, plan = lane.stats, lane.plan
        ticket = self.endpoint.put(
            self._ranges[segment.home][plan.lane],
            segment.index,
            pack_hop(plan.lane, plan.step, lane.layer),
        )
        layer = lane.layer

        def on_error(problem: Exception) -> None:
            self.reconnect(segment.home)
            if lane.layer == layer and segment.home in lane.waiting:
                self._lost(lane, segment.home, str(problem))

        self.watch(ticket, on_error)
        stats.attention_calls += 1
        stats.bytes_out += segment.count * self._out.row_bytes

    def _gather(self, lane: _Lane) -> torch.Tensor:
        """The attention output of the lane's layer, rows in plan order."""
        parts = []
        for segment in lane.segments:
            self._got.bring(self._homes[segment.home], lane.plan.lane, segment.count)
            parts.append(segment.back.output(lane.layer))
            lane.stats.bytes_in += segment.count * self._in.row_bytes
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish(self, lane: _Lane, attn_out: torch.Tensor) -> None:
        stats = lane.stats
        assert lane.carry is not None
        with self.gate:
            t0 = time.perf_counter()
            logits = last_stage(self.half, lane.batch, attn_out, lane.carry)
            t1 = time.perf_counter()
            sampled = sample_rows(lane.batch, logits)
            t2 = time.perf_counter()
        stats.dense += t1 - t0
        stats.sample += t2 - t1
        stats.seconds = t2 - lane.started
        del self._lanes[lane.plan.lane]
        self._read_told(lane)
        self.report(step_done(self.config.name, lane.plan, sampled, stats, lane.attended))

    # -- the reference path: a step by plain calls, layer by layer

    def start_token_batch(self, token_ids: list[int], positions: list[int]) -> TokenBatch:
        """Begins a decode step of one token per row."""
        device = self.copies.torch
        return TokenBatch(
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
        )

    @torch.inference_mode()
    def prepare_attention_batch(
        self, batch: TokenBatch, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q ``[r, h, d]``, k ``[r, n, d]``, v ``[r, n, e]`` of ``layer``, on this node's device;
        layers in order."""
        q, k, v, batch.carry = self.half.stage(
            layer, batch.attn_out, batch.carry, batch.token_ids, batch.positions
        )
        assert q is not None
        assert k is not None
        assert v is not None
        return q, k, v

    def finish_layer_batch(self, batch: TokenBatch, layer: int, attn_out_rhe: torch.Tensor) -> None:
        """Hands over the attention output of ``layer``, on any device; its output projection and
        FFN run with the next layer's projection, or with sampling."""
        batch.attn_out = attn_out_rhe.to(self.copies.torch)

    @torch.inference_mode()
    def sample_next_token_batch(self, batch: TokenBatch, sampling: list[Sampling]) -> list[int]:
        """The token after each row's, by that row's sampling parameters."""
        half = self.half
        _, _, _, carry = half.stage(
            half.num_layers, batch.attn_out, batch.carry, None, batch.positions
        )
        positions = (batch.positions + 1).tolist()
        return [int(token) for token in sample(half.logits(carry), sampling, positions)]


@dataclass
class TokenBatch:
    """A decode step of the reference path."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    carry: Carry | None = None
    attn_out: torch.Tensor | None = None
