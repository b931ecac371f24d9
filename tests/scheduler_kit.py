"""Fake nodes for tests of the scheduler, and what each request must say, known beforehand.

A slot of a fake pool holds a digest of all tokens up to its position, and the next token is a
function of the digest. What the nodes do with plans is ``test_scheduler_fakes``' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cloverinfer.core.request import Request
from cloverinfer.core.sampling import SamplingParams
from cloverinfer.scheduler import SchedNode
from cloverinfer.wire.messages import AttentionPlan, ExpectTransfer, Join, StepPlan

VOCAB = 40
EOS = 0


def digest(parent: int, token: int) -> int:
    return hash((parent, token, 7))


def next_token(value: int) -> int:
    return value % VOCAB


@dataclass
class Truth:
    """What a request's tokens and digests must be, as far as anybody asked."""

    tokens: list[int]
    digests: list[int] = field(default_factory=list)

    def digest(self, position: int) -> int:
        while len(self.digests) <= position:
            i = len(self.digests)
            if i == len(self.tokens):
                self.tokens.append(next_token(self.digests[-1]))
            self.digests.append(digest(self.digests[-1] if i else 1, self.tokens[i]))
        return self.digests[position]

    def token(self, position: int) -> int:
        self.digest(position)
        return self.tokens[position]


@dataclass
class Known:
    """A request as a node knows it."""

    join: Join
    tokens: list[int]
    blocks: list[int]
    pushed: int


@dataclass
class FakeNode:
    name: str
    role: str
    pool: dict[tuple[int, int], int] = field(default_factory=dict)
    known: dict[int, Known] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    """Of attention nodes."""
    busy: dict[int, StepPlan] = field(default_factory=dict)
    """The oldest step of each lane."""
    behind: dict[int, StepPlan] = field(default_factory=dict)
    """The one launched ahead."""
    broken: dict[int, set[int]] = field(default_factory=dict)
    """Rows of a lane's last step, where it failed: what follows before that is known is void."""
    expects: dict[int, ExpectTransfer] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=dict)
    attention: dict[tuple[str, int, int], AttentionPlan] = field(default_factory=dict)


def needs_host(request: Request) -> bool:
    given = request.sampling
    return given.prompt_logprobs is not None or given.structured_outputs is not None


def make_nodes(topology: str, blocks: int, prefills: int = 1, homes: int = 1, dense: int = 1,
               prefill_blocks: int | None = None,
               prefill_size: int | None = None) -> list[SchedNode]:  # fmt: skip
    home_role = {"colocated": "colocated", "pd": "decode", "pda": "attention"}[topology]
    nodes = [SchedNode(f"{home_role}-{i}", home_role, blocks) for i in range(homes)]
    if topology != "colocated":
        size = blocks if prefill_blocks is None else prefill_blocks
        nodes += [SchedNode(f"prefill-{i}", "prefill", size, prefill_size)
                  for i in range(prefills)]  # fmt: skip
    if topology == "pda":
        nodes += [SchedNode(f"dense-{i}", "dense", 0) for i in range(dense)]
    return nodes


def make_request(number: int, prompt: list[int], max_tokens: int = 8, **more: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]
    return Request(number, f"r{number}", prompt, sampling, 0.0, seed=number,
                   eos_token_ids=frozenset({EOS}))  # fmt: skip
