"""Draws: repeatable, independent of the batch, and of the right distribution."""

from __future__ import annotations

import math

import pytest
import torch

from cloverinfer.models import sample
from cloverinfer.models.sampling import NO_TOKEN, uniform
from cloverinfer.wire.messages import Sampling


def greedy() -> Sampling:
    return Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def drawn(seed: int = 0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [greedy()] * 2, [0, 0]) == [1, 0]
    assert sample(logits, [greedy(), drawn()], [0, 0])[0] == 1


@pytest.mark.parametrize("size", [1, 15, 16, 17, 300])
def test_greedy_finds_the_largest_wherever_it_is(size: int) -> None:
    logits = torch.randn((size, size), generator=torch.Generator().manual_seed(2))
    logits[range(size), range(size)] = 9.0
    assert sample(logits, [greedy()] * size, [0] * size) == list(range(size))
    logits[range(size), range(size)] = float("nan")
    assert sample(logits, [greedy()] * size, [0] * size) == [NO_TOKEN] * size


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = torch.randn((24, 1000), generator=torch.Generator().manual_seed(1)) * 3
    kinds = [
        drawn(i, 0.3 + i % 4, [0, -1, 1, 5, 900][i % 5], [1.0, 0.9, 0.2][i % 3])
        if i % 6
        else greedy()
        for i in range(24)
    ]
    positions = [7 * i for i in range(24)]
    together = sample(logits, kinds, positions)
    alone = [sample(logits[i : i + 1], [kinds[i]], [positions[i]])[0] for i in range(24)]
    backwards = sample(logits.flip(0), kinds[::-1], positions[::-1])[::-1]
    assert together == alone == backwards


def test_seed_and_position_both_count() -> None:
    logits = torch.zeros((1, 5000))

    def one(seed: int, position: int) -> int:
        return sample(logits, [drawn(seed)], [position])[0]

    assert one(3, 4) == one(3, 4)
    assert len({one(seed, 0) for seed in range(50)}) > 45
    assert len({one(0, position) for position in range(50)}) > 45
    assert one(-1, 0) == one(2**64 - 1, 0)


def frequencies(params: dict[str, float], logits: torch.Tensor, draws: int = 8000) -> torch.Tensor:
    kinds = [drawn(11, **params)] * 500  # type: ignore[arg-type]
    tokens: list[int] = []
    for start in range(0, draws, 500):
        tokens += sample(logits.expand(500, -1), kinds, list(range(start, start + 500)))
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf, 0.5])
    expected = (logits / temperature).softmax(-1)
    found = frequencies({"temperature": temperature}, logits)
    # Five standard deviations of the largest term.
    assert (found - expected).abs().max() < 5 * math.sqrt(0.25 / 8000)
    assert found[4] == 0


def test_top_k_and_top_p_cut_and_renormalise() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    near = 5 * math.sqrt(0.25 / 8000)
    by_k = frequencies({"top_k": 2}, logits)
    assert by_k[2:].sum() == 0
    assert abs(by_k[0] - 4 / 7) < near
    by_p = frequencies({"top_p": 0.65}, logits)
    assert by_p[2:].sum() == 0
    assert abs(by_p[0] - 4 / 7) < near
    both = frequencies({"top_k": 3, "top_p": 0.75}, logits)
    assert both[2:].sum() == 0
    assert frequencies({"top_p": 1e-6}, logits, 500)[0] == 1
    assert frequencies({"top_k": 1}, logits, 500)[0] == 1


def test_top_p_over_a_flat_vocabulary_needs_more_than_its_first_try() -> None:
    logits = torch.arange(4000, dtype=torch.float32)[None] * -1e-4
    kept = {sample(logits, [drawn(seed, top_p=0.5)], [0])[0] for seed in range(300)}
    weights = logits[0].double().softmax(-1).cumsum(-1)
    limit = int((weights < 0.5).sum())
    assert max(kept) <= limit
    assert max(kept) > 0.9 * limit


def test_extremes_stay_in_range() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert sample(logits, [drawn(temperature=1e-6)], [0]) == [0]
    assert sample(logits, [drawn(temperature=100.0, top_k=99)], [0])[0] in (0, 1, 2)
    lonely = torch.full((1, 9), -torch.inf)
    lonely[0, 6] = 0.0
    assert {sample(lonely, [drawn(seed)], [seed])[0] for seed in range(50)} == {6}


@pytest.mark.parametrize("nothing", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("kind", [greedy(), drawn(), drawn(top_k=2), drawn(top_p=0.5)])
def test_a_row_without_a_finite_largest_says_so_and_harms_no_other(kind, nothing) -> None:
    logits = torch.zeros((3, 9))
    logits[0, 4] = logits[2, 7] = 99.0
    logits[1] = nothing
    assert sample(logits, [kind] * 3, [0] * 3) == [4, NO_TOKEN, 7]
    assert sample(logits, [greedy(), kind, drawn()], [0] * 3) == [4, NO_TOKEN, 7]


def test_uniform_is_uniform() -> None:
    numbers = torch.tensor([uniform(s, p) for s in range(100) for p in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers.float(), 20, 0, 1)
    # Chi-squared of 19 degrees of freedom; 43.8 is its 99.9 % point.
    assert ((counts - 500) ** 2 / 500).sum() < 43.8
