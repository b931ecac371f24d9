"""The attention node: owns a KV pool, takes transfers into it, answers hops over it.

It knows requests only as block tables, and the model only as KV specs: it holds no weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..core.errors import TransportError, describe
from ..kvcache.layout import PoolLayout
from ..models import ResolvedModel
from ..transport import Endpoint, Peer, Ranges, RegionRef
from ..transport.native import MailboxWire
from ..wire.messages import (
    AttentionDone,
    AttentionPlan,
    HopFailed,
    Message,
    NodeGone,
)
from ..wire.notices import STEP_MASK, HopNotice, pack_hop, unpack
from .answers import NOWHERE, Answers, Hops
from .base import Node
from .config import NodeConfig
from .gate import Gate, OpenGate
from .hop import HopBuffer, HopMemory, HopRows, HopShape, row_index
from .inlet import Inlet
from .layer_loop import attention_rows
from .local import make_backend
from .one_token import FEW_ROWS, OneTokenRows
from .rows import BlockTables, apply_attention_rows, slots_of

log = logging.getLogger(__name__)
LaneKey = tuple[str, int]
"""(dense node's name, lane)"""


@dataclass
class _Step:
    """One wavefront's step on this node: its rows as tensors, its totals so far."""

    plan: AttentionPlan
    there: HopRows
    back: HopRows
    query_starts: torch.Tensor
    block_tables_rb: torch.Tensor
    lengths_r: torch.Tensor
    slots_t: torch.Tensor
    index: np.ndarray
    hops: Hops
    calls: int = 0
    seconds: float = 0.0
    native_calls: int = 0
    """Of ``calls``, those that were answered without Python."""


@dataclass
class _Kept:
    """Of a lane's last step, for the next one where that has the same rows."""

    at: OneTokenRows
    there: HopRows
    back: HopRows
    index: np.ndarray


@dataclass
class _Source:
    """A dense node: where its rows arrive, where output goes; each per lane."""

    index: int
    ranges: list[Ranges] = field(default_factory=list)
    told_after: list[int] = field(default_factory=list)
    """Bytes from where output goes to the dense node's record of this node's step."""


class AttentionNode(Node):
    def __init__(
        self, config: NodeConfig, model: ResolvedModel, endpoint: Endpoint, gate: Gate | OpenGate
    ) -> None:
        super().__init__(config, model, endpoint, gate)
        heads = model.arch.num_heads
        self.shape = HopShape(self.specs, heads, getattr(torch, model.dtype))
        self._in = HopBuffer(
            self.shape, False, len(config.dense_nodes), config.lanes, config.max_rows
        )
        self._out = HopBuffer(
            self.shape, True, len(config.dense_nodes), config.lanes, config.max_rows
        )
        self.layout = self.make_layout()
        with self.device.taking_memory(f"a KV pool of {self.layout.total_bytes / 2**30:.2f} GiB"):
            self.pool = self.make_pool(self.layout)
            self.backend = make_backend(config, self.layout, heads, self.pool)
        self._in_region = self.endpoint.register(self._in.nbytes)
        self._out_region = self.endpoint.register(self._out.nbytes)
        self._got = HopMemory(self._in, self._in_region, self.copies)
        self._sent = HopMemory(self._out, self._out_region, self.copies)
        self.tables = BlockTables(config.cache.block_size)
        self.inlet = Inlet(self, self.backend, self.pool)
        self.transfers = self.inlet.receiver
        auto = config.layer_loop == "auto" and not self.copies.apart
        self._answers = Answers.of(self.backend, self.shape, self.endpoint, gate) if auto else None
        self._sources: dict[str, _Source] = {}
        self._steps: dict[LaneKey, _Step] = {}
        self._kept: dict[LaneKey, _Kept] = {}
        self._early: dict[LaneKey, HopNotice] = {}
        self._failed: dict[LaneKey, HopFailed] = {}

    def memory_taken(self) -> tuple[int, int]:
        weights, step = super().memory_taken()
        return weights, step + self._in.nbytes + self._out.nbytes

    def regions(self) -> dict[str, RegionRef]:
        return self.pool.regions() | {"hop": self._in_region.ref}

    def pool_layout(self) -> PoolLayout:
        return self.layout

    def layout_name(self) -> str:
        return self.pool.layout_name(self.backend.capabilities)

    def on_meet(self) -> None:
        config = self.config
        mine = config.attention_nodes.index(config.name)
        back = HopBuffer(
            self.shape, True, len(config.attention_nodes), config.lanes, config.max_rows
        )
        for i, name in enumerate(config.dense_nodes):
            source = _Source(i)
            for lane in range(config.lanes):
                local = self._out.slices(self._out_region, i, lane)
                remote = back.slices(self.peers[name].regions["hop"], mine, lane)
                source.ranges.append(self.endpoint.prepare(self.link(name), local, remote))
                source.told_after.append(back.told_after(mine, lane))
            self._sources[name] = source
        self.inlet.meet()

    def close(self) -> None:
        if self._answers is not None:
            self._answers.close()
        self.backend.close()
        super().close()

    # -- what arrives

    def step(self, timeout: float) -> None:
        if self._answers is not None and self._answers.serves:
            self._answers.serve(timeout)
            timeout = 0.0
        super().step(timeout)

    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, AttentionPlan):
            self._begin(message)
        elif isinstance(message, NodeGone):
            self._forget_source(message.name)
        elif not self.inlet.handle(self.name_of(peer), message):
            log.warning("%s: dropped a %s", self.config.name, type(message).__name__)

    def on_notice(self, peer: Peer, notice: int) -> None:
        event = unpack(notice)
        if not isinstance(event, HopNotice):
            self.transfers.notice(self.name_of(peer), event)
            return
        key = (self.name_of(peer), event.lane)
        if key[0] not in self._sources:
            return  # the last hops of a dense node that has died
        failed = self._failed.get(key)
        if failed is not None and failed.step & STEP_MASK == event.step:
            self.tell(key[0], failed)
            return
        step = self._steps.get(key)
        if step is None or step.plan.step & STEP_MASK != event.step:
            self._early[key] = event  # its plan is still on the way
        else:
            self._take_hop(key, step, event.layer)

    def _begin(self, plan: AttentionPlan) -> None:
        key = (plan.source, plan.lane)
        self._failed.pop(key, None)
        try:
            self._end(key)
            apply_attention_rows(self.tables, plan.leaves, plan.joins, plan.blocks)
            step = self._steps[key] = self._make_step(plan)
            self._hand_over(step)
        except (AssertionError, KeyError, IndexError) as problem:
            self._fail(plan, problem)
            return
        early = self._early.pop(key, None)
        if early is not None and early.step == plan.step & STEP_MASK:
            self._take_hop(key, step, early.layer)

    def _make_step(self, plan: AttentionPlan) -> _Step:
        if self.copies.apart or len(plan.rows) > FEW_ROWS:
            return self._make_whole(plan)
        kept = self._keep(plan)
        kept.at.write(plan.rows, [length - 1 for length in plan.lengths])
        at = kept.at
        assert at.block_tables_rb is not None
        assert at.slots_t is not None
        return _Step(
            plan=plan,
            there=kept.there,
            back=kept.back,
            query_starts=at.query_starts,
            block_tables_rb=at.block_tables_rb,
            lengths_r=at.lengths_r,
            slots_t=at.slots_t,
            index=kept.index,
            hops=Hops(self._sources[plan.source].index, pack_hop(plan.lane, plan.step, 0)),
        )

    def _keep(self, plan: AttentionPlan) -> _Kept:
        """What the lane's steps of so many rows share."""
        key, count = (plan.source, plan.lane), len(plan.rows)
        kept = self._kept.get(key)
        if kept is None or len(kept.index) != count:
            source = self._sources[plan.source].index
            kept = self._kept[key] = _Kept(
                OneTokenRows(self.tables),
                HopRows(self.shape, self._got.rows[source, plan.lane, :count]),
                HopRows(self.shape, self._sent.rows[source, plan.lane, :count]),
                row_index(0, 0, count),
            )
        return kept

    def _make_whole(self, plan: AttentionPlan) -> _Step:
        """For many rows, and for a device."""
        lengths = np.asarray(plan.lengths, np.int32)
        tables = self.tables.gather(plan.rows, int(lengths.max()))
        count, source = len(plan.rows), self._sources[plan.source].index
        rows = np.arange(count)
        slots = slots_of(tables, rows, lengths.astype(np.int64) - 1, self.config.cache.block_size)
        device = self.copies.torch
        return _Step(
            plan=plan,
            there=HopRows(self.shape, self._got.rows[source, plan.lane, :count]),
            back=HopRows(self.shape, self._sent.rows[source, plan.lane, :count]),
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=device),
            block_tables_rb=torch.from_numpy(tables).to(device),
            lengths_r=torch.from_numpy(lengths).to(device),
            slots_t=torch.from_numpy(slots).to(device),
            index=row_index(0, 0, count),
            hops=Hops(source, pack_hop(plan.lane, plan.step, 0)),
        )

    def _hand_over(self, step: _Step) -> None:
        """Has the step's hops answered without Python, where there is a way."""
        if self._answers is None:
            return
        plan = step.plan
        rows = attention_rows(step.query_starts, step.block_tables_rb, step.lengths_r, step.slots_t)
        wire = self.endpoint.native()
        out, told = step.back.output(0).data_ptr(), NOWHERE
        if isinstance(wire, MailboxWire):
            source = self._sources[plan.source]
            try:
                self._answers.know(source.index, self.link(plan.source))
                out = wire.first_target(source.ranges[plan.lane])
                told = out + source.told_after[plan.lane]
            except TransportError as problem:
                log.debug("%s: the first hop will tell: %s", self.config.name, problem)
                return
        self._answers.begin(step.hops, rows, step.there.qkv(0), out, told)

    def _end(self, key: LaneKey) -> _Step | None:
        """The step, with all that was done of it; nothing is answered of it any more."""
        step = self._steps.pop(key, None)
        if step is not None:
            self._take_over(step)
        return step

    def _take_over(self, step: _Step) -> None:
        """What follows of the step is answered here."""
        if self._answers is not None:
            calls, seconds = self._answers.end(step.hops)
            step.calls += calls
            step.native_calls += calls
            step.seconds += seconds

    def _take_hop(self, key: LaneKey, step: _Step, layer: int) -> None:
        """Answers one hop that did not go without Python all the way."""
        if self._answers is None or not self._answers.answer(step.hops, layer):
            self._take_over(step)
            self._attend(key, step, layer)

    def _attend(self, key: LaneKey, step: _Step, layer: int) -> None:
        """Computes the answer to one hop; a boundary where a step's errors stop."""
        number, lane, count = self._sources[key[0]].index, step.plan.lane, len(step.plan.rows)
        try:
            with self.gate:
                started = time.perf_counter()
                self._got.bring(number, lane, count)
                self._append_and_attend(layer, step)
                sent = self._sent.send(number, lane, count)
                step.seconds += time.perf_counter() - started
            step.calls += 1
        except Exception as problem:
            log.exception("%s: attention of layer %d failed", self.config.name, layer)
            self._end(key)
            self._fail(step.plan, problem)
            return
        self.later.after(sent, lambda: self._answer(key, step, layer))

    def _answer(self, key: LaneKey, step: _Step, layer: int) -> None:
        """Puts the answer to one hop; a boundary where a step's errors stop."""
        if self._steps.get(key) is not step:
            return  # it has ended meanwhile
        plan, source = step.plan, self._sources[key[0]]
        try:
            if layer == self.layout.num_layers - 1:
                self._end(key)
                self._report_step(step)  # before the put, which lets the step's end overtake it
            ticket = self.endpoint.put(
                source.ranges[plan.lane], step.index, pack_hop(plan.lane, plan.step, layer)
            )
            self.watch(ticket, lambda problem: self._cut(plan, problem))
        except TransportError as problem:
            self._end(key)
            self._cut(plan, problem)
        except Exception as problem:
            log.exception("%s: the answer for layer %d failed", self.config.name, layer)
            self._end(key)
            self._fail(plan, problem)

    def _append_and_attend(self, layer: int, step: _Step) -> None:
        q, k, v = step.there.qkv(layer)
        self.backend.append(layer, k, v, step.slots_t)
        result, _ = self.backend.attend(
            layer, q, step.query_starts, step.block_tables_rb, step.lengths_r
        )
        step.back.output(layer).copy_(result)

    def _report_step(self, step: _Step) -> None:
        plan, count = step.plan, len(step.plan.rows)
        self.report(
            AttentionDone(
                self.config.name,
                plan.source,
                plan.lane,
                plan.step,
                step.calls,
                count,
                step.seconds,
                step.calls * count * self._in.row_bytes,
                step.calls * count * self._out.row_bytes,
                step.native_calls,
            )
        )

    def _cut(self, plan: AttentionPlan, problem: Exception) -> None:
        """A hop did not get back to its dense node, which is told so where it still can be."""
        log.warning("%s: a hop to %s was lost: %s", self.config.name, plan.source, problem)
        self.reconnect(plan.source)
        self._fail(plan, problem)

    def _fail(self, plan: AttentionPlan, problem: Exception) -> None:
        """Tells the dense node, which ends the step once no other attention node works on it."""
        error = f"{self.config.name}: {describe(problem)}"
        failed = HopFailed(plan.lane, plan.step, error)
        self._failed[plan.source, plan.lane] = failed  # for a hop that is still to come
        self.tell(plan.source, failed)

    def _forget_source(self, name: str) -> None:
        """A dense node has died: the blocks that its hops would write to are others' soon."""
        self._sources.pop(name, None)
        for key in [key for key in self._steps if key[0] == name]:
            self._end(key)
        for table in (self._early, self._failed):
            for key in [key for key in table if key[0] == name]:
                del table[key]

    # -- the reference path: one layer by a plain call

    @torch.inference_mode()
    def decode_layer_batch(
        self,
        layer: int,
        q_rhd: torch.Tensor,
        k_rnd: torch.Tensor,
        v_rne: torch.Tensor,
        block_tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """Appends one token per row and attends: o ``[r, h, e]``.

        ``block_tables[i]`` are row i's blocks in this node's pool; ``lengths[i]`` its tokens with
        this one, whose position is ``lengths[i] - 1``. Tensors may be on any device; o is on
        this node's.
        """
        device = self.copies.torch
        q_rhd, k_rnd, v_rne = (x.to(device) for x in (q_rhd, k_rnd, v_rne))
        width = max(len(table) for table in block_tables)
        tables = np.zeros((len(block_tables), width), np.int32)
        for row, table in zip(tables, block_tables, strict=True):
            row[: len(table)] = table
        positions = np.asarray(lengths, np.int64) - 1
        slots = slots_of(tables, np.arange(len(tables)), positions, self.config.cache.block_size)
        self.backend.append(layer, k_rnd, v_rne, torch.from_numpy(slots).to(device))
        starts = torch.arange(len(tables) + 1, dtype=torch.int32, device=device)
        out, _ = self.backend.attend(
            layer,
            q_rhd,
            starts,
            torch.from_numpy(tables).to(device),
            torch.tensor(list(lengths), dtype=torch.int32, device=device),
        )
        return out
