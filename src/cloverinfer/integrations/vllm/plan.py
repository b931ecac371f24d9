"""What the scheduler half tells the worker half with each step, and what comes back.

Plain values that cross processes by pickle. Block ids are those of the engine that they are sent
within; positions count a prompt's tokens from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoadStart:
    """Blocks of a request at decode wait for a prefill."""

    request: str
    transfer: str
    blocks: list[int]
    """Those that positions from ``start`` on fill; not one of them is written by this engine."""
    start: int
    """First position to be loaded; a multiple of the block size."""
    end: int
    """Length of the prompt."""
    digest: int
    """Of the prompt's tokens."""


@dataclass
class SendStart:
    """A request at prefill whose cache goes to a decode."""

    request: str
    transfer: str
    attempt: int
    host: str
    port: int
    """Meeting point of the decode engine's rank 0."""
    end: int
    digest: int


@dataclass
class Progress:
    """A request at prefill is in the step that this goes with."""

    request: str
    blocks: list[int]
    """New ones of its table, or all of them where ``anew``."""
    anew: bool
    computed: int
    """Prompt positions whose keys and values exist once the step is over."""


@dataclass
class StepPlan:
    """With every step, also with those that compute nothing."""

    loads: list[LoadStart] = field(default_factory=list)
    sends: list[SendStart] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests at prefill whose blocks this step may give to others."""
    ended: list[str] = field(default_factory=list)
    """Requests that finished or were aborted since the step before."""


@dataclass(frozen=True)
class Loaded:
    """How a load went, for the answer to the client."""

    attempt: int
    tokens: int
    seconds: float
    """From the first grant to the last byte."""
    error: str = ""
