"""Forwards on a device, launched without waiting for what they say.

The token that a row sampled last stays on the device, so a step may be launched before the host
knows what the one before it sampled. Steps whose rows all advance by one token are captured graphs,
one for each of some numbers of rows; rows that fill up a graph have length 0, no slot, and a seat
of their own. All others run layer by layer. One copy takes a step's inputs to the device.

It knows no plans and no reports. Steps are launched, and taken, in order.

Shapes: t tokens, r rows, s rows that sample, c vocabulary.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ..attention.base import AttentionBackend
from ..models.base import DenseHalf
from ..models.sampling import NO_TOKEN
from .device import Device, Outputs
from .device_inputs import (
    DRAW_FIELDS,
    Arrays,
    Tensors,
    decode_packing,
    fill_draws,
    fill_mixed,
    mixed_packing,
)
from .device_layers import StepTensors, run_layers
from .device_seats import DeviceSeats, DeviceShape
from .device_shaping import DeviceShaping
from .forward import Sampled, last_stage, prompt_logprobs, sample_rows
from .launched import Launched, LaunchedForHost, Scores
from .rows import UNKNOWN, Batch, Change, Row

log = logging.getLogger(__name__)
_CHANGES_PER_ROW = 2
"""Blocks that a graph's rows may get without a copy of their own; and as many as for this many
rows at least."""
_LEAST_CHANGES = 64


class Sampler(Protocol):
    """Writes a token for each row of ``logits_tc`` to ``out_t`` int64: ``NO_TOKEN`` where there is
    none. ``draws``: the fields of ``device_inputs.DRAW_FIELDS``. Never waits for the device."""

    def __call__(self, logits_tc: torch.Tensor, draws: Tensors, out_t: torch.Tensor) -> None: ...


def take_likeliest(logits_tc: torch.Tensor, draws: Tensors, out_t: torch.Tensor) -> None:
    """A ``Sampler`` of greedy rows alone."""
    largest = logits_tc.max(-1)
    out_t.copy_(largest.indices.masked_fill(~largest.values.isfinite(), NO_TOKEN))


def buckets_up_to(max_rows: int) -> list[int]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, 8, then every 8, and ``max_rows``."""
    buckets = [1, 2, 4, *range(8, max_rows, 8), max_rows]
    return sorted({bucket for bucket in buckets if bucket <= max_rows})


def _needs_host(row: Row) -> bool:
    return row.shaper is not None and row.shaper.shaping.needs_host


def _shapes(batch: Batch) -> bool:
    return batch.special and any(row.shaper is not None for row in batch.sampled)


class _Graph:
    """A decode step of up to ``rows`` rows, and where its inputs lie."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.room = max(_LEAST_CHANGES, _CHANGES_PER_ROW * rows)
        self.packing = decode_packing(rows, self.room)
        self.inputs: Tensors = {}
        self.run: Callable[[], Outputs] | None = None


class DeviceForward:
    """Of a half and a backend whose tensors are on ``device``. ``sampler``: None where only greedy
    rows can be chosen for there; the host then chooses for the others."""

    def __init__(
        self,
        half: DenseHalf,
        backend: AttentionBackend,
        device: Device,
        shape: DeviceShape,
        sampler: Sampler | None = None,
    ) -> None:
        self._half = half
        self._backend = backend
        self._device = device
        self._sampler = sampler
        self._graphs = [_Graph(rows) for rows in buckets_up_to(shape.max_rows)]
        with torch.inference_mode(), device.use():
            self._seats = DeviceSeats(device, shape)
            self._shaping = DeviceShaping(device, self._seats.scratch + 1)
            self._inputs = device.zeros(self._graphs[-1].packing.nbytes, torch.uint8)
            self._starts = torch.arange(
                shape.max_rows + 1, dtype=torch.int32, device=self._inputs.device
            )

    @property
    def num_layers(self) -> int:
        return self._half.num_layers

    # -- graphs

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], None] = log.info) -> None:
        """Makes all graphs, the largest first, whose memory the others share."""
        began = time.perf_counter()
        with self._device.use():
            for graph in reversed(self._graphs):
                self._capture(graph)
            self._device.event().wait()
        took = time.perf_counter() - began
        progress(f"captured {len(self._graphs)} graphs of decode steps in {took:.1f} s")

    def _capture(self, graph: _Graph) -> None:
        host = self._device.pinned(graph.packing.nbytes)
        self._fill(None, graph.packing.arrays(host))
        self._inputs[: graph.packing.nbytes].copy_(host, non_blocking=True)
        graph.inputs = graph.packing.tensors(self._inputs)

        def work() -> Outputs:
            return self._decode(graph)

        work()  # loads kernels and makes workspaces, which cannot be captured
        graph.run = self._device.capture(work)

    def _decode(self, graph: _Graph) -> Outputs:
        """Logits and tokens of a step whose inputs are there."""
        of, half = graph.inputs, self._half
        rows = self._starts[: graph.rows + 1], self._seats.tables(of["seats"]), of["lengths"]
        token_ids = self._seats.tokens(of["seats"])
        step = StepTensors(token_ids, of["positions"], of["slots"], rows)
        attn_out, carry = run_layers(half, self._backend, step, whole=True)
        _, _, _, carry = half.stage(half.num_layers, attn_out, carry, None, of["positions"])
        logits = half.raw_logits(carry)
        return logits, self._choose(logits, of, of["seats"])

    def _choose(self, logits: torch.Tensor, draws: Tensors, seats: torch.Tensor) -> torch.Tensor:
        """Tokens of the rows, which their seats keep."""
        out = torch.empty_like(seats)
        (self._sampler or take_likeliest)(logits, draws, out)
        # A row without a token ends; what runs after it must only not point nowhere.
        self._seats.keep(seats, out.clamp(min=0))
        return out

    # -- steps

    @torch.inference_mode()
    def launch(self, batch: Batch, changes: Sequence[Change]) -> Launched:
        """``changes``: of block tables, since the last call. Raises ``ValueError`` for a block or
        slot of an earlier step that is none of the pool's."""
        self._seats.note(changes)
        for_host, graph, scores = self.needs_host(batch), self._graph_for(batch), Scores()
        rows = batch.query_starts, batch.lengths_r
        with self._device.use():
            if graph is not None:
                self._backend.plan(rows, None)
                logits, tokens = self._replay(graph, batch)
                there, seats = graph.inputs, graph.inputs["seats"]
            else:
                apart = for_host or _shapes(batch)
                logits, tokens, scores, there = self._run(batch, apart)
                seats = there["sample_seats"]
            if for_host:
                event = self._device.event()
                return LaunchedForHost(batch, logits, event, self._choose_here, scores)
            scored = None
            if batch.special and logits is not None:
                self._shaping.tell(batch, logits.shape[1])
                if _shapes(batch):
                    tokens = self._choose_shaped(batch, logits, there, seats)
                scored = self._shaping.score(logits, tokens)
            host = self._device.pinned(tokens.nbytes).view(torch.int64)
            host.copy_(tokens, non_blocking=True)
            for row, position in zip(batch.sampled, batch.sample_positions, strict=True):
                row.last_at = position
            return Launched(batch, host, self._device.event(), scored)

    def _choose_shaped(
        self, batch: Batch, logits: torch.Tensor, draws: Tensors, seats: torch.Tensor
    ) -> torch.Tensor:
        """Tokens of a step with rows that shape their logits; what a graph chose is replaced.
        ``draws`` and ``seats`` may be of more rows."""
        rows = len(logits)
        shaped = self._shaping.shape(batch, logits)
        draws = {name: draws[name][:rows] for name in DRAW_FIELDS}
        tokens = self._choose(shaped, draws, seats[:rows])
        self._shaping.say(tokens.clamp(min=0))
        return tokens

    def needs_host(self, batch: Batch) -> bool:
        """The host chooses the step's tokens."""
        if batch.special and (batch.scored or any(_needs_host(row) for row in batch.sampled)):
            return True
        drawn = any(row.sampling.temperature > 0 for row in batch.sampled)
        return self._sampler is None and drawn

    def _graph_for(self, batch: Batch) -> _Graph | None:
        rows = len(batch.rows)
        if not batch.all_sample or batch.token_ids_t.shape[0] != rows or batch.scored:
            return None
        graph = next((graph for graph in self._graphs if graph.rows >= rows), None)
        return None if graph is None or graph.run is None else graph

    def _replay(self, graph: _Graph, batch: Batch) -> Outputs:
        """Logits and tokens of the rows."""
        assert graph.run is not None
        packing, rows = graph.packing, len(batch.rows)
        host = self._device.pinned(packing.nbytes)
        arrays = packing.arrays(host)
        self._fill(batch, arrays)
        changed = self._seats.changes()
        count = len(changed[0])
        apart = count > graph.room
        if not apart:
            arrays["change_at"][:count], arrays["change_to"][:count] = changed
        self._inputs[: packing.nbytes].copy_(host, non_blocking=True)
        if apart:
            self._seats.write_apart(changed)
        else:
            self._seats.write(graph.inputs, count)
        self._seats.bring(batch)
        logits, tokens = graph.run()
        return logits[:rows], tokens[:rows]

    def _fill(self, batch: Batch | None, arrays: Arrays) -> None:
        """``batch``: None for one of no rows."""
        rows = 0 if batch is None else len(batch.rows)
        arrays["positions"][rows:] = 0
        arrays["slots"][rows:] = -1
        arrays["seats"][rows:] = self._seats.scratch
        arrays["lengths"][rows:] = 0
        if batch is None:
            fill_draws(arrays, [], [])
            return
        assert batch.slots_t is not None
        arrays["positions"][:rows] = batch.positions_t.numpy()
        arrays["slots"][:rows] = batch.slots_t.numpy()
        arrays["seats"][:rows] = batch.seats_r
        arrays["lengths"][:rows] = batch.lengths_r.numpy()
        fill_draws(arrays, [row.sampling for row in batch.rows], batch.sample_positions)

    # -- steps that no graph serves

    def _run(
        self, batch: Batch, apart: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor, Scores, Tensors]:
        """Logits, tokens, scores of prompts and the step's inputs; ``apart``: tokens, if any, are
        chosen by the caller."""
        placed, there = self._place(batch)
        assert placed.slots_t is not None
        assert placed.block_tables_rb is not None
        rows = placed.query_starts, placed.block_tables_rb, placed.lengths_r
        self._backend.plan((batch.query_starts, batch.lengths_r), placed.lengths_r)
        step = StepTensors(placed.token_ids_t, placed.positions_t, placed.slots_t, rows)
        attn_out, carry = run_layers(self._half, self._backend, step, whole=False)
        scores = prompt_logprobs(self._half, placed, attn_out, carry) if batch.scored else {}
        seats = there["sample_seats"]
        if not batch.sampled:
            return None, seats, scores, there
        logits = last_stage(self._half, placed, attn_out, carry)
        tokens = seats if apart else self._choose(logits, there, seats)
        return logits, tokens, scores, there

    def _place(self, batch: Batch) -> tuple[Batch, Tensors]:
        """The batch with its tensors on the device, and all fields of the step there."""
        changed = self._seats.changes()
        unknown = np.flatnonzero(batch.token_ids_t.numpy() == UNKNOWN)
        packing = mixed_packing(
            len(batch.token_ids_t),
            len(batch.rows),
            len(batch.sampled),
            len(unknown),
            len(changed[0]),
        )
        host = self._device.pinned(packing.nbytes)
        arrays = packing.arrays(host)
        arrays["change_at"][:], arrays["change_to"][:] = changed
        fill_mixed(arrays, batch, unknown)
        there = packing.tensors(self._seats.upload(host))
        self._seats.write(there, len(changed[0]))
        if len(unknown):
            known = self._seats.tokens(there["unknown_seats"])
            there["tokens"].index_copy_(0, there["unknown_at"], known)
        placed = dataclasses.replace(
            batch,
            token_ids_t=there["tokens"],
            positions_t=there["positions"],
            slots_t=there["slots"],
            query_starts=there["starts"],
            lengths_r=there["lengths"],
            block_tables_rb=self._seats.tables(there["seats"]),
            sample_tokens=there["sample_at"],
        )
        return placed, there

    @torch.inference_mode()
    def _choose_here(self, batch: Batch, logits: torch.Tensor) -> Sampled:
        """The host's way of choosing. Seats get the tokens with the steps that go on from them."""
        with self._device.use():
            sampled = sample_rows(batch, logits.float())
        for row in batch.sampled:
            row.last_at = -1
        return sampled
