"""Steps on their way through a device, and what is made of them once they are through.

A step's rows learn here what was sampled for them: that tokens are under way when it is launched,
and which they are when it is taken. Steps are taken in the order in which they were launched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.logprobs import TokenLogprobs
from ..models.sampling import NO_TOKEN
from .device import Event
from .device_shaping import ScoresUnderWay
from .forward import NONE_LEFT, Sampled
from .rows import Batch

Choose = Callable[[Batch, torch.Tensor], Sampled]
"""Chooses the tokens of a batch's rows that sample from their logits, and notes them."""
Scores = dict[int, list[TokenLogprobs]]
"""Of prompt tokens, by index in the plan's rows."""


class Launched:
    """A step on its way."""

    for_host = False
    """The host chooses its tokens when it is taken: nothing may be launched after it before."""

    def __init__(
        self,
        batch: Batch,
        tokens: torch.Tensor,
        event: Event,
        scored: ScoresUnderWay | None = None,
    ) -> None:
        """``tokens``: on the host, of the rows that sample, once ``event`` is ready; ``scored``:
        their log-probabilities, if any row asks for them."""
        self._scored = scored
        self._batch = batch
        self._tokens = tokens
        self._event = event
        for row in batch.sampled:
            row.ahead += 1

    def ready(self) -> bool:
        """``take`` would not wait for the device."""
        return self._event.ready()

    def take(self) -> Sampled:
        """What was sampled, once; waits for it."""
        batch = self._batch
        self._event.wait()
        for row in batch.sampled:
            row.ahead -= 1
        tokens = self._tokens.tolist()
        errors = {i: NONE_LEFT for i, token in enumerate(tokens) if token == NO_TOKEN}
        if errors:
            tokens = [max(token, 0) for token in tokens]
        for row, token, position in zip(batch.sampled, tokens, batch.sample_positions, strict=True):
            row.note(token, position)
        logprobs = {} if self._scored is None else self._scored.read(tokens)
        return Sampled(tokens, logprobs, errors=errors)

    def void(self) -> None:
        """It cannot be taken: as ``RowTable.void``."""
        for row, position in zip(self._batch.sampled, self._batch.sample_positions, strict=True):
            row.last_at = position


class LaunchedForHost(Launched):
    """A step whose tokens the host chooses."""

    for_host = True

    def __init__(
        self,
        batch: Batch,
        logits_sc: torch.Tensor | None,
        event: Event,
        choose: Choose,
        scores: Scores,
    ) -> None:
        """``logits_sc``: None where no row samples."""
        super().__init__(batch, torch.empty(0), event)
        self._logits_sc = logits_sc
        self._choose = choose
        self._scores = scores

    def take(self) -> Sampled:
        self._event.wait()
        logits, self._logits_sc = self._logits_sc, None
        sampled = Sampled() if logits is None else self._choose(self._batch, logits)
        for row in self._batch.sampled:
            row.ahead -= 1
        sampled.prompt_logprobs = self._scores
        return sampled
