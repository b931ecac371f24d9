"""One sequence on its way through the system: tokens, progress as integers, a checked state."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .logprobs import TokenLogprobs
from .sampling import SamplingParams


class RequestState(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


_S = RequestState
QUEUE_TIMEOUT = "queue_timeout"
"""Error code of a request that found no place in time: a later try may find one."""
TERMINAL = frozenset({_S.FINISHED, _S.ABORTED, _S.FAILED})
ALLOWED: dict[RequestState, frozenset[RequestState]] = {
    _S.WAITING: frozenset({_S.PREFILLING, _S.ABORTED, _S.FAILED}),
    _S.PREFILLING: frozenset({_S.TRANSFERRING, _S.DECODING, _S.PREEMPTED}) | TERMINAL,
    _S.TRANSFERRING: frozenset({_S.DECODING, _S.PREEMPTED}) | TERMINAL,
    _S.DECODING: frozenset({_S.PREEMPTED}) | TERMINAL,
    _S.PREEMPTED: frozenset({_S.PREFILLING}) | TERMINAL,
    _S.FINISHED: frozenset(),
    _S.ABORTED: frozenset(),
    _S.FAILED: frozenset(),
}


@dataclass(eq=False)
class Request:
    """A request as the scheduler sees it. Token ids are ints; times are clock seconds."""

    number: int
    """Small integer, unique within an engine; what plans and messages carry."""
    request_id: str
    """The name that users see."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival: float
    seed: int = 0
    """``sampling.seed``, or the seed drawn for this request at arrival."""
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    """Lower is served sooner, and preempted later."""
    cache_salt: str | None = None
    """Cached prefixes are shared with requests of the same salt only."""
    bad_words: list[list[int]] = field(default_factory=list)
    """``sampling.bad_words`` as tokens."""
    output_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Of the prompt's tokens so far, where asked for; None for the first one."""
    num_computed: int = 0
    """Tokens whose keys and values exist in this incarnation; ``num_computed <= num_tokens``."""
    incarnation: int = 0
    """Raised each time the request is prefilled anew."""
    num_cached: int = 0
    """Prompt tokens of this incarnation that a prefix cache spared the prefill."""
    state: RequestState = RequestState.WAITING
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error`` once terminal."""
    error: str | None = None
    error_param: str | None = None
    """The field of ``sampling`` that is to blame for the error; None: no fault of the request."""
    error_code: str | None = None
    """What kind of error it is, where more than the message tells: ``QUEUE_TIMEOUT``."""
    ended_in: RequestState | None = None
    """The state that it was in when it reached a terminal one."""
    times: dict[RequestState, float] = field(default_factory=dict)
    """When each state was first entered."""
    token_times: list[float] = field(default_factory=list)
    """When each output token became known to the scheduler."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.ended_in is not None

    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are still to be computed, and so is the whole prompt."""
        return self.sampling.prompt_logprobs is not None and not self.output_token_ids

    def score(self, start: int, scores: list[TokenLogprobs]) -> None:
        """Takes those of the tokens after positions ``start`` and on; a prompt that is computed
        anew replaces what was known."""
        assert len(self.prompt_logprobs) > start, "part of the prompt was passed over"
        self.prompt_logprobs = [*self.prompt_logprobs[: start + 1], *scores]

    def advance(self, state: RequestState, now: float) -> None:
        """Moves to ``state``; a move outside the table is our own mistake."""
        assert state in ALLOWED[self.state], f"{self.request_id}: {self.state} -> {state}"
        if state in TERMINAL:
            self.ended_in = self.state
        self.state = state
        self.times.setdefault(state, now)
