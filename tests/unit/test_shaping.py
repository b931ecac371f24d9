"""Penalties, biases and bans: after their definitions, however the tokens came."""

from __future__ import annotations

import random

import pytest
import torch

from cloverinfer.models import sample
from cloverinfer.models.shaping import Shaper, shape
from cloverinfer.wire.messages import Sampling, Shaping

VOCAB = 50


def plainly(logits: list[float], shaping: Shaping, tokens: list[int]) -> list[float]:
    """The same by the letter, one number at a time."""
    prompt, said = tokens[: shaping.num_prompt], tokens[shaping.num_prompt :]
    out = list(logits)
    for word in shaping.bad_words:
        before = word[:-1]
        if len(before) <= len(said) and said[len(said) - len(before) :] == before:
            out[word[-1]] = -float("inf")
    if len(said) < shaping.min_tokens:
        for token in shaping.stops:
            out[token] = -float("inf")
    for token, by in shaping.logit_bias.items():
        out[token] += by
    for token in set(prompt + said):
        p = shaping.repetition_penalty
        out[token] = out[token] / p if out[token] > 0 else out[token] * p
    for token in set(said):
        out[token] -= shaping.frequency_penalty * said.count(token) + shaping.presence_penalty
    return out


def random_shaping(rng: random.Random, num_prompt: int) -> Shaping:
    some = rng.random
    return Shaping(
        num_prompt=num_prompt,
        presence_penalty=rng.choice([0, 0, 0.7, -1.1]),
        frequency_penalty=rng.choice([0, 0, 0.4, -0.3]),
        repetition_penalty=rng.choice([1, 1, 1.3, 0.8]),
        logit_bias={rng.randrange(VOCAB): 10 * some() - 5 for _ in range(rng.choice([0, 0, 5]))},
        bad_words=[[rng.randrange(6) for _ in range(rng.randint(1, 3))] for _ in range(4)]
        if some() < 0.5
        else [],
        min_tokens=rng.choice([0, 0, 6]),
        stops=[3, 44],
    )


def test_shaping_follows_the_definitions_step_by_step_and_joined_late():
    """Each request is shaped at every step by one shaper that was there from the start, and by
    one made then and there from a join, in one batch."""
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    requests = []
    for _ in range(24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))]
        shaping = random_shaping(rng, len(prompt))
        requests.append((shaping, prompt, Shaper(shaping, [], 0)))
    for _ in range(12):
        logits = torch.randn((48, VOCAB), generator=generator) * 4
        wanted = logits.clone()
        rows = []
        for shaping, tokens, lasting in requests:
            start = rng.randint(0, len(tokens) - 1)
            late = Shaper(shaping, tokens[:start], start)
            for shaper, known in ((lasting, tokens), (late, tokens[start:])):
                wanted[len(rows)] = torch.tensor(
                    plainly(logits[len(rows)].tolist(), shaping, tokens)
                )
                rows.append((shaper, known, len(tokens)))
            tokens.append(rng.randrange(6))
        shape(logits, *map(list, zip(*rows, strict=True)))
        torch.testing.assert_close(logits, wanted)
    assert any(len(shaper._ids) > 64 or shaper._slots for _, _, shaper in requests)


def test_tokens_taken_back_are_not_counted():
    shaping = Shaping(num_prompt=2, frequency_penalty=1.0)
    shaper = Shaper(shaping, [], 0)
    tokens = [1, 2, 7, 7, 7]
    for position, count in ((5, 3), (3, 1), (4, 2)):
        logits = torch.zeros((1, VOCAB))
        shape(logits, [shaper], [tokens], [position])
        assert logits[0, 7] == -count
        assert logits[0, 1] == 0


def test_ids_past_the_vocabulary_are_no_harm():
    shaper = Shaper(Shaping(num_prompt=1, min_tokens=2, stops=[VOCAB + 3, 4]), [], 0)
    logits = torch.zeros((1, VOCAB))
    shape(logits, [shaper], [[0]], [1])
    assert torch.isinf(logits).sum() == 1


@pytest.mark.parametrize("penalty", [5e-324, 1e-38, 1e-30, 100.0])
def test_no_penalty_makes_what_is_no_number(penalty):
    shaping = Shaping(
        num_prompt=4, repetition_penalty=penalty, bad_words=[[3]], frequency_penalty=-2.0
    )
    shaper = Shaper(shaping, [], 0)
    logits = torch.linspace(-30.0, 30.0, VOCAB)[None].clone()
    shape(logits, [shaper], [[1, 3, 45, 47, 2, 46]], [6])
    assert logits[0, 3] == -torch.inf
    assert logits[0].isfinite().sum() == VOCAB - 1
    assert sample(logits, [Sampling(1.0, 0, 1.0, seed=3)], [6])[0] in range(VOCAB)


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.3, 3), (0.6, 2), (1.0, 1)])
def test_min_p_drops_the_unlikely(min_p, kept):
    """Shares of the likeliest are 1, 0.7, 0.4 and 0.1."""
    logits = torch.tensor([[0.4, 1.0, 0.1, 0.7]]).log().repeat(400, 1)
    params = [Sampling(1.0, 0, 1.0, seed=3, min_p=min_p)] * 400
    drawn = set(sample(logits, params, range(400)))
    assert drawn == set([1, 3, 0, 2][:kept])
