"""Workloads and arrivals: what the files say, the same for the same seed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloverinfer.bench import arrivals, plan, workloads
from cloverinfer.bench.records import Sample
from cloverinfer.bench.workloads import Lengths, Limits, Writer
from cloverinfer.core.errors import ConfigError

DATA = Path(os.environ.get("CLOVER_DATA", Path(__file__).parents[3] / "shared" / "data"))


class Letters:
    """A tokenizer of 26 tokens, a letter each."""

    vocab_size = 26

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(one) - 97 for one in text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + one) for one in ids)


def test_random_lengths_and_prefix() -> None:
    lengths = Lengths(prompt=100, output=10, spread=0.5, prefix=20)
    samples = workloads.random(200, lengths, Writer(Letters()), seed=3)
    assert samples == workloads.random(200, lengths, Writer(Letters()), seed=3)
    assert samples != workloads.random(200, lengths, Writer(Letters()), seed=4)
    sizes = [one.prompt_tokens for one in samples]
    assert min(sizes) >= 70 and max(sizes) <= 170 and len(set(sizes)) > 20  # type: ignore[type-var, operator]  # noqa: PT018
    assert [len(one.prompt) for one in samples] == sizes
    assert {one.prompt[:20] for one in samples} == {samples[0].prompt[:20]}  # type: ignore[index]
    assert len({one.prompt for one in samples}) == 200  # type: ignore[misc]
    assert {5 <= one.output_tokens <= 15 for one in samples} == {True}


def test_prompts_without_a_tokenizer_and_as_ids() -> None:
    (words,) = workloads.random(1, Lengths(12, 3), Writer(None), seed=0)
    assert len(str(words.prompt).split()) == 12
    assert words.prompt_tokens is None
    (ids,) = workloads.random(1, Lengths(12, 3), Writer(None, ids=True, vocab_size=50), seed=0)
    assert isinstance(ids.prompt, list)
    assert len(ids.prompt) == ids.prompt_tokens == 12
    assert all(0 <= one < 50 for one in ids.prompt)
    with pytest.raises(ConfigError, match="vocab-size"):
        Writer(None, ids=True)


def test_sharegpt(tmp_path: Path) -> None:
    def turns(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": one} for one in texts]}

    rows = [turns("abcdef", "ghijk", "more"), turns("ab", "ghijk"), turns("alone"), {}]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([*rows, turns("abcdefghij" * 3, "ghijk")]))
    writer = Writer(Letters())
    samples = workloads.sharegpt(path, 10, writer, Limits(prompt=20, output=4), seed=0)
    assert samples == [Sample("abcdef", 4)]
    assert len(workloads.sharegpt(path, 10, writer, Limits(), seed=0)) == 2
    path.write_text("{}")
    with pytest.raises(ConfigError, match="list"):
        workloads.sharegpt(path, 1, writer, Limits(), seed=0)
    with pytest.raises(ConfigError, match="cannot read"):
        workloads.sharegpt(tmp_path / "none.json", 1, writer, Limits(), seed=0)


def test_mooncake_shares_prefixes_as_its_ids_do(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [7, 10]},
        {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": []},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = workloads.mooncake(path, 10, Writer(None, True, 1000), Limits(), scale=0.5)
    assert [one.prompt_tokens for one in samples] == [1100, 1024, 600]
    assert [one.output_tokens for one in samples] == [5, 6, 1]
    assert [one.at for one in samples] == [0.0, 0.75, 1.5]
    first, second, third = (one.prompt for one in samples)
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024]
    assert first[:512] != third[:512]
    cut = workloads.mooncake(path, 1, Writer(None, True, 1000), Limits(600, 2))
    assert (cut[0].prompt, cut[0].output_tokens) == (first[:600], 2)
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 1"):
        workloads.mooncake(path, 1, Writer(None), Limits())


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,48,10\n"
        "2023-11-16 18:17:05.2299600,30,8\n"
    )
    samples = workloads.azure(path, 10, Writer(None, True, 1000), Limits(), scale=2.0)
    assert [(one.prompt_tokens, one.output_tokens) for one in samples] == [(48, 10), (30, 8)]
    assert [one.at for one in samples] == pytest.approx([0.0, 2.5])
    path.write_text("TIMESTAMP,ContextTokens\nx,3\n")
    with pytest.raises(ConfigError, match=r"trace.csv, line 2"):
        workloads.azure(path, 1, Writer(None), Limits())
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(ConfigError, match="no requests"):
        workloads.azure(path, 1, Writer(None), Limits())


@pytest.mark.parametrize(
    ("workload", "file", "lengths"),
    [
        ("mooncake", "mooncake_conversation.jsonl", [(6758, 500), (7322, 490), (7236, 794)]),
        ("azure", "azure_2023_code.csv", [(4808, 10), (3180, 8), (110, 27)]),
    ],
)
def test_published_traces(workload: str, file: str, lengths: list[tuple[int, int]]) -> None:
    path = DATA / "traces" / file
    if not path.exists():
        pytest.skip(f"no {path}: set CLOVER_DATA")
    made = plan.make(plan.Load(workload, path, 3), Writer(None, True, 1000))
    assert [(one.prompt_tokens, one.output_tokens) for one in made.samples] == lengths
    assert made.offsets[0] == 0.0
    assert made.offsets == sorted(made.offsets)


def samples(count: int) -> list[Sample]:
    return [Sample("x", 1)] * count


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_random_arrivals_keep_the_rate_and_vary_as_asked(burstiness: float) -> None:
    rng = np.random.default_rng(1)
    times = arrivals.offsets(samples(4000), "poisson", 10.0, burstiness, rng)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(400.0, rel=0.02)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_other_arrivals() -> None:
    assert arrivals.offsets(samples(3), "constant", 4.0) == [0.0, 0.25, 0.5]
    assert arrivals.offsets(samples(3), "poisson") == [0.0, 0.0, 0.0]
    traced = [Sample("x", 1, at=one) for one in (3.0, 3.5)]
    assert arrivals.offsets(traced, "trace") == [0.0, 0.5]
    for wrong in ({"rate": 0.0}, {"rate": 1.0, "burstiness": 0.0}):
        with pytest.raises(ConfigError):
            arrivals.offsets(samples(1), "poisson", **wrong)
    with pytest.raises(ConfigError, match="times"):
        arrivals.offsets(samples(1), "trace")


def test_what_a_load_chooses_by_itself() -> None:
    assert plan.Load().arrives == "poisson"
    assert plan.Load("azure", Path("x")).arrives == "trace"
    assert plan.Load("azure", Path("x"), rate=2.0).arrives == "poisson"
    two = plan.Plan([Sample("a", 1)] * 2, [0.0, 1.0])
    described = plan.describe(plan.Load("azure", Path("x"), count=1000), two)
    assert "trace" in described.values()
    assert described["requests"] == 2
    with pytest.raises(ConfigError, match="dataset-path"):
        plan.Load("sharegpt")
    with pytest.raises(ConfigError, match="num-prompts"):
        plan.Load(count=0)
    with pytest.raises(ConfigError, match="range-ratio"):
        Lengths(spread=1.0)
