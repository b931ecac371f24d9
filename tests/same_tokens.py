"""What the same-tokens tests share: settings, their pairwise selection, and the comparison."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cloverinfer import LLM, ModelConfig, SamplingParams

TIE = 1e-3
"""Where the reference's two best logits are closer than this, either token is right."""


@dataclass(frozen=True)
class Case:
    """A prompt and the tokens that the reference generates greedily."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    """Best logit minus second best, at each token."""


def reference(
    model: Any, prompts: Sequence[list[int]], max_tokens: int, together: bool = False
) -> list[Case]:
    """Greedy tokens by transformers' own ``generate``.

    ``together``: all prompts at once, padded on their left, so that a model of some size is read
    once for all of them; logits differ by rounding, far less than ``TIE``. Else one at a time.
    """
    if together:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # several wait for one another, awake, where the cores are busy
        try:
            return _generate(model, prompts, max_tokens)
        finally:
            torch.set_num_threads(threads)
    return [case for prompt in prompts for case in _generate(model, [prompt], max_tokens)]


def _generate(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[Case]:
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    padded = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    result = model.generate(
        torch.tensor(padded, device=model.device),
        max_new_tokens=max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=None,
        attention_mask=torch.tensor(mask, device=model.device),
        pad_token_id=0,
        repetition_penalty=1.0,
    )
    best_nt2 = torch.stack([scores.topk(2).values for scores in result.scores], 1)
    margins_nt = (best_nt2[..., 0] - best_nt2[..., 1]).tolist()
    tokens_nt = result.sequences[:, longest:].tolist()
    return [Case(*each) for each in zip(prompts, tokens_nt, margins_nt, strict=True)]


def reference_of(
    model: Any, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> list[Case]:
    """What ``reference`` generates as far as it agrees with ``outputs``, read in one go for each
    prompt, which is many times as quick: each token is the likeliest after those of ``outputs``
    before it."""
    cases = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
        with torch.inference_mode():
            best = model(ids).logits[0, len(prompt) - 1 :].float().topk(2)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        cases.append(Case(prompt, best.indices[:, 0].tolist(), margins))
    return cases


def check(cases: Sequence[Case], outputs: Sequence[list[int]]) -> None:
    """Token for token the same; where the reference itself is undecided, up to there."""
    for i, (case, tokens) in enumerate(zip(cases, outputs, strict=True)):
        wanted = case.tokens[: len(tokens)]
        if tokens == wanted:
            continue
        at = next(
            j for j, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]
        )
        assert case.margins[at] < TIE, (
            f"case {i} (prompt of {len(case.prompt)}) differs at token {at}: {tokens[at]} instead "
            f"of {wanted[at]}, where the reference's margin is {case.margins[at]:.4f}"
        )


def pairwise(
    factors: Mapping[str, Sequence[Any]], most: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Few settings in which each pair of values of two factors occurs, as far as ``most`` allow."""
    rng = random.Random(seed)
    names = list(factors)
    wanted = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    chosen: list[dict[str, Any]] = []
    while wanted and len(chosen) < most:
        tries = [
            {name: rng.choice(list(values)) for name, values in factors.items()} for _ in range(300)
        ]
        best = max(tries, key=lambda setting: len(_pairs(setting, names) & wanted))
        wanted -= _pairs(best, names)
        chosen.append(best)
    return chosen


def _pairs(setting: Mapping[str, Any], names: Sequence[str]) -> set[tuple[str, Any, str, Any]]:
    return {(a, setting[a], b, setting[b]) for a, b in itertools.combinations(names, 2)}


def run(
    model: str, cases: Sequence[Case], max_tokens: int, strict: bool = True, **fields: Any
) -> list[list[int]]:
    """Outputs of one setting. Every third request is short, so that requests join and leave.

    ``strict`` also checks that no token was computed twice; preemption does compute again.
    """
    limits = [max_tokens if i % 3 else max(1, max_tokens // 4) for i in range(len(cases))]
    params = [
        SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True) for limit in limits
    ]
    with LLM(ModelConfig(model_path=model, dtype="float32"), **fields) as llm:
        completions = llm.generate([case.prompt for case in cases], params)
        if strict:
            check_work(llm, cases, limits)
        check_idle(llm)
    for completion, limit in zip(completions, limits, strict=True):
        assert len(completion.token_ids) == limit
        assert completion.finish_reason == "length"
    return [completion.token_ids for completion in completions]


def check_work(llm: LLM, cases: Sequence[Case], limits: Sequence[int]) -> None:
    """Every role took part, and each token was computed once, where it should be."""
    totals: dict[str, int] = {}
    for row in llm.engine.nodes():
        totals[row["role"]] = totals.get(row["role"], 0) + row["tokens"]
    prompts = sum(len(case.prompt) for case in cases)
    decoded = sum(limits) - len(cases)
    if "prefill" in totals:
        assert 0 < totals["prefill"] <= prompts, "prefill nodes did not compute the prompts once"
    for role in {"dense", "attention", "decode"} & set(totals):
        assert totals[role] == decoded, f"{role} nodes decoded {totals[role]} of {decoded} tokens"


def check_idle(llm: LLM, without: Sequence[str] = ()) -> None:
    """Nothing of any request is left in the scheduler, and its tables agree."""
    scheduler = llm.engine._engine._scheduler
    deadline = time.monotonic() + 60
    nodes = scheduler._state.nodes.values()

    def busy() -> bool:
        return scheduler.has_work or any(node.withheld for node in nodes)

    while busy() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scheduler.has_work
    scheduler.check_integrity()
    for node, free in scheduler.free_blocks().items():
        if node in without:
            continue
        total = next(row["kv_blocks"] for row in llm.engine.nodes() if row["name"] == node)
        assert free == total, f"{node} kept {total - free} blocks"


def settings_id(setting: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in setting.values())
