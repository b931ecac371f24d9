"""The GPU's sampler against ``models/sampling.py`` in float64: `make test-gpu`.

Tokens are equal but where the draw falls within rounding of a boundary between two tokens, which
is looked at: `_boundary` says how near. Uniform numbers are those of seeds and positions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cloverinfer.attention.cuda import missing
from cloverinfer.models.device_sampling import DRAW_DTYPES, DeviceSampler
from cloverinfer.models.sampling import (
    NO_TOKEN,
    _keep_min_p,
    _keep_top_k,
    _keep_top_p,
    sample,
    uniform,
)
from cloverinfer.wire.messages import Sampling

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABULARIES = [1, 2, 97, 4096, 50257, 128256, 262144]
ROUNDING = 1e-11
"""Of the whole weight: how near to a boundary a draw may be that comes out otherwise."""
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.1},
    "hot": {"temperature": 5.0},
    "colder than floats": {"temperature": 1e-310},
    "top_k": {"top_k": 40},
    "top_k 1": {"top_k": 1},
    "top_k many": {"top_k": 5000},
    "top_p": {"top_p": 0.9},
    "top_p little": {"top_p": 0.01},
    "top_p nearly all": {"top_p": 0.999999},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
}


def make(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, **rest: Any) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, **rest)


def draws_of(params: list[Sampling], positions: list[int]) -> dict[str, torch.Tensor]:
    numbers = [
        (p.temperature, p.top_k, p.top_p, p.min_p, uniform(p.seed, position))
        for p, position in zip(params, positions, strict=True)
    ]
    columns = zip(*numbers, strict=True)
    return {
        name: torch.tensor([*column, 7], dtype=dtype).cuda()
        for (name, dtype), column in zip(DRAW_DTYPES.items(), columns, strict=True)
    }


def draw(
    logits: torch.Tensor, params: list[Sampling], positions: list[int], sampler: DeviceSampler
) -> list[int]:
    out = torch.full((len(params) + 1,), -7, device="cuda")
    sampler(logits, draws_of(params, positions), out)
    assert out[-1] == -7
    tokens: list[int] = out[:-1].tolist()
    return tokens


def boundary(logits: torch.Tensor, params: Sampling, token: int, position: int) -> float:
    """How far the draw is from the token's span of cumulative weight, over the whole weight; the
    largest share of a token that top_k and top_p drop or keep otherwise by rounding is ignored.
    """
    scores = (logits[None] - logits.amax()).double() / params.temperature
    _keep_top_k(scores, [params])
    weights = scores.exp()
    _keep_min_p(weights, [params])
    _keep_top_p(weights, [params])
    cumulative = weights[0].cumsum(-1) / weights.sum()
    at = uniform(params.seed, position)
    low = 0.0 if token == 0 else float(cumulative[token - 1])
    return max(low - at, at - float(cumulative[token]), 0.0)


def check(logits: torch.Tensor, params: list[Sampling], clusters: bool = True) -> None:
    positions = list(range(100, 100 + len(params)))
    sampler = DeviceSampler(logits.device, clusters)
    mine = draw(logits, params, positions, sampler)
    expected = sample(logits.float(), params, positions)
    assert mine == draw(logits, params, positions, sampler)
    for row, (token, other) in enumerate(zip(mine, expected, strict=True)):
        if token != other:
            assert params[row].temperature > 0, (row, token, other)
            far = boundary(logits[row].float(), params[row], token, positions[row])
            assert far <= ROUNDING, (row, token, other, far)


def logits_of(kind: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn((rows, columns), device="cuda")
    if kind == "peaked":
        x = x.abs().pow(3) * 6
    elif kind == "ties":
        x = (x * 2).round()
    elif kind == "masked":
        x = torch.where(torch.rand_like(x) < 0.9, -torch.inf, x)
        x[:, columns // 2] = 0.0
    elif kind == "equal":
        x = torch.full_like(x, 3.25)
    elif kind == "wide":
        x = x * 2000
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", VOCABULARIES)
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "masked", "equal", "wide"])
def test_draws(dtype: torch.dtype, columns: int, kind: str) -> None:
    torch.manual_seed(columns)
    names = list(SETTINGS) * 3
    params = [make(seed=i, **SETTINGS[name]) for i, name in enumerate(names)]
    check(logits_of(kind, len(params), columns, dtype), params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [97, 30000, 128256])
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties"])
def test_draws_without_clusters(dtype: torch.dtype, columns: int, kind: str) -> None:
    """Rows that fit into shared memory, and rows that do not."""
    torch.manual_seed(columns)
    params = [make(seed=i, **setting) for i, setting in enumerate(SETTINGS.values())]
    check(logits_of(kind, len(params), columns, dtype), params, clusters=False)


def test_many_rows() -> None:
    torch.manual_seed(0)
    names = list(SETTINGS)
    params = [make(seed=i, **SETTINGS[names[i % len(names)]]) for i in range(300)]
    check(logits_of("peaked", 300, 32000, torch.float32), params)


def test_draws_follow_the_weights() -> None:
    """Against the distribution itself, whatever the reference does."""
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 3.0], device="cuda").expand(20000, 5).contiguous()
    params = [make(temperature=1.5, seed=i) for i in range(20000)]
    tokens = torch.tensor(draw(logits, params, [0] * 20000, DeviceSampler(logits.device)))
    share = torch.bincount(tokens, minlength=5) / 20000
    assert (share - (logits[0].cpu() / 1.5).softmax(-1)).abs().max() < 0.012


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    logits = logits_of("flat", 5, 5000, dtype)
    logits[0] = -torch.inf
    logits[1, 4999] = torch.nan
    logits[2, 17] = torch.inf
    logits[3] = torch.nan
    params = [make(temperature=temperature, top_p=0.9, seed=i) for i in range(5)]
    tokens = draw(logits, params, [0] * 5, DeviceSampler(logits.device))
    assert tokens[:4] == [NO_TOKEN] * 4
    assert tokens[4] >= 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.zeros((3, 130000), device="cuda", dtype=dtype)
    logits[1, [129999, 64123, 70000]] = 1.0
    logits[2, 129999] = 1.0
    params = [make(temperature=0.0, seed=0)] * 3
    assert draw(logits, params, [0] * 3, DeviceSampler(logits.device)) == [0, 64123, 129999]


@pytest.mark.parametrize("extra", [3, 8])
def test_rows_with_a_stride(extra: int) -> None:
    torch.manual_seed(0)
    wide = logits_of("peaked", 13, 9000 + extra, torch.bfloat16)
    wide[:, 9000:] = 100.0
    params = [make(seed=i, **setting) for i, setting in enumerate(SETTINGS.values())]
    logits = wide[:, :9000]
    sampler = DeviceSampler(logits.device)
    assert draw(logits, params, [1] * 13, sampler) == draw(
        logits.contiguous(), params, [1] * 13, sampler
    )


def test_a_row_draws_the_same_in_any_company() -> None:
    torch.manual_seed(0)
    logits = logits_of("flat", 150, 128256, torch.float32)
    params = [make(seed=i, top_p=0.8, top_k=1000 * (i % 2)) for i in range(150)]
    sampler = DeviceSampler(logits.device)
    together = draw(logits, params, list(range(150)), sampler)
    for row in (0, 77, 149):
        assert draw(logits[row : row + 1], [params[row]], [row], sampler) == [together[row]]


def test_a_captured_call_reads_new_draws() -> None:
    torch.manual_seed(0)
    logits = logits_of("peaked", 8, 32000, torch.bfloat16)
    sampler = DeviceSampler(logits.device)
    fixed = draws_of([make(temperature=0.0, seed=0)] * 8, [0] * 8)
    out = torch.empty(8, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler(logits, fixed, out)
    for turn in range(5):
        params = [make(seed=turn, top_p=0.9, temperature=float(i % 2)) for i in range(8)]
        for name, tensor in draws_of(params, [turn] * 8).items():
            fixed[name].copy_(tensor)
        graph.replay()
        assert out.tolist() == draw(logits, params, [turn] * 8, sampler)
