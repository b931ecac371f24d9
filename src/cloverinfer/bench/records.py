"""One request of a benchmark: what was asked, and when what came. Times are clock seconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Union

import msgspec

Prompt = Union[str, list[int]]


@dataclass(frozen=True)
class Sample:
    """A request to be sent."""

    prompt: Prompt
    output_tokens: int
    """Most tokens to ask for."""
    prompt_tokens: int | None = None
    """As the workload knows it; None where only the server can tell."""
    at: float | None = None
    """Seconds after the start, in a trace."""


class Record(msgspec.Struct):
    """What came of a request; a line of the JSONL file. Seconds since the start of the run."""

    index: int
    due: float = 0.0
    """When the schedule wanted it sent."""
    ready: float = 0.0
    """When the client was about to send it: late by its own slowness only."""
    sent: float = 0.0
    """When it was sent: after ``ready`` where the limit of requests at a time held it back."""
    times: list[float] = []
    """When each piece of the answer that holds text came."""
    ended: float = 0.0
    """When the answer was complete, or the request failed."""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    tokens_from: str = "usage"
    """Who counted the output tokens: ``usage`` (the server), ``tokenizer`` or ``pieces``."""
    finish_reason: str | None = None
    error: str | None = None
    """Why it failed; None where it is complete."""
    status: int | None = None
    """HTTP status, where there was one."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float | None:
        """Sent to the first piece with text."""
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if len(self.times) < 1 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def latency(self) -> float:
        """Sent to complete."""
        return self.ended - self.sent

    def gaps(self) -> list[float]:
        """Times between pieces, which are tokens where the server sends each in one of its own."""
        return [after - before for before, after in pairwise(self.times)]
