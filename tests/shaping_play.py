"""Rows that shape their logits, by chance, on a device and by the host's way beside each other."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from cloverinfer.core.sampling import MAX_TAIL
from cloverinfer.models.logprobs import token_logprobs
from cloverinfer.models.shaping import Shaper, shape
from cloverinfer.nodes.device import Device
from cloverinfer.nodes.device_shaping import DeviceShaping, ScoresUnderWay
from cloverinfer.nodes.rows import Batch, Row, RowTable
from cloverinfer.wire.messages import Join, Sampling, Shaping, StepPlan

VOCAB, FEW, SEATS = 60, 5, 32
"""``FEW``: tokens that are said, so that words are met."""


@dataclass
class Asked:
    number: int
    shaping: Shaping
    known: list[int]
    """Tokens that were said, heard of by the host or not."""
    sampling: Sampling
    joined: bool = False
    late: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that the host has not heard of, with their positions."""


def random_request(rng: random.Random, number: int) -> Asked:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    words = [[rng.randrange(FEW) for _ in range(rng.choice([1, 2, 2, 3, 4]))] for _ in range(9)]
    words.append([rng.randrange(FEW) for _ in range(MAX_TAIL + 1)])
    words.append([VOCAB + 1])
    shaping = Shaping(
        num_prompt=len(prompt),
        presence_penalty=rng.choice([0, 0, 0.7, -1.1]),
        frequency_penalty=rng.choice([0, 0, 0.4, -0.3]),
        repetition_penalty=rng.choice([1, 1, 1.3, 0.8, 5e-324]),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.choice([0, 5]))},
        bad_words=words if rng.random() < 0.5 else [],
        min_tokens=rng.choice([0, 0, 6]),
        stops=[3, 44, VOCAB],
    )
    sampling = Sampling(0, 0, 1, 0, rng.choice([None, 0, 4]), shaping=shaping)
    if rng.random() < 0.2:
        sampling = Sampling(0, 0, 1, 0, 2)
    return Asked(number, shaping, prompt, sampling)


@contextmanager
def never_waiting(name: str) -> Iterator[None]:
    """Waiting for a GPU is an error meanwhile."""
    if name == "cpu":
        yield
        return
    try:
        _on_waiting("error")
        yield
    finally:
        _on_waiting("default")


def _on_waiting(mode: str) -> None:
    with warnings.catch_warnings():
        # Said, once the mode is set, by the first call of a process.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


class Play:
    """Steps by chance: rows join, leave, are preempted; the host hears late of what they said, has
    chosen it itself, or has the step done again."""

    def __init__(self, seed: int, device: Device, name: str = "cpu") -> None:
        """``name``: of the device."""
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.name, self.device = name, device
        self.there = DeviceShaping(device, SEATS)
        self.rows = RowTable(4, local_attention=True, on_device=True)
        self.asked: list[Asked] = []
        self.numbers = self.again = self.banned = 0

    def turn(self) -> None:
        rng, leaves = self.rng, []
        for asked in list(self.asked):
            if rng.random() < 0.08:
                self.hear(asked)
                leaves += [asked.number] * asked.joined
                asked.joined = False
                if rng.random() < 0.6:
                    self.asked.remove(asked)
        while len(self.asked) < 24 and rng.random() < 0.7:
            self.numbers += 1
            self.asked.append(random_request(rng, self.numbers))
        step = [asked for asked in self.asked if rng.random() < 0.9]
        if rng.random() < 0.4:
            step = [asked for asked in self.asked if asked.joined] or step
        for asked in step:
            if rng.random() < 0.1 and len(asked.known) > asked.shaping.num_prompt:
                self.hear(asked)
                asked.known.pop()  # the step that said it is done again
                self.again += 1
        joins = [self.join(asked) for asked in step if not asked.joined]
        starts = [len(asked.known) - 1 for asked in step]
        ones = [1] * len(step)
        numbers = [asked.number for asked in step]
        plan = StepPlan(0, 0, numbers, starts, ones, [True] * len(step), joins, leaves, [])
        self.rows.apply(plan)
        if step:
            self.run(step, self.rows.batch(plan))

    def join(self, asked: Asked) -> Join:
        asked.joined = True
        start = self.rng.randrange(len(asked.known))
        start = min(start, len(asked.known) - 1)
        before, tokens = asked.known[:start], asked.known[start:]
        return Join(asked.number, 0, tokens, start, list(range(40)), asked.sampling, before=before)

    def hear(self, asked: Asked) -> None:
        for token, position in asked.late:
            row = self.rows._rows[asked.number]
            row.ahead -= 1
            row.note(token, position)
        asked.late.clear()

    def run(self, step: list[Asked], batch: Batch) -> None:
        logits = (torch.randn((len(step), VOCAB), generator=self.generator) * 4).to(self.name)
        if self.rng.random() < 0.15:
            self.choose_on_host(step, batch)
            return
        tokens = torch.tensor([self.rng.randrange(FEW) for _ in step]).to(self.name)
        with never_waiting(self.name):
            self.there.tell(batch, VOCAB)
            shaped = self.there.shape(batch, logits)
            self.there.say(tokens)
            scored = self.there.score(logits, tokens)
        self.device.event().wait()
        assert torch.equal(shaped, self.wanted(step, logits))
        self.check_scores(step, logits, tokens, scored)
        for asked, row, token in zip(step, batch.sampled, tokens.tolist(), strict=True):
            self.hear(asked)
            row.last_at = len(asked.known)
            row.ahead += 1
            asked.late.append((token, row.last_at))
            asked.known.append(token)
            if self.rng.random() < 0.3:
                self.hear(asked)

    def choose_on_host(self, step: list[Asked], batch: Batch) -> None:
        for asked, row in zip(step, batch.sampled, strict=True):
            self.hear(asked)
            self.note(asked, row, self.rng.randrange(FEW))

    def note(self, asked: Asked, row: Row, token: int) -> None:
        row.note(token, len(asked.known))
        row.last_at = -1
        asked.known.append(token)

    def wanted(self, step: list[Asked], logits: torch.Tensor) -> torch.Tensor:
        shaping = [i for i, asked in enumerate(step) if asked.sampling.shaping is not None]
        some = logits[shaping]
        known = [step[i].known for i in shaping]
        shapers = [Shaper(step[i].shaping, [], 0) for i in shaping]
        shape(some, shapers, known, list(map(len, known)))
        out = logits.clone()
        out[shaping] = some
        self.banned += int(out.isinf().sum())
        return out

    def check_scores(
        self,
        step: list[Asked],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        found: ScoresUnderWay | None,
    ) -> None:
        said = tokens.tolist()
        rows = [i for i, asked in enumerate(step) if asked.sampling.logprobs is not None]
        assert (found is None) == (not rows)
        if found is not None:
            counts = [step[i].sampling.logprobs or 0 for i in rows]
            scores = token_logprobs(logits[rows], [said[i] for i in rows], counts)
            assert found.read(said) == dict(zip(rows, scores, strict=True))

    def check(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()
        assert self.again > 10
        assert self.banned > 100
        assert self.numbers > 24
