"""The requests a node knows, and the tensors of a step made from a plan.

Tables are numpy arrays with one row per request, its seat; a plan's rows are gathered from them, so
Python runs once per row and step. Where the tables live on a device too, what changed in them is
kept for whoever writes it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ..kvcache.layout import blocks_for
from ..models.grammar import Grammars
from ..models.shaping import Shaper
from ..wire.messages import AttentionJoin, Join, Push, Sampling, StepPlan
from .one_token import FEW_ROWS, OneTokenRows, written

UNKNOWN = -1
"""Stands for a token that only the device knows yet."""
_LEAST_SEATS = 16
Change = tuple[int, int, Sequence[int]]
"""Of a table: seat, column, and the blocks from there on."""


def seats_for(rows: int) -> int:
    """Seats that tables of at most ``rows`` requests may come to have."""
    seats = _LEAST_SEATS
    while seats < rows:
        seats *= 2
    return seats


class BlockTables:
    """Block tables by request number: one growing 2-D array and the row each request has in it,
    its seat. ``tracks``: ``take_changes`` will be called."""

    def __init__(self, block_size: int, tracks: bool = False) -> None:
        self.block_size = block_size
        self._table = np.zeros((_LEAST_SEATS, 8), np.int32)
        self._sizes = np.zeros(_LEAST_SEATS, np.int32)
        self._rows: dict[int, int] = {}
        self._free = list(range(_LEAST_SEATS - 1, -1, -1))
        self._tracks = tracks
        self._changes: list[Change] = []
        self.version = 0
        """Raised whenever a table changes."""

    def __contains__(self, request: int) -> bool:
        return request in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, request: int, blocks: Sequence[int]) -> None:
        assert request not in self._rows, f"request {request} joined twice"
        if not self._free:
            self._grow_rows()
        row = self._rows[request] = self._free.pop()
        self._sizes[row] = 0
        self.extend(request, blocks)

    def extend(self, request: int, blocks: Sequence[int]) -> None:
        self.version += 1
        row = self._rows[request]
        size = int(self._sizes[row])
        end = size + len(blocks)
        if end > self._table.shape[1]:
            wider = max(end, 2 * self._table.shape[1])
            self._table = np.pad(self._table, ((0, 0), (0, wider - self._table.shape[1])))
        self._table[row, size:end] = blocks
        self._sizes[row] = end
        if self._tracks and blocks:
            self._changes.append((row, size, blocks))

    def take_changes(self) -> list[Change]:
        """What was written since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def seats(self, requests: Sequence[int]) -> npt.NDArray[np.int64]:
        rows = self._rows
        return np.array([rows[request] for request in requests], np.int64)

    def leave(self, request: int) -> None:
        """Unknown requests are fine: a leave may reach a node that never met the request."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free.append(row)

    def blocks(self, request: int) -> npt.NDArray[np.int32]:
        row = self._rows[request]
        return self._table[row, : self._sizes[row]]

    def whole(self, requests: Sequence[int]) -> npt.NDArray[np.int32]:
        """Tables of ``requests`` (a copy), as wide as the longest of them."""
        rows = [self._rows[request] for request in requests]
        return self._table[rows, : self._sizes[rows].max()]

    def gather(self, requests: Sequence[int], longest: int) -> npt.NDArray[np.int32]:
        """Tables of ``requests`` (a copy), as wide as ``longest`` tokens need."""
        rows = [self._rows[request] for request in requests]
        width = blocks_for(longest, self.block_size)
        assert width <= self._table.shape[1], "a row is longer than its block table"
        return self._table[rows, :width]

    def slots(
        self,
        seats_r: npt.NDArray[np.int64],
        row_t: npt.NDArray[np.int64],
        positions_t: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Pool slots of tokens, by their row among ``seats_r`` and position."""
        return slots_of(self._table, seats_r[row_t], positions_t, self.block_size)

    def _grow_rows(self) -> None:
        count = len(self._table)
        self._table = np.pad(self._table, ((0, count), (0, 0)))
        self._sizes = np.pad(self._sizes, (0, count))
        self._free = list(range(2 * count - 1, count - 1, -1))


@dataclass
class Row:
    """One request on a node that runs the dense half."""

    request: int
    incarnation: int
    tokens: list[int]
    """Known tokens from position ``start`` on; sampled ones are added."""
    start: int
    sampling: Sampling
    home: str
    push: Push | None
    pushed: int = 0
    """Leading blocks that the receiver has or has been sent."""
    shaper: Shaper | None = None
    score_until: int = 0
    """Tokens before this position have the log-probabilities of their followers reported."""
    special: bool = False
    """It asks for more than a token of its own distribution."""
    chunks: int = 0
    """Chunks that it has been sent."""
    pieces: dict[int, int] = field(default_factory=dict)
    """Pieces that it has been sent, per layer, where they go through a ring."""
    ahead: int = 0
    """Tokens sampled after those in ``tokens`` that only the device knows yet."""
    last_at: int = -1
    """Position of the token that the device keeps for it; -1: none that can be relied on."""

    def note(self, token: int, position: int) -> None:
        """``token`` was sampled for ``position``."""
        del self.tokens[position - self.start :]  # a replayed step replaces what it had sampled
        self.tokens.append(token)


@dataclass(frozen=True)
class Scored:
    """A stretch of a step's tokens whose followers' log-probabilities were asked for."""

    row: int
    """Index in the plan."""
    first: int
    """Index of its first token in the step."""
    followers: list[int]
    count: int
    """Likeliest tokens to report with each."""


@dataclass
class Batch:
    """A step's tensors. t tokens, r rows."""

    rows: list[Row]
    token_ids_t: torch.Tensor
    positions_t: torch.Tensor
    query_starts: torch.Tensor
    """int32 ``[r + 1]``."""
    most: int
    """Tokens of the row that has the most."""
    lengths_r: torch.Tensor
    """int32; tokens in the cache once the step's are appended."""
    block_tables_rb: torch.Tensor | None
    slots_t: torch.Tensor | None
    sample_tokens: torch.Tensor
    """int64: index, among the step's tokens, of each token that is sampled after."""
    sampled: list[Row]
    sample_positions: list[int]
    """Position of each token that will be sampled."""
    all_sample: bool
    """Every token of the step is sampled after: nothing to select."""
    scored: list[Scored]
    special: bool
    """Some row is special; a step without one skips all that such rows need."""
    seats_r: npt.NDArray[np.int64] | None = None
    """Of the rows, in the node's tables."""


def slots_of(
    tables_rb: npt.NDArray[np.int32],
    row_t: npt.NDArray[np.int64],
    positions_t: npt.NDArray[np.int64],
    block_size: int,
) -> npt.NDArray[np.int64]:
    """Pool slots of tokens, by their row and position."""
    blocks = tables_rb[row_t, positions_t // block_size].astype(np.int64)
    return blocks * block_size + positions_t % block_size


class DecodeSteps:
    """Steps of one lane in which each of a few rows has one token to decode and nothing special
    about it. Their tensors are kept and written anew, as those of ``OneTokenRows`` are."""

    def __init__(self, tables: BlockTables | None) -> None:
        self._at = OneTokenRows(tables)

    def batch(self, plan: StepPlan, rows: list[Row], tokens: list[int]) -> Batch:
        """Overwrites the tensors of the one before."""
        at = self._at
        if at.write(plan.rows, plan.starts):
            self._token_ids_t, self._token_ids = written(len(rows), torch.int64)
            self._sample_tokens = torch.arange(len(rows))
        for i, token in enumerate(tokens):
            self._token_ids[i] = token
        return Batch(
            rows=rows,
            token_ids_t=self._token_ids_t,
            positions_t=at.positions_t,
            query_starts=at.query_starts,
            most=1,
            lengths_r=at.lengths_r,
            block_tables_rb=at.block_tables_rb,
            slots_t=at.slots_t,
            sample_tokens=self._sample_tokens,
            sampled=rows,
            sample_positions=[position + 1 for position in plan.starts],
            all_sample=True,
            scored=[],
            special=False,
        )


def _plain_decode(plan: StepPlan, rows: Sequence[Row]) -> bool:
    """Whether a step is one of ``DecodeSteps``."""
    few = 0 < len(rows) <= FEW_ROWS and len(rows) == sum(plan.counts) and min(plan.counts) == 1
    return few and all(plan.samples) and not any(row.special for row in rows)


class RowTable:
    """The requests of one dense, prefill or colocated node."""

    def __init__(
        self,
        block_size: int,
        local_attention: bool,
        grammars: Grammars | None = None,
        on_device: bool = False,
    ) -> None:
        """``on_device``: what steps need is kept or copied on a device; block tables, where there
        are any, by seat, and batches bring none."""
        self._rows: dict[int, Row] = {}
        self._tables = BlockTables(block_size, on_device) if local_attention else None
        self._on_device = on_device
        self._decode: dict[int, DecodeSteps] = {}
        """By lane: the steps of several may be under way."""
        self._block_size = block_size
        self._grammars = grammars

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins and new blocks, in this order."""
        for request in plan.leaves:
            self._rows.pop(request, None)
            if self._tables is not None:
                self._tables.leave(request)
        for join in plan.joins:
            self._join(join)
        if self._tables is not None:
            for request, blocks in plan.blocks:
                self._tables.extend(request, blocks)

    def _join(self, join: Join) -> None:
        # Whole blocks of this pool; the receiver drops what it holds of the first.
        held = join.push.start // self._block_size if join.push else 0
        self._rows[join.request] = Row(
            join.request,
            join.incarnation,
            join.tokens,
            join.start,
            join.sampling,
            join.home,
            join.push,
            held,
            self._shaper(join),
        )
        self._mark_special(join)
        if self._tables is not None:
            self._tables.join(join.request, join.blocks)

    def _mark_special(self, join: Join) -> None:
        sampling, row = join.sampling, self._rows[join.request]
        if sampling.prompt_logprobs is not None:
            row.score_until = join.start + len(join.tokens) - 1
        row.special = bool(row.score_until or row.shaper or sampling.logprobs is not None)

    def _shaper(self, join: Join) -> Shaper | None:
        shaping = join.sampling.shaping
        if shaping is None:
            return None
        grammar = None
        if shaping.grammar is not None:
            assert self._grammars is not None, "this node knows no grammars"
            grammar = self._grammars.state(shaping.grammar)
        return Shaper(shaping, join.before, join.start, grammar)

    def blocks(self, request: int) -> npt.NDArray[np.int32]:
        assert self._tables is not None
        return self._tables.blocks(request)

    def batch(self, plan: StepPlan) -> Batch:
        rows = [self._rows[request] for request in plan.rows]
        tokens = self._tokens(plan, rows)
        if not self._on_device and _plain_decode(plan, rows):
            steps = self._decode.get(plan.lane)
            if steps is None:
                steps = self._decode[plan.lane] = DecodeSteps(self._tables)
            return steps.batch(plan, rows, tokens)
        starts = np.asarray(plan.starts, np.int64)
        counts = np.asarray(plan.counts, np.int64)
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        row_t = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(tokens)) - query_starts[row_t] + starts[row_t]
        lengths = (starts + counts).astype(np.int32)
        tables = slots = seats = None
        if self._tables is not None:
            seats = self._tables.seats(plan.rows)
            slots = torch.from_numpy(self._tables.slots(seats, row_t, positions))
            if not self._on_device:
                tables = torch.from_numpy(self._tables.gather(plan.rows, int(lengths.max())))
        samples = np.flatnonzero(plan.samples)
        special = any(row.special for row in rows)
        return Batch(
            rows=rows,
            token_ids_t=torch.tensor(tokens, dtype=torch.int64),
            positions_t=torch.from_numpy(positions),
            query_starts=torch.from_numpy(query_starts),
            most=int(counts.max(initial=0)),
            lengths_r=torch.from_numpy(lengths),
            block_tables_rb=tables,
            slots_t=slots,
            sample_tokens=torch.from_numpy(query_starts[1:][samples].astype(np.int64) - 1),
            sampled=[rows[i] for i in samples],
            sample_positions=[int(lengths[i]) for i in samples],
            all_sample=len(samples) == len(tokens),
            scored=_scored(rows, plan, query_starts) if special else [],
            special=special,
            seats_r=seats,
        )

    def _tokens(self, plan: StepPlan, rows: Sequence[Row]) -> list[int]:
        """Of the step; ``UNKNOWN`` for those that only the device knows."""
        tokens: list[int] = []
        for row, start, count in zip(rows, plan.starts, plan.counts, strict=True):
            at = start - row.start
            unknown = at + count - len(row.tokens)
            known = at >= 0 and unknown <= row.ahead
            assert known, f"request {row.request}: tokens of position {start} are not known"
            tokens.extend(row.tokens[at : at + count])
            if unknown > 0:
                tokens.extend([UNKNOWN] * unknown)
        return tokens

    def void(self, plan: StepPlan) -> None:
        """The step will not run. Rows of it may be in the next one already: they end, and what they
        say there counts for nothing, but rows beside them go on."""
        for request, start, count, samples in zip(
            plan.rows, plan.starts, plan.counts, plan.samples, strict=True
        ):
            row = self._rows.get(request)
            if row is not None and samples:
                row.ahead += 1
                row.last_at = start + count

    def take_changes(self) -> list[Change]:
        """What block tables came to hold since the last call, for a table on a device."""
        assert self._tables is not None
        return self._tables.take_changes()


def _scored(
    rows: Sequence[Row], plan: StepPlan, query_starts: npt.NDArray[np.int32]
) -> list[Scored]:
    found = []
    for i, row in enumerate(rows):
        start = plan.starts[i]
        end = min(start + plan.counts[i], row.score_until)
        count = row.sampling.prompt_logprobs
        if count is not None and end > start:
            at = start + 1 - row.start
            followers = row.tokens[at : at + end - start]
            found.append(Scored(i, int(query_starts[i]), followers, count))
    return found


def apply_attention_rows(
    tables: BlockTables,
    leaves: Iterable[int],
    joins: Iterable[AttentionJoin],
    blocks: Iterable[tuple[int, list[int]]],
) -> None:
    """An attention plan's differences, in the order that plans promise."""
    for request in leaves:
        tables.leave(request)
    for join in joins:
        tables.join(join.request, join.blocks)
    for request, added in blocks:
        tables.extend(request, added)
