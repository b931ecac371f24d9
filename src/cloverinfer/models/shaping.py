"""What changes a row's logits before a token is chosen: biases, penalties, what may not be said.

A shaper is a function of a request's parameters and tokens alone. It keeps counts so as not to
read all tokens at every step, and makes them anew where tokens were taken back; so it may be built
on any node, at any time, from what a join carries.

Shapes: t rows, c vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..wire.messages import Shaping
from .grammar import GrammarState

_Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class Shaper:
    """One request's."""

    def __init__(
        self,
        shaping: Shaping,
        before: Sequence[int],
        start: int,
        grammar: GrammarState | None = None,
    ) -> None:
        """``before``: the request's tokens up to position ``start``, where it needs them;
        ``grammar``: the state of ``shaping.grammar`` before the first generated token."""
        self.shaping = shaping
        self._grammar = grammar
        self._before = before
        self._start = start
        self._reset()
        bias = shaping.logit_bias
        self._bias = np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)

    def _reset(self) -> None:
        self._known = 0
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def catch_up(self, tokens: Sequence[int], position: int) -> None:
        """Reads up to ``position``; ``tokens`` are the request's from the start position on."""
        if self._grammar is not None:
            self._advance(self._grammar, tokens, position)
        if not self.shaping.penalises:
            return
        if position < self._known:
            self._reset()
        if self._known < self._start:
            self._read(self._before)
        self._read(tokens[self._known - self._start : position - self._start])
        assert self._known == position, "a shaper has not been given all tokens"

    def _advance(self, grammar: GrammarState, tokens: Sequence[int], position: int) -> None:
        generated = position - self.shaping.num_prompt
        if generated < grammar.known:
            grammar.reset()
        grammar.read(self.tail(tokens, position, generated - grammar.known))

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.pad(self._ids, (0, slot))
                self._counts = np.pad(self._counts, (0, slot))
            self._ids[slot] = token
            self._counts[slot] += self._known >= self.shaping.num_prompt
            self._known += 1

    def seen(self) -> _Pairs:
        """Each token of prompt and output once, and how often it was generated."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]

    def bias(self) -> _Pairs:
        return self._bias

    @property
    def error(self) -> str:
        """Why no token can be chosen; empty where one can."""
        return "" if self._grammar is None else self._grammar.error

    def allowed(self, size: int, banned: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """bool ``[size]``: what its grammar allows and is not banned, or just what it allows where
        nothing would be left; None without a grammar."""
        if self._grammar is None:
            return None
        allowed = self._grammar.allowed(size)
        kept = allowed.copy()
        kept[[token for token in banned if token < size]] = False
        return kept if kept.any() else allowed

    def banned(self, tokens: Sequence[int], position: int) -> list[int]:
        """Tokens that may not take ``position``."""
        shaping = self.shaping
        generated = position - shaping.num_prompt
        found = list(shaping.stops) if generated < shaping.min_tokens else []
        if shaping.bad_words:
            longest = max(map(len, shaping.bad_words)) - 1
            tail = self.tail(tokens, position, min(longest, generated))
            found += [word[-1] for word in shaping.bad_words if _ends_with(tail, word[:-1])]
        return found

    def tail(self, tokens: Sequence[int], position: int, size: int) -> list[int]:
        """The last ``size`` tokens before ``position``."""
        first = position - size - self._start
        if first >= 0:
            return list(tokens[first : first + size])
        return [*self._before[first:], *tokens[: position - self._start]]


def shape(
    logits_tc: torch.Tensor,
    shapers: Sequence[Shaper],
    tokens: Sequence[Sequence[int]],
    positions: Sequence[int],
) -> None:
    """Changes ``logits_tc`` (float32 ``[t, c]``) in place, row by row after its shaper.

    ``tokens``: each request's from its shaper's start on; ``positions``: what each new one gets.
    """
    for shaper, known, position in zip(shapers, tokens, positions, strict=True):
        shaper.catch_up(known, position)
    banned = [s.banned(k, p) for s, k, p in zip(shapers, tokens, positions, strict=True)]
    masks = [s.allowed(logits_tc.shape[1], some) for s, some in zip(shapers, banned, strict=True)]
    _ban(logits_tc, [[] if m is not None else b for m, b in zip(masks, banned, strict=True)])
    _keep(logits_tc, masks)
    _add_bias(logits_tc, shapers)
    _penalise(logits_tc, shapers)


def _ban(logits_tc: torch.Tensor, banned: Sequence[Sequence[int]]) -> None:
    size = logits_tc.shape[1]
    pairs = [(row, token) for row, some in enumerate(banned) for token in some if token < size]
    if pairs:
        rows, columns = torch.tensor(pairs, device=logits_tc.device).unbind(1)
        logits_tc[rows, columns] = -torch.inf


def _keep(logits_tc: torch.Tensor, masks: Sequence[npt.NDArray[np.bool_] | None]) -> None:
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if rows:
        keep = torch.from_numpy(np.stack([mask for mask in masks if mask is not None]))
        some = logits_tc[rows].masked_fill_(~keep.to(logits_tc.device), -torch.inf)
        logits_tc[rows] = some


def _add_bias(logits_tc: torch.Tensor, shapers: Sequence[Shaper]) -> None:
    rows = [i for i, shaper in enumerate(shapers) if shaper.shaping.logit_bias]
    if rows:
        index, by = _flat(rows, [shapers[i].bias() for i in rows], logits_tc.device)
        logits_tc[index] = logits_tc[index] + by


def _penalise(logits_tc: torch.Tensor, shapers: Sequence[Shaper]) -> None:
    rows = [i for i, shaper in enumerate(shapers) if shaper.shaping.penalises]
    if not rows:
        return
    seen = [shapers[i].seen() for i in rows]
    index, counts = _flat(rows, seen, logits_tc.device)
    sizes = torch.tensor([len(ids) for ids, _ in seen])
    per_row = [
        (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        for s in (shapers[i].shaping for i in rows)
    ]
    factors = torch.tensor(per_row).repeat_interleave(sizes, 0).to(logits_tc.device)
    repetition, frequency, presence = factors.unbind(1)
    numbers = torch.finfo(torch.float32)
    # Neither 0, which a tiny penalty is in float32, nor an overflow may make what is no number.
    repetition = repetition.clamp(min=numbers.tiny)
    some = logits_tc[index]
    some = torch.where(some > 0, (some / repetition).clamp(max=numbers.max), some * repetition)
    logits_tc[index] = some - frequency * counts - presence * (counts > 0)


def _flat(
    rows: Sequence[int], pairs: Sequence[_Pairs], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Indices of all rows' tokens, and the number that goes with each."""
    sizes = [len(ids) for ids, _ in pairs]
    row = torch.from_numpy(np.repeat(np.asarray(rows, np.int64), sizes))
    column = torch.from_numpy(np.concatenate([ids for ids, _ in pairs]))
    values = torch.from_numpy(np.concatenate([numbers for _, numbers in pairs]))
    return (row.to(device), column.to(device)), values.to(device)


def _ends_with(tail: Sequence[int], tokens: Sequence[int]) -> bool:
    size = len(tokens)
    return size <= len(tail) and list(tail[len(tail) - size :]) == list(tokens)
