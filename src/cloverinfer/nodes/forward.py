"""One forward over a local attention backend: the dense half and attention in one node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..attention.base import AttentionBackend
from ..core.logprobs import TokenLogprobs
from ..core.structured import PARAM as STRUCTURE
from ..models.base import Carry, DenseHalf, NativeStep
from ..models.logprobs import token_logprobs
from ..models.sampling import NO_TOKEN, sample
from ..models.shaping import shape
from ..wire.messages import AttentionDone, StepDone, StepPlan, StepStats
from .batch_copy import BatchCopier
from .gate import Gate, OpenGate
from .layer_loop import OwnLoop
from .rows import Batch

SCORE_TOKENS = 256
"""Prompt tokens whose logits are in memory at a time, where a request asks about its prompt."""
NONE_LEFT = "no token can be chosen: the model's logits are not finite, or all tokens are forbidden"


@dataclass
class Sampled:
    """What a step's rows said."""

    tokens: list[int] = field(default_factory=list)
    """One for each row that samples."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Of those that asked for them, by index in ``tokens``."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By index in the plan's rows."""
    errors: dict[int, str] = field(default_factory=dict)
    """Why no token could be chosen, by index in ``tokens``."""
    blamed: dict[int, str] = field(default_factory=dict)
    """The request's parameter that is to blame for an error, by the same index."""


def step_done(
    name: str,
    plan: StepPlan,
    sampled: Sampled,
    stats: StepStats,
    attended: Sequence[AttentionDone] = (),
) -> StepDone:
    """The report of the step on the node called ``name``; ``attended`` as in ``StepDone``."""
    return StepDone(
        name,
        plan.lane,
        plan.step,
        sampled.tokens,
        stats,
        sampled.logprobs,
        sampled.prompt_logprobs,
        sampled.errors,
        sampled.blamed,
        list(attended),
    )


def last_stage(
    half: DenseHalf, batch: Batch, attn_out: torch.Tensor, carry: Carry | NativeStep
) -> torch.Tensor:
    """Stage L and logits, of the tokens that are sampled after only: ``[s, c]`` float32. The step
    that follows overwrites them."""
    if isinstance(carry, NativeStep):
        if batch.all_sample:
            return carry.logits(attn_out)
        carry = carry.carry(half.num_layers)
    index = None if batch.all_sample else batch.sample_tokens
    return _logits_of(half, index, batch.positions_t, attn_out, carry)


def _logits_of(
    half: DenseHalf,
    index: torch.Tensor | slice | None,
    positions: torch.Tensor,
    attn_out: torch.Tensor,
    carry: Carry,
) -> torch.Tensor:
    """Stage L and logits of the step's tokens in ``index``; None: of all."""
    if index is not None:
        attn_out, positions = attn_out[index], positions[index]
        carry = tuple(tensor[index] for tensor in carry)
    _, _, _, carry = half.stage(half.num_layers, attn_out, carry, None, positions)
    return half.logits(carry)


def prompt_logprobs(
    half: DenseHalf, batch: Batch, attn_out: torch.Tensor, carry: Carry | NativeStep
) -> dict[int, list[TokenLogprobs]]:
    """Those of prompt tokens that the step's rows asked for, by index in the plan's rows."""
    found: dict[int, list[TokenLogprobs]] = {}
    if not batch.scored:
        return found
    if isinstance(carry, NativeStep):
        carry = carry.carry(half.num_layers)
    for scored in batch.scored:
        scores = found[scored.row] = []
        for at in range(0, len(scored.followers), SCORE_TOKENS):
            followers = scored.followers[at : at + SCORE_TOKENS]
            first = scored.first + at
            index = slice(first, first + len(followers))
            logits = _logits_of(half, index, batch.positions_t, attn_out, carry)
            scores += token_logprobs(logits, followers, [scored.count] * len(followers))
    return found


def sample_rows(batch: Batch, logits: torch.Tensor) -> Sampled:
    """Chooses a token for each sampling row and notes it as the row's next. A row for which there
    is none has an error, and any token: the others of its step must not suffer from it."""
    params = [row.sampling for row in batch.sampled]
    chosen_from = _shaped(batch, logits) if batch.special else logits
    tokens = sample(chosen_from, params, batch.sample_positions)
    errors = {i: NONE_LEFT for i, token in enumerate(tokens) if token == NO_TOKEN}
    for i in errors:
        tokens[i] = 0
    for row, token, position in zip(batch.sampled, tokens, batch.sample_positions, strict=True):
        row.note(token, position)
    if not batch.special:
        return Sampled(tokens, errors=errors)
    told = {i: row.shaper.error for i, row in enumerate(batch.sampled) if row.shaper is not None}
    grammars = {i: error for i, error in told.items() if error}
    return Sampled(
        tokens,
        _logprobs(batch, logits, tokens),
        errors=errors | grammars,
        blamed=dict.fromkeys(grammars, STRUCTURE),
    )


def _shaped(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """The logits to choose from; those of rows that shape nothing, and ``logits``, stay."""
    rows = [(i, row, row.shaper) for i, row in enumerate(batch.sampled) if row.shaper is not None]
    if not rows:
        return logits
    index = [i for i, *_ in rows]
    some = logits[index]
    shape(
        some,
        [shaper for *_, shaper in rows],
        [row.tokens for _, row, _ in rows],
        [batch.sample_positions[i] for i in index],
    )
    if len(index) == len(batch.sampled):
        return some
    chosen_from = logits.clone()
    chosen_from[index] = some
    return chosen_from


def _logprobs(batch: Batch, logits: torch.Tensor, tokens: list[int]) -> dict[int, TokenLogprobs]:
    asked = {
        i: row.sampling.logprobs
        for i, row in enumerate(batch.sampled)
        if row.sampling.logprobs is not None
    }
    if not asked:
        return {}
    rows = list(asked)
    scored = token_logprobs(logits[rows], [tokens[i] for i in rows], list(asked.values()))
    return dict(zip(rows, scored, strict=True))


class LocalForward:
    """Runs whole steps; ``on_layer(layer)`` is called as each layer's KV is complete."""

    def __init__(
        self,
        half: DenseHalf,
        backend: AttentionBackend,
        gate: Gate | OpenGate,
        layer_loop: str = "auto",
    ) -> None:
        self._half = half
        self._backend = backend
        self._gate = gate
        self._loop = OwnLoop.of(half, backend, gate) if layer_loop == "auto" else None
        self._copier = BatchCopier(half.device) if half.device.type == "cuda" else None

    def run(
        self, batch: Batch, stats: StepStats, on_layer: Callable[[int], None] | None = None
    ) -> Sampled:
        """What was sampled; adds the time of each part to ``stats`` (on a GPU the time to launch
        it, but for sampling, which waits for all of the step)."""
        if self._copier is not None:
            on_host = batch.query_starts, batch.lengths_r
            batch = self._copier.move(batch)
            self._backend.plan(on_host, batch.lengths_r)
        carry: Carry | NativeStep
        if self._loop is not None and on_layer is None and self._loop.serves(batch):
            attn_out, carry = self._loop.run(batch, stats)
        else:
            attn_out, carry = self._run_layers(batch, stats, on_layer)
        if not batch.sampled and not batch.scored:
            return Sampled()
        return self._finish(batch, attn_out, carry, stats)

    def _run_layers(
        self, batch: Batch, stats: StepStats, on_layer: Callable[[int], None] | None
    ) -> tuple[torch.Tensor, Carry]:
        half = self._half
        carry: Carry | None = None
        attn_out: torch.Tensor | None = None
        for layer in range(half.num_layers):
            with self._gate:
                t0 = time.perf_counter()
                q, k, v, carry = half.stage(
                    layer, attn_out, carry, batch.token_ids_t, batch.positions_t
                )
                t1 = time.perf_counter()
                attn_out = self._attend(layer, batch, (q, k, v))
                t2 = time.perf_counter()
            stats.dense += t1 - t0
            stats.attention += t2 - t1
            stats.attention_calls += 1
            if on_layer is not None:
                on_layer(layer)
        assert attn_out is not None
        assert carry is not None
        return attn_out, carry

    def _attend(
        self, layer: int, batch: Batch, qkv: tuple[torch.Tensor | None, ...]
    ) -> torch.Tensor:
        q, k, v = qkv
        assert q is not None
        assert k is not None
        assert v is not None
        assert batch.slots_t is not None
        assert batch.block_tables_rb is not None
        self._backend.append(layer, k, v, batch.slots_t)
        out, _ = self._backend.attend(
            layer, q, batch.query_starts, batch.block_tables_rb, batch.lengths_r
        )
        return out

    def _finish(
        self,
        batch: Batch,
        attn_out: torch.Tensor,
        carry: Carry | NativeStep,
        stats: StepStats,
    ) -> Sampled:
        with self._gate:
            t0 = time.perf_counter()
            scores = prompt_logprobs(self._half, batch, attn_out, carry)
            logits = last_stage(self._half, batch, attn_out, carry) if batch.sampled else None
            t1 = time.perf_counter()
            sampled = sample_rows(batch, logits) if logits is not None else Sampled()
            sampled.prompt_logprobs = scores
            t2 = time.perf_counter()
        stats.dense += t1 - t0
        stats.sample += t2 - t1
        return sampled
