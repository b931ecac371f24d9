"""Steps launched ahead on a device say what plain forwards say, whoever joins, leaves or fails."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.device_kit import HostDevice, HostEvent, PaddedAttention
from tests.tiny_models import make_tiny

from cloverinfer.attention.torch import TorchAttention
from cloverinfer.config import ModelConfig
from cloverinfer.core.errors import CloverError, TransportError
from cloverinfer.core.logprobs import TokenLogprobs
from cloverinfer.core.sampling import MAX_TAIL
from cloverinfer.kvcache.layout import PoolLayout, blocks_for
from cloverinfer.models import DenseHalf, load_half, resolve_model
from cloverinfer.models.sampling import NO_TOKEN, uniform
from cloverinfer.nodes.device_forward import DeviceForward, Sampler, buckets_up_to
from cloverinfer.nodes.device_inputs import Tensors, uniforms
from cloverinfer.nodes.device_seats import DeviceShape
from cloverinfer.nodes.flights import Flights
from cloverinfer.nodes.forward import LocalForward, Sampled
from cloverinfer.nodes.gate import OpenGate
from cloverinfer.nodes.rows import RowTable
from cloverinfer.wire.messages import Join, Sampling, Shaping, StepPlan, StepStats

BLOCK, BLOCKS, LONGEST, MAX_ROWS, VOCAB = 4, 96, 48, 12, 96
GREEDY_FIELDS = (0.0, 0, 1.0, 0)
GREEDY = Sampling(*GREEDY_FIELDS)
DRAWN = Sampling(0.8, 0, 1.0, 0)
"""With a seed of its own each."""
SHAPED = Sampling(*GREEDY_FIELDS, shaping=Shaping(num_prompt=0))
"""With penalties, biases and forbidden words, of its own prompt."""
HOSTED = Sampling(*GREEDY_FIELDS, shaping=Shaping(num_prompt=0, bad_words=[[1] * (MAX_TAIL + 2)]))
"""With a word that is longer than what devices remember."""
SCORED = Sampling(*GREEDY_FIELDS, logprobs=2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> DenseHalf:
    folder: Path = make_tiny("llama", tmp_path_factory.mktemp("llama"))
    return load_half(resolve_model(ModelConfig(model_path=str(folder), dtype="float32")))


def sample_there(logits_tc: torch.Tensor, draws: Tensors, out_t: torch.Tensor) -> None:
    """A ``Sampler`` of temperatures alone: the inverse of the cumulative distribution."""
    largest = logits_tc.max(-1)
    temperature = draws["temperature"].clamp(min=1e-6)[:, None]
    weights = ((logits_tc - largest.values[:, None]).double() / temperature).exp()
    sums = weights.cumsum(-1)
    drawn = torch.searchsorted(sums, draws["uniform"][:, None] * sums[:, -1:], right=True)[:, 0]
    out_t.copy_(torch.where(draws["temperature"] > 0, drawn, largest.indices))
    out_t.masked_fill_(~largest.values.isfinite(), NO_TOKEN)


@dataclass
class Asked:
    """A request: what it must say is known beforehand."""

    prompt: list[int]
    sampling: Sampling
    wanted: list[int]
    scores: list[TokenLogprobs | None]
    """Of each wanted token."""
    number: int
    said: list[int] = field(default_factory=list)
    planned: int = 0
    """Tokens that steps planned so far compute."""
    blocks: list[int] = field(default_factory=list)
    told: int = -1
    """Blocks that the node knows; -1: it does not know the request."""
    incarnation: int = 0
    flying: int = 0
    failed: bool = False

    @property
    def waits(self) -> bool:
        """The host must know what the step in flight says before the next one."""
        shaping = self.sampling.shaping
        return shaping is not None and shaping.needs_host and self.flying > 0

    @property
    def known(self) -> list[int]:
        return self.prompt + self.said


def reference(
    half: DenseHalf, prompt: list[int], sampling: Sampling, count: int
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One row, one step at a time: its tokens, and their log-probabilities."""
    backend = TorchAttention()
    backend.allocate(PoolLayout(half.specs, BLOCK, 16), half.arch.num_heads)
    rows, forward = RowTable(BLOCK, local_attention=True), LocalForward(half, backend, OpenGate())
    joins = [Join(1, 0, list(prompt), 0, list(range(16)), sampling)]
    said: list[int] = []
    scores = []
    start, tokens = 0, len(prompt)
    for step in range(count):
        plan = StepPlan(0, step, [1], [start], [tokens], [True], joins, [], [])
        rows.apply(plan)
        sampled = forward.run(rows.batch(plan), StepStats())
        said += sampled.tokens
        scores.append(sampled.logprobs.get(0))
        joins, start, tokens = [], start + tokens, 1
    return said, scores


def same_scores(one: TokenLogprobs | None, other: TokenLogprobs | None) -> bool:
    if one is None or other is None:
        return one is other
    numbers, wanted = [[score.logprob, *score.top_logprobs] for score in (one, other)]
    return (one.token_id, one.rank, one.top_ids) == (
        other.token_id,
        other.rank,
        other.top_ids,
    ) and numbers == pytest.approx(wanted, abs=1e-4)


class Play:
    """Plans as a scheduler would make them, by chance, at most one ahead."""

    def __init__(
        self, half: DenseHalf, seed: int, sampler: Sampler | None = None, failing: float = 0
    ) -> None:
        self.rng = random.Random(seed)
        self.half = half
        self.step = self.numbers = 0
        self.greatest = self.ahead = self.lost = self.ended = self.failed = 0
        self.device = HostDevice(2 + 2 * (seed % 2), lambda: self.fails(failing))
        backend = PaddedAttention()
        backend.allocate(PoolLayout(half.specs, BLOCK, BLOCKS), half.arch.num_heads)
        shape = DeviceShape(MAX_ROWS, blocks_for(LONGEST, BLOCK))
        self.forward = DeviceForward(half, backend, self.device, shape, sampler)
        self.forward.capture(lambda line: None)
        self.rows = RowTable(BLOCK, local_attention=True, on_device=True)
        self.flights = Flights(self.forward, self.rows, self.on_done, self.on_failed)
        self.free = list(range(BLOCKS))
        self.asked: dict[int, Asked] = {}
        self.leaves: list[int] = []
        self.sent: dict[int, list[tuple[Asked, int, bool]]] = {}
        self.held: list[tuple[int, list[int]]] = []
        self.answered: list[int] = []
        self.unheard: list[StepPlan] = []

    def fails(self, share: float) -> bool:
        failed = self.step > 0 and self.rng.random() < share
        self.failed += failed
        return failed

    # -- what comes back

    def on_done(self, plan: StepPlan, sampled: Sampled, stats: StepStats) -> None:
        # A row that goes on from a step that failed attends over what nobody has written.
        lost = {asked.number for failed in self.unheard for asked, _, _ in self.sent[failed.step]}
        index = 0
        for asked, incarnation, samples in self.land(plan):
            if not samples:
                continue
            void = asked.failed or asked.number in lost or asked.incarnation != incarnation
            assert void or index not in sampled.errors
            if not void:
                at = len(asked.said)
                asked.said.append(sampled.tokens[index])
                if at < len(asked.wanted):
                    assert same_scores(sampled.logprobs.get(index), asked.scores[at])
            index += 1
        assert index == len(sampled.tokens)

    def on_failed(self, plan: StepPlan, problem: Exception) -> None:
        assert isinstance(problem, MemoryError), problem
        self.unheard.append(plan)

    def hear(self) -> None:
        """Failures are heard of once the next step is on its way."""
        plans, self.unheard = self.unheard, []
        for plan in plans:
            self.hear_of(plan)

    def hear_of(self, plan: StepPlan) -> None:
        for asked, incarnation, _ in self.land(plan):
            if asked.incarnation == incarnation:
                asked.failed = True

    def land(self, plan: StepPlan) -> list[tuple[Asked, int, bool]]:
        self.answered.append(plan.step)
        rows = self.sent.pop(plan.step)
        for asked, incarnation, _ in rows:
            asked.flying -= asked.incarnation == incarnation
        waiting, self.held = self.held, []
        for step, blocks in waiting:  # reused only once no step names them
            if step < min(self.sent, default=self.step + 1):
                self.free += blocks
            else:
                self.held.append((step, blocks))
        return rows

    # -- what goes out

    def ask(self, sampling: Sampling, most: int) -> None:
        prompt = [self.rng.randrange(1, VOCAB) for _ in range(self.rng.choice([1, 2, 5, 11, 17]))]
        if sampling.shaping is not None:
            sampling = self.shaped(prompt, sampling.shaping)
        elif sampling.temperature:
            sampling = Sampling(sampling.temperature, 0, 1.0, self.rng.getrandbits(64))
        self.numbers += 1
        wanted = reference(self.half, prompt, sampling, most)
        self.asked[self.numbers] = Asked(prompt, sampling, *wanted, self.numbers)

    def shaped(self, prompt: list[int], kind: Shaping) -> Sampling:
        """By chance; some of the words are such as it would say."""
        rng = self.rng
        said, _ = reference(self.half, prompt, GREEDY, 4)
        words = [said[at : at + rng.randrange(1, 4)] for at in range(rng.randrange(3))]
        shaping = Shaping(
            len(prompt),
            presence_penalty=rng.choice([0, 0.7]),
            frequency_penalty=rng.choice([0, 0.5]),
            repetition_penalty=rng.choice([1, 1.3]),
            logit_bias=rng.choice([{}, {rng.randrange(VOCAB): 2.0, said[-1]: -1.5}]),
            bad_words=kind.bad_words + words,
            min_tokens=rng.randrange(4),
            stops=said[:1],
        )
        return Sampling(*GREEDY_FIELDS, shaping=shaping, logprobs=rng.choice([None, 0, 3]))

    def leave(self, asked: Asked) -> None:
        if asked.told >= 0:
            self.leaves.append(asked.number)
        self.held.append((self.step, asked.blocks))
        asked.blocks, asked.told, asked.planned, asked.flying = [], -1, 0, 0
        asked.incarnation += 1

    def turn(self) -> None:
        for asked in list(self.asked.values()):
            if asked.failed or len(asked.said) >= len(asked.wanted):
                if not asked.failed:
                    assert asked.said[: len(asked.wanted)] == asked.wanted
                self.lost += asked.failed
                self.ended += not asked.failed
                self.leave(asked)
                del self.asked[asked.number]
            elif self.rng.random() < 0.03:
                self.leave(asked)  # preempted: joins anew with what is known of it
        while len(self.flights) > 1:
            self.flights.report()
        rows = [asked for asked in self.asked.values() if not asked.waits]
        rows = [asked for asked in rows if self.rng.random() < 0.85]
        unheard = len(self.unheard)
        self.send(rows[:MAX_ROWS])
        if unheard:
            self.hear()
        if self.rng.random() < 0.2:
            self.flights.finish()
        self.flights.report()

    def send(self, rows: Sequence[Asked]) -> None:
        self.step += 1
        plan = StepPlan(0, self.step, [], [], [], [], [], self.leaves, [])
        self.leaves = []
        sent = []
        for asked in rows:
            count = self.count_of(asked)
            if count and self.make_room(asked, asked.planned + count, plan):
                self.ahead += asked.planned >= len(asked.known)
                plan.rows.append(asked.number)
                plan.starts.append(asked.planned)
                plan.counts.append(count)
                asked.planned += count
                plan.samples.append(asked.planned >= len(asked.known))
                asked.flying += 1
                sent.append((asked, asked.incarnation, plan.samples[-1]))
        if sent:
            self.sent[self.step] = sent
            self.greatest = max(self.greatest, len(sent))
            self.flights.launch(plan)
        else:
            self.leaves = plan.leaves

    def count_of(self, asked: Asked) -> int:
        left = len(asked.known) - asked.planned
        if left > 0:
            return left if self.rng.random() < 0.7 else self.rng.randrange(1, left + 1)
        # One ahead of what is known, and never past the end.
        more = asked.planned - len(asked.known)
        return int(more == 0 and asked.flying == 1)

    def make_room(self, asked: Asked, tokens: int, plan: StepPlan) -> bool:
        more = blocks_for(tokens, BLOCK) - len(asked.blocks)
        if more > len(self.free):
            return False
        new = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(more)]
        asked.blocks += new
        if asked.told < 0:
            known = asked.known[asked.planned :]
            before = asked.known[: asked.planned]
            blocks, sampling = list(asked.blocks), asked.sampling
            plan.joins.append(
                Join(asked.number, 0, known, asked.planned, blocks, sampling, before=before)
            )
        elif new:
            plan.blocks.append((asked.number, new))
        asked.told = len(asked.blocks)
        return True

    def run(self, turns: int, kinds: Sequence[Sampling], most: int = 9) -> None:
        for _ in range(turns):
            if len(self.asked) < MAX_ROWS and self.rng.random() < 0.5:
                self.ask(self.rng.choice(kinds), self.rng.randrange(1, most))
            self.turn()
        self.flights.finish()
        self.hear()
        assert sorted(self.answered) == sorted(set(self.answered))
        for asked in self.asked.values():
            if not asked.failed:
                assert asked.said[: len(asked.wanted)] == asked.wanted[: len(asked.said)]


@pytest.mark.parametrize("seed", range(2))
def test_steps_launched_ahead_say_what_plain_forwards_say(half: DenseHalf, seed: int) -> None:
    play = Play(half, seed)
    play.run(40, [GREEDY], 16)
    assert play.device.captured == len(buckets_up_to(MAX_ROWS)) == 5
    assert play.device.replayed > 10
    assert play.greatest > 4
    assert play.ahead > 10


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_the_host_must_choose_for_go_beside_others(half: DenseHalf, seed: int) -> None:
    Play(half, seed).run(40, [GREEDY, DRAWN, SHAPED, SCORED, HOSTED])


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_shape_or_score_go_ahead_too(half: DenseHalf, seed: int) -> None:
    play = Play(half, seed, sample_there)
    play.run(40, [GREEDY, DRAWN, SHAPED, SHAPED, SCORED], 16)
    assert play.ahead > 10
    play = Play(half, seed + 5, sample_there)
    play.run(30, [SHAPED, SCORED, HOSTED], 12)
    assert play.ahead > 5


@pytest.mark.parametrize("seed", range(2))
def test_draws_on_the_device_are_those_of_the_host(half: DenseHalf, seed: int) -> None:
    play = Play(half, seed, sample_there)
    play.run(40, [GREEDY, DRAWN, DRAWN], 16)
    assert play.ahead > 10
    Play(half, seed + 9, sample_there).run(40, [DRAWN, SHAPED])


@pytest.mark.parametrize("seed", range(2))
def test_a_step_that_fails_ends_its_own_rows_alone(half: DenseHalf, seed: int) -> None:
    play = Play(half, seed, failing=0.1)
    play.run(60, [GREEDY, GREEDY, SHAPED], 12)
    assert play.failed > 2
    assert play.lost > 2
    assert play.ended > 2


def test_uniforms_of_many_are_those_of_one() -> None:
    rng = random.Random(5)
    seeds = [rng.getrandbits(64) for _ in range(50)] + [0, (1 << 64) - 1]
    positions = [rng.randrange(1 << 20) for _ in seeds]
    found = uniforms(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    assert found.tolist() == [uniform(*pair) for pair in zip(seeds, positions, strict=True)]


def test_a_row_without_a_token_has_an_error(half: DenseHalf) -> None:
    play = Play(half, 0)
    play.ask(GREEDY, 3)
    (asked,) = play.asked.values()
    heard: list[Sampled] = []
    play.flights = Flights(
        play.forward, play.rows, lambda _, sampled, __: heard.append(sampled), play.on_failed
    )
    broken = half.logits

    def nan(carry: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return broken(carry) * torch.nan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half, "logits", nan)
        play.send([asked])
        play.send([asked])  # ahead, of a token that is none
        play.flights.finish()
    assert [sampled.tokens for sampled in heard] == [[0], [0]]
    assert all("not finite" in sampled.errors[0] for sampled in heard)


def test_a_device_that_never_ends_a_step_is_at_fault_itself() -> None:
    with pytest.raises(CloverError, match="did not finish a step") as caught:
        HostEvent(1 << 30).wait(0.01)
    assert not isinstance(caught.value, TransportError)
